// Which variant of hopper_forward.cuh serves a problem.
#pragma once

#include "cuda/driver/kernel_source.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {

// The shape of a tile, for heads up to (head_dim, value_dim).
struct HopperForwardTile {
  int head_dim, value_dim;
  int blocks_per_sm;  // of threads
  int warpgroups;     // of 64 query rows
  int keys;           // of a block
  int stages;         // blocks of keys and of values in shared memory
  int q_buffers;
  bool q_in_registers;
  int out_panels;  // of 64 columns, that a warp writes at a time
  int producer_registers, consumer_registers;

  [[nodiscard]] int rows() const { return 64 * warpgroups; }
  [[nodiscard]] int out_panels_of_warp() const;
  [[nodiscard]] bool has_room_for_bias() const { return head_dim <= 128; }  // of a block, in shared memory
};

struct HopperForwardVariant {
  const HopperForwardTile* tile;
  // A head's query tiles see different numbers of keys, and there are so many that a long one and a short one make a
  // piece of work.
  bool paired;
};

// Small tiles where large ones would leave multiprocessors idle.
HopperForwardVariant hopper_forward_variant(const Problem& problem, int multiprocessors);

// Whether the kernel loads the bias by TMA.
bool loads_bias(const Problem& problem, const HopperForwardTile& tile);
KernelSource hopper_forward_source(const Problem& problem, const HopperForwardVariant& variant);

// What the build compiles ahead: every tile in both types, with and without a causal mask or window.
std::vector<KernelSource> hopper_forward_standard_set();

}  // namespace headrace::cuda
