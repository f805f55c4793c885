// Launches backward_statistics.cuh, backward_sinks.cuh, and backward_gradient.cuh for the bias.
#include "cuda/launch/backward_pass.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/driver/context.hpp"
#include "cuda/launch/backward_source.hpp"
#include "cuda/launch/forward_constants.hpp"
#include "cuda/launch/forward_params.hpp"
#include "cuda/launch/tensor_map.hpp"
#include "describe/tensor_view.hpp"

namespace headrace::cuda {
namespace {

constexpr int block_threads = 256;
constexpr float log2_e = 1.4426950408889634f;

// Whether scores are in natural units when lse is subtracted, and not in those of log2: kFinalScores of
// backward_scores.cuh.
bool natural_units(const Problem& p) { return p.softcap > 0 || p.has_alibi || p.has_bias || !has_small_scale(p); }

}  // namespace

HopperForwardParams::Strides3 by_row(const RowStrides& s) { return {s.batch, s.row, s.head}; }
HopperForwardParams::Strides3 by_head(const Problem::LseStrides& s) { return {s.batch, s.head, s.row}; }

bool rows_are_aligned(const void* data, const RowStrides& s) {
  const auto bits = static_cast<std::uintptr_t>(2 * (s.batch | s.row | s.head));
  return (reinterpret_cast<std::uintptr_t>(data) | bits) % tma_alignment == 0;
}

BackwardPass::BackwardPass(const Problem& p, int queries, bool dbias_apart)
    : CudaKernel(p),
      query_tiles_(ceil_div(p.seqlen_q, queries)),
      statistics_(backward_statistics_source(p, queries)),
      statistics_offset_(take(all_query_tiles() * 4 * statistics_words(queries))) {
  check_size(p);
  constexpr std::int64_t limit = std::int64_t{1} << 30;
  if (p.batch * std::max(p.heads_q, p.heads_kv) * ceil_div(std::max(p.seqlen_q, p.seqlen_k), 64) >= limit)
    unsupported(
        fmt::format("k: batch {} x heads {} x seqlen_k {} has too many tiles for the backward pass on CUDA; "
                    "the number of tiles of 64 must be below 2^30",
                    p.batch, p.heads_kv, p.seqlen_k));
  options_ = forward_params(p, {.query_tiles = query_tiles_, .paired = false, .value_chunks = 1, .most_blocks = 1});
  statistics_.load();
  plan_statistics();
  if (p.need_dsinks) sinks_.emplace(backward_sinks_source(queries)).load();
  if (p.need_dbias && dbias_apart) plan_bias(queries);
}

std::size_t BackwardPass::take(std::int64_t bytes) {
  constexpr std::size_t alignment = 128;
  const std::size_t offset = (workspace_bytes_ + alignment - 1) / alignment * alignment;
  workspace_bytes_ = offset + static_cast<std::size_t>(bytes);
  return offset;
}

float* BackwardPass::statistics_in(std::byte* workspace) const {
  return reinterpret_cast<float*>(workspace + statistics_offset_);
}

void BackwardPass::execute(const Buffers& buffers, std::byte* workspace) const {
  const Problem& p = problem_;
  const ContextScope context(p.device_index);
  check_pointers(buffers, workspace);
  if (all_query_tiles() > 0) launch_statistics(buffers, workspace, context);
  if (all_query_tiles() > 0 || p.batch * p.heads_kv * p.seqlen_k > 0) launch_gradients(buffers, workspace, context);
  if (p.need_dsinks && p.heads_q > 0) launch_sinks(buffers, workspace, context);
  if (bias_blocks_ > 0) launch_bias(buffers, workspace, context);
}

void BackwardPass::plan_statistics() {
  const Problem& p = problem_;
  BackwardStatisticsParams& params = statistics_params_;
  params.out_strides = by_row(p.out);
  params.dout_strides = by_row(p.dout);
  params.lse_strides = by_head(p.lse);
  params.dlse_strides = by_head(p.dlse);
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.value_dim = static_cast<int>(p.value_dim);
  params.query_tiles = divisor(query_tiles_);
  params.heads_q = divisor(p.heads_q);
  params.lse_factor = natural_units(p) ? 1.0f : log2_e;
}

void BackwardPass::launch_statistics(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const {
  const Problem& p = problem_;
  const Zeroed zeros = zeroed(workspace);
  BackwardStatisticsParams params = statistics_params_;
  params.out = buffers.out;
  params.dout = buffers.dout;
  params.lse = static_cast<const float*>(buffers.lse);
  params.dlse = static_cast<const float*>(buffers.dlse);
  params.vectors = rows_are_aligned(buffers.out, p.out) && rows_are_aligned(buffers.dout, p.dout);
  params.statistics = statistics_in(workspace);
  params.dq = zeros.dq;
  params.dq_floats = zeros.dq_floats;
  params.turns = zeros.turns;
  params.tickets = zeros.tickets;
  void* arguments[] = {&params};
  launch(statistics_.in(context), static_cast<unsigned>(all_query_tiles()), block_threads, buffers.stream, arguments);
}

void BackwardPass::launch_sinks(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const {
  const Problem& p = problem_;
  BackwardSinksParams params{.sinks = buffers.sinks,
                             .sinks_stride = p.sinks_stride,
                             .dsinks = buffers.dsinks,
                             .dsinks_stride = p.dsinks_stride,
                             .statistics = statistics_in(workspace),
                             .batch = static_cast<int>(p.batch),
                             .heads_q = static_cast<int>(p.heads_q),
                             .seqlen_q = static_cast<int>(p.seqlen_q),
                             .query_tiles = static_cast<int>(query_tiles_),
                             .to_log2 = natural_units(p) ? log2_e : 1.0f};
  void* arguments[] = {&params};
  launch(sinks_->in(context), static_cast<unsigned>(p.heads_q), block_threads, buffers.stream, arguments);
}

BackwardGradientParams BackwardPass::gradient_params() const {
  const Problem& p = problem_;
  const auto tensor = [](const RowStrides& strides, std::int64_t rows, std::int64_t columns) {
    return BackwardTensor{nullptr, by_row(strides), static_cast<int>(rows), static_cast<int>(columns)};
  };
  BackwardGradientParams params{};
  params.forward = options_;
  params.q = tensor(p.q, p.seqlen_q, p.head_dim);
  params.k = tensor(p.k, p.seqlen_k, p.head_dim);
  params.v = tensor(p.v, p.seqlen_k, p.value_dim);
  params.dout = tensor(p.dout, p.seqlen_q, p.value_dim);
  params.group = divisor(p.group());
  params.query_tiles = static_cast<int>(query_tiles_);
  params.batch = static_cast<int>(p.batch);
  params.heads_q = static_cast<int>(p.heads_q);
  return params;
}

void BackwardPass::set_pointers(BackwardGradientParams& params, const Buffers& buffers, std::byte* workspace) const {
  cuda::set_pointers(params.forward, buffers);
  params.q.data = buffers.q;
  params.k.data = buffers.k;
  params.v.data = buffers.v;
  params.dout.data = buffers.dout;
  params.statistics = statistics_in(workspace);
}

void BackwardPass::plan_bias(int queries) {
  const Problem& p = problem_;
  const auto tiles = [](std::int64_t size) { return ceil_div(size, gradient_tile); };
  const std::int64_t* shape = p.bias_shape;
  const std::int64_t rows = tiles(shape[2]), keys = tiles(shape[3]);
  bias_blocks_ = static_cast<unsigned>(shape[0] * shape[1] * rows * keys);
  bias_.emplace(backward_gradient_source(p, BackwardTarget::bias, queries)).load();
  BackwardGradientParams& params = bias_params_;
  params = gradient_params();
  params.heads = divisor(shape[1]);
  params.tiles = divisor(rows * keys);
  params.dbias_strides = {p.dbias.batch, p.dbias.head, p.dbias.query, p.dbias.key};
  const std::int64_t whole[4] = {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k};
  for (int n = 0; n < 4; ++n) params.bias_is_full[n] = shape[n] == whole[n] && shape[n] != 1;
  params.bias_key_tiles = static_cast<int>(keys);
}

void BackwardPass::launch_bias(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const {
  BackwardGradientParams params = bias_params_;
  set_pointers(params, buffers, workspace);
  params.to.to = buffers.dbias;
  void* arguments[] = {&params};
  launch(bias_->in(context), bias_blocks_, gradient_threads, buffers.stream, arguments);
}

}  // namespace headrace::cuda
