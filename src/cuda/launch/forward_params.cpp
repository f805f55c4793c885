#include "cuda/launch/forward_params.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/launch/cuda_kernel.hpp"
#include "describe/dropout.hpp"

namespace headrace::cuda {
namespace {

constexpr int redo_bits = 2048;  // of hopper_forward's list of tiles to be done again

void set_softcap(HopperForwardParams& params, const Problem& p) {
  const auto narrowed = [](double x) {
    constexpr double largest = std::numeric_limits<float>::max();
    return static_cast<float>(std::clamp(x, -largest, largest));
  };
  // Below 2^-100 a cap makes all scores equal in any precision.
  const double cap = std::max(p.softcap, 0x1p-100), ratio = p.scale / cap;
  params.softcap = narrowed(cap);
  params.scale_over_softcap = narrowed(ratio);
  params.softcap_straight_below = narrowed(0.5 / std::abs(ratio));
  double factor = cap * ratio / std::log(2.0);
  for (int n = 0; n < 5; ++n, factor *= ratio * ratio) {
    params.softcap_polynomial[n] = narrowed(static_cast<double>(kTanhRatio[n]) * factor);
    if (std::abs(factor) > std::numeric_limits<float>::max()) params.softcap_straight_below = -1.0f;  // never
  }
}

}  // namespace

Divisor divisor(std::int64_t d) { return Divisor::of(static_cast<unsigned>(std::max<std::int64_t>(d, 1))); }

void check_size(const Problem& p) {
  constexpr std::int64_t limit = std::int64_t{1} << 30, smallest_tile = 64;
  const std::int64_t tiles = ceil_div(p.seqlen_q, smallest_tile) * p.batch * p.heads_q;
  if (tiles >= limit || p.seqlen_q >= limit || p.seqlen_k >= limit)
    unsupported(
        fmt::format("q: batch {} x heads {} x seqlen_q {} (seqlen_k {}) has too many tiles; on CUDA seqlens and "
                    "the number of tiles of {} queries must be below 2^30",
                    p.batch, p.heads_q, p.seqlen_q, p.seqlen_k, smallest_tile));
}

HopperForwardParams forward_params(const Problem& p, const ForwardSchedule& schedule) {
  const auto pair = [](const PairStrides& s) { return HopperForwardParams::Strides4{s.batch, s.head, s.query, s.key}; };
  HopperForwardParams params{};
  params.out_strides = {p.out.batch, p.out.row, p.out.head};
  params.lse_strides = {p.lse.batch, p.lse.head, p.lse.row};
  params.bias_strides = pair(p.bias);
  params.mask_strides = pair(p.mask);
  params.block_strides = pair(p.block_mask);
  // A block longer than any sequence is as good as one of 2^30.
  params.block_q = divisor(std::min<Index>(p.block_q, Index{1} << 30));
  params.block_k = divisor(std::min<Index>(p.block_k, Index{1} << 30));
  params.alibi_batch = p.alibi_batch_stride;
  params.alibi_head = p.alibi_head_stride;
  params.sinks_stride = p.sinks_stride;
  if (p.batch > 0) {
    constexpr Index limit = Index{1} << 30;
    params.band_lo = static_cast<int>(std::clamp(p.band(0).lo, -limit, limit - 1));
    params.band_hi = static_cast<int>(std::clamp(p.band(0).hi, -limit, limit - 1));
  }
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.seqlen_k = static_cast<int>(p.seqlen_k);
  params.value_dim = static_cast<int>(p.value_dim);
  params.heads_q = divisor(p.heads_q * schedule.value_chunks);
  params.group = divisor(p.group());
  params.scale = static_cast<float>(p.scale);
  set_softcap(params, p);
  const Dropout dropout{p.dropout_p, p.seed};
  params.seed = p.seed;
  params.dropout_threshold = dropout.threshold();
  params.dropout_kept = static_cast<float>(dropout.kept_scale());
  const std::int64_t query_tiles = schedule.query_tiles;
  params.query_tiles = static_cast<int>(query_tiles);
  params.pieces = divisor(schedule.paired ? (query_tiles + 1) / 2 : query_tiles);
  const std::int64_t heads = p.batch * p.heads_q * schedule.value_chunks;
  params.all_pieces = query_tiles == 0 ? 0 : params.pieces.divisor * static_cast<unsigned>(heads);
  params.blocks = std::min(static_cast<unsigned>(schedule.most_blocks), params.all_pieces);
  const std::int64_t of_block = 2 * ceil_div(params.all_pieces, std::max(params.blocks, 1u)) + 2;
  while ((of_block >> params.redo_shift) >= redo_bits) ++params.redo_shift;
  return params;
}

void set_pointers(HopperForwardParams& params, const Buffers& buffers) {
  params.out = buffers.out;
  params.lse = static_cast<float*>(buffers.lse);
  params.bias = buffers.bias;
  params.mask = buffers.mask;
  params.block_mask = buffers.block_mask;
  params.alibi_slopes = buffers.alibi_slopes;
  params.sinks = buffers.sinks;
}

}  // namespace headrace::cuda
