// Which variant of hopper_forward.cuh serves a problem.
#pragma once

#include "cuda/driver/kernel_source.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {

// The shape of a tile, for heads up to (head_dim, value_dim).
struct HopperForwardTile {
  int head_dim, value_dim;
  int warpgroups;  // of 64 query rows
  int keys;        // of a block
  int stages;      // blocks of keys and of values in shared memory
  int q_buffers;
  bool q_in_registers;
  int producer_registers, consumer_registers;
};

// The tile for a problem's dimensions; the last one, 256 x 256, holds all.
const HopperForwardTile& hopper_forward_tile(std::int64_t head_dim, std::int64_t value_dim);

// Whether a head's query tiles see different numbers of keys, so that a long one and a short one make a piece of work.
bool paired(const Problem& problem);

KernelSource hopper_forward_source(const Problem& problem);

// What the build compiles ahead: every tile in both types, with and without a causal mask or window.
std::vector<KernelSource> hopper_forward_standard_set();

}  // namespace headrace::cuda
