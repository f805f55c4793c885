// Which variants of the backward kernels serve a problem.
#pragma once

#include <vector>

#include "cuda/driver/kernel_source.hpp"
#include "describe/problem.hpp"

namespace headrace::cuda {

// The shape of a tile, for heads up to (head_dim, value_dim).
struct HopperBackwardTile {
  int head_dim, value_dim;
  int keys, queries;  // of a step
  int stages;         // steps of q and dout in shared memory
  // hopper_backward: steps of a loaded bias there, and of q and dout beside them.
  int bias_stages, stages_beside_bias;
  int prefetch;            // hopper_backward: groups of 8 queries whose statistics are read a step ahead
  int k_stages, v_stages;  // hopper_backward_queries: steps of k and of v in shared memory

  // Whether dq has a pass of its own: hopper_backward_keys and hopper_backward_queries in place of hopper_backward.
  [[nodiscard]] bool two_passes() const { return keys == 64; }
  static constexpr int threads = 384, query_rows = 128;  // query_rows: of a tile of hopper_backward_queries
};

const HopperBackwardTile& hopper_backward_tile(const Problem& problem);

// hopper_backward, or hopper_backward_keys and hopper_backward_queries.
std::vector<KernelSource> hopper_backward_sources(const Problem& problem, const HopperBackwardTile& tile);
KernelSource backward_convert_source(const Problem& problem, const HopperBackwardTile& tile);

// queries: of a tile of the statistics.
KernelSource backward_statistics_source(const Problem& problem, int queries);
KernelSource backward_sinks_source(int queries);
KernelSource backward_bias_zeros_source(const Problem& problem, const HopperBackwardTile& tile);

enum class BackwardTarget { dq, dk, dv, bias };  // TARGET of backward_gradient.cuh
inline constexpr int gradient_tile = 64, gradient_threads = 128;
// That a block of threads sums; more do not fit the registers.
constexpr int gradient_columns(std::int64_t columns) { return columns <= 64 ? 64 : 128; }
KernelSource backward_gradient_source(const Problem& problem, BackwardTarget target, int queries);

// Whether key tiles are done in an order in which each waits for those before it alone, and none need to be done at the
// same time: under a band, and where there are few.
bool is_done_in_order(const Problem& problem, const HopperBackwardTile& tile);
// Whether key tiles add to dq in a fixed order: where the result must be deterministic, and where that is faster, since
// the first need not add.
bool takes_turns(const Problem& problem, const HopperBackwardTile& tile);
// Whether dq is summed onto zeros, and not stored by the key tile that comes first.
bool accumulates_onto_zeros(const Problem& problem, const HopperBackwardTile& tile);

// Whether hopper_backward loads the bias by TMA.
bool loads_bias(const Problem& problem, const HopperBackwardTile& tile);

// Whether hopper_backward makes the gradient of the bias itself: where that has an element for every score, and there
// are not so many options that the kernel would be too long.
bool makes_dbias(const Problem& problem, const HopperBackwardTile& tile);
// Whether its rows lie on multiples of 16 bytes, and it is written as many at a time.
bool has_dbias_in_vectors(const Problem& problem);
// Whether hopper_backward stores it by TMA.
bool stores_dbias_by_tma(const Problem& problem, const HopperBackwardTile& tile);

// What the build compiles ahead: every tile in both types, and float32.
std::vector<KernelSource> backward_standard_set();

}  // namespace headrace::cuda
