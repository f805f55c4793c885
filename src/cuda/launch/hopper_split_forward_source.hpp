// Which variant of hopper_split_forward.cuh serves a float32 problem, and of split_rows.cuh before it.
#pragma once

#include <vector>

#include "cuda/driver/kernel_source.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {

// The shape of a tile, for heads up to head_dim; of wider values it takes value_dim columns at a time.
struct HopperSplitTile {
  int head_dim, value_dim;
  int keys;  // of a block
  bool q_in_registers;

  static constexpr int warpgroups = 2, rows = 64 * warpgroups, stages = 2;
};

struct HopperSplitVariant {
  const HopperSplitTile* tile;
  bool paired;  // as in HopperForwardVariant

  [[nodiscard]] std::int64_t value_chunks(const Problem& problem) const;
};

HopperSplitVariant hopper_split_variant(const Problem& problem, int multiprocessors);

KernelSource hopper_split_forward_source(const Problem& problem, const HopperSplitVariant& variant);
KernelSource split_rows_source(const Problem& problem);

// What the build compiles ahead: every tile with and without a causal mask or window, and all of split_rows.
std::vector<KernelSource> hopper_split_standard_set();

}  // namespace headrace::cuda
