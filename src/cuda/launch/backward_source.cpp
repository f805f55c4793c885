#include "cuda/launch/backward_source.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "cuda/launch/forward_constants.hpp"
#include "cuda/launch/tma_rows.hpp"
#include "describe/tensor_view.hpp"

namespace headrace::cuda {
namespace {

// Chosen by measurement on an H200: as many stages as fit the 227 KiB of shared memory, as much prefetch as fits the
// registers.
constexpr std::array<HopperBackwardTile, 5> backward_tiles = {{
    {64, 64, 128, 128, 2, 1, 2, 2, 0, 0},
    {96, 96, 128, 64, 3, 2, 2, 4, 0, 0},
    {128, 128, 128, 64, 3, 2, 2, 4, 0, 0},
    {192, 128, 64, 64, 3, 0, 0, 0, 3, 2},
    {256, 256, 64, 64, 2, 0, 0, 0, 2, 1},
}};

KernelSource with(KernelSource source, const Constants& more) {
  source.constants.insert(source.constants.end(), more.begin(), more.end());
  return source;
}

std::vector<KernelSource> main_sources(const HopperBackwardTile& t, bool float16, bool small_scale, bool deterministic,
                                       bool loads_bias, int dbias, const Constants& options) {
  const auto source = [&](const std::string& name, const Constants& shape) {
    KernelSource result{.entry = name,
                        .file = name + ".cuh",
                        .constants = {{"FLOAT16", float16},
                                      {"HEAD_DIM", t.head_dim},
                                      {"VALUE_DIM", t.value_dim},
                                      {"KEYS", t.keys},
                                      {"QUERIES", t.queries},
                                      {"SMALL_SCALE", small_scale}}};
    return with(with(std::move(result), shape), options);
  };
  if (t.two_passes())
    return {source("hopper_backward_keys", {{"STAGES", t.stages}}),
            source("hopper_backward_queries", {{"K_STAGES", t.k_stages}, {"V_STAGES", t.v_stages}})};
  return {source("hopper_backward", {{"STAGES", loads_bias ? t.stages_beside_bias : t.stages},
                                     {"BIAS_STAGES", loads_bias ? t.bias_stages : 0},
                                     {"PREFETCH", t.prefetch},
                                     {"DETERMINISTIC", deterministic},
                                     {"DBIAS", dbias}})};
}

KernelSource statistics_source(hr_dtype dtype, std::int64_t value_dim, int queries) {
  return {.entry = "backward_statistics",
          .file = "backward_statistics.cuh",
          .constants = {{"FLOAT32", dtype == HR_FLOAT32},
                        {"FLOAT16", dtype == HR_FLOAT16},
                        {"QUERIES", queries},
                        {"LANES", value_dim <= 64    ? 8
                                  : value_dim <= 128 ? 16
                                                     : 32}}};
}

KernelSource gradient_source(hr_dtype dtype, BackwardTarget target, std::int64_t columns, int queries, bool small_scale,
                             const Constants& options) {
  KernelSource source{.entry = "backward_gradient",
                      .file = "backward_gradient.cuh",
                      .constants = {{"TARGET", static_cast<int>(target)},
                                    {"FLOAT32", dtype == HR_FLOAT32},
                                    {"FLOAT16", dtype == HR_FLOAT16},
                                    {"COLUMNS", gradient_columns(columns)},
                                    {"QUERIES", queries},
                                    {"SMALL_SCALE", small_scale}}};
  return with(std::move(source), options);
}

KernelSource convert_source(const HopperBackwardTile& t, bool float16, bool accumulated) {
  return {.entry = "backward_convert",
          .file = "backward_convert.cuh",
          .constants = {{"FLOAT16", float16}, {"QUERIES", t.queries}, {"ACCUMULATED", accumulated}}};
}

}  // namespace

const HopperBackwardTile& hopper_backward_tile(const Problem& p) {
  return *std::find_if(backward_tiles.begin(), backward_tiles.end() - 1, [&](const HopperBackwardTile& t) {
    return p.head_dim <= t.head_dim && p.value_dim <= t.value_dim;
  });
}

bool is_done_in_order(const Problem& p, const HopperBackwardTile& tile) {
  constexpr std::int64_t few = 16;  // then the last begins soon after the first
  return is_banded(p) || p.seqlen_k <= few * tile.keys;
}

bool takes_turns(const Problem& p, const HopperBackwardTile& tile) {
  return p.deterministic || is_done_in_order(p, tile);
}

bool accumulates_onto_zeros(const Problem& p, const HopperBackwardTile& tile) {
  return !takes_turns(p, tile) || p.has_block_mask;
}

bool loads_bias(const Problem& p, const HopperBackwardTile& tile) { return !tile.two_passes() && tma_walks_bias(p); }

bool makes_dbias(const Problem& p, const HopperBackwardTile& tile) {
  const std::int64_t scores[4] = {p.batch, p.heads_q, p.seqlen_q, p.seqlen_k};
  // Two long options at most: no kManyOptions of options.cuh.
  const int other_options = (p.softcap > 0) + p.has_alibi + p.has_mask + p.has_block_mask + (p.dropout_p > 0);
  return p.need_dbias && !tile.two_passes() && other_options <= 1 && std::equal(scores, scores + 4, p.bias_shape);
}

bool has_dbias_in_vectors(const Problem& p) {
  return p.need_dbias && p.dbias_aligned && p.dbias.key == 1 &&
         p.seqlen_k * dtype_size(p.bias_dtype) % tma_alignment == 0 &&
         tma_obstacle(pair_rows(p, p.dbias), p.bias_dtype).empty();
}

bool stores_dbias_by_tma(const Problem& p, const HopperBackwardTile& tile) {
  // ds is the gradient of what is capped, and in float16 it is never infinite.
  const bool is_ds = p.dtype == HR_BFLOAT16 && p.bias_dtype == p.dtype && p.softcap == 0;
  return makes_dbias(p, tile) && is_ds && has_dbias_in_vectors(p);
}

std::vector<KernelSource> hopper_backward_sources(const Problem& p, const HopperBackwardTile& tile) {
  return main_sources(tile, p.dtype == HR_FLOAT16, has_small_scale(p), takes_turns(p, tile), loads_bias(p, tile),
                      stores_dbias_by_tma(p, tile) ? 2
                      : makes_dbias(p, tile)       ? 1
                                                   : 0,
                      option_constants(p, loads_bias(p, tile)));
}
KernelSource backward_statistics_source(const Problem& p, int queries) {
  return statistics_source(p.dtype, p.value_dim, queries);
}
KernelSource backward_gradient_source(const Problem& p, BackwardTarget target, int queries) {
  const std::int64_t columns = target == BackwardTarget::bias ? 0
                               : target == BackwardTarget::dv ? p.value_dim
                                                              : p.head_dim;
  return gradient_source(p.dtype, target, columns, queries, has_small_scale(p), option_constants(p));
}
KernelSource backward_convert_source(const Problem& p, const HopperBackwardTile& tile) {
  return convert_source(tile, p.dtype == HR_FLOAT16, accumulates_onto_zeros(p, tile));
}
KernelSource backward_bias_zeros_source(const Problem& p, const HopperBackwardTile& tile) {
  KernelSource source{.entry = "backward_bias_zeros",
                      .file = "backward_bias_zeros.cuh",
                      .constants = {{"FLOAT16", p.dtype == HR_FLOAT16},
                                    {"KEYS", tile.keys},
                                    {"QUERIES", tile.queries},
                                    {"VECTORS", has_dbias_in_vectors(p)}}};
  return with(std::move(source), option_constants(p));
}
KernelSource backward_sinks_source(int queries) {
  return {.entry = "backward_sinks", .file = "backward_sinks.cuh", .constants = {{"QUERIES", queries}}};
}

std::vector<KernelSource> backward_standard_set() {
  std::vector<KernelSource> set;
  const auto add = [&](const KernelSource& source) {
    if (std::find(set.begin(), set.end(), source) == set.end()) set.push_back(source);
  };
  for (const HopperBackwardTile& tile : backward_tiles) {
    for (const bool float16 : {false, true}) {
      for (const bool deterministic : {false, true}) {
        for (const KernelSource& source : main_sources(tile, float16, true, deterministic, false, 0, plain_constants()))
          add(source);
        if (!tile.two_passes()) add(convert_source(tile, float16, !deterministic));
      }
      add(statistics_source(float16 ? HR_FLOAT16 : HR_BFLOAT16, tile.value_dim, tile.queries));
    }
  }
  for (const int columns : {64, 128, 256}) {
    add(statistics_source(HR_FLOAT32, columns, gradient_tile));
    if (columns > gradient_columns(columns)) continue;
    for (const BackwardTarget target : {BackwardTarget::dq, BackwardTarget::dk, BackwardTarget::dv})
      add(gradient_source(HR_FLOAT32, target, columns, gradient_tile, true, plain_constants()));
  }
  return set;
}

}  // namespace headrace::cuda
