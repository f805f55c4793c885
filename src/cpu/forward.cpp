// Streaming attention, forward (FlashAttention-2, Dao 2023, algorithm 1, for a CPU's caches): keys and
// values pass through the cache in tiles; each query row carries its running maximum, sum and output.
#include "cpu/simd/target.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <algorithm>
#include <cmath>

#include "cpu/kernels.hpp"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/scores-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "headrace/streaming.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

// The scratch memory of one task. Row r of query tile t is row t * rows_per_tile + r of the state.
template <typename C>
struct ForwardScratch {
  C *q, *kt, *v, *scores, *out, *max, *sum, *row;
  ForwardScratch(const ForwardPlan& plan, std::byte* base)
      : q(reinterpret_cast<C*>(base + plan.q)),
        kt(reinterpret_cast<C*>(base + plan.kt)),
        v(reinterpret_cast<C*>(base + plan.v)),
        scores(reinterpret_cast<C*>(base + plan.scores)),
        out(reinterpret_cast<C*>(base + plan.out)),
        max(reinterpret_cast<C*>(base + plan.max)),
        sum(reinterpret_cast<C*>(base + plan.sum)),
        row(reinterpret_cast<C*>(base + plan.row)) {}
};

// The state that a task on one part of the keys leaves for merge_splits.
template <typename C>
struct PartialState {
  C *out, *max, *sum;
  C* value_scale;  // one for all rows
  PartialState(const ForwardPlan& plan, std::byte* shared, std::size_t task) {
    const Index rows = plan.tiles_per_task * round_up(tile_q, kBlockRows);
    out = reinterpret_cast<C*>(shared + task * plan.partial_bytes);
    max = out + rows * plan.ld_out;
    sum = max + rows;
    value_scale = sum + rows;
  }
};

// The maximum of s[begin, end); NaN may be passed over. Four chains, since one would wait for each maximum.
template <typename C>
HWY_INLINE C row_max(const C* HWY_RESTRICT s, Index begin, Index end) {
  const Wide<C> d;
  const Index n = lanes<C>();
  auto m0 = hn::Set(d, kMinusInf<C>), m1 = m0, m2 = m0, m3 = m0;
  Index c = begin;
  for (; c + 4 * n <= end; c += 4 * n) {
    m0 = hn::Max(hn::LoadU(d, s + c), m0);
    m1 = hn::Max(hn::LoadU(d, s + c + n), m1);
    m2 = hn::Max(hn::LoadU(d, s + c + 2 * n), m2);
    m3 = hn::Max(hn::LoadU(d, s + c + 3 * n), m3);
  }
  for (; c < end; c += n) m0 = hn::Max(hn::LoadU(d, s + c), m0);
  return hn::GetLane(hn::MaxOfLanes(d, hn::Max(hn::Max(m0, m1), hn::Max(m2, m3))));
}

// Scores to unnormalised probabilities, in place, with the row's state (maximum, vector of partial
// sums, output) moved to the new maximum.
template <typename C>
HWY_NOINLINE void softmax_row(C* HWY_RESTRICT s, Index begin, Index end, C* HWY_RESTRICT max, C* HWY_RESTRICT sums,
                              C* HWY_RESTRICT out, Index out_size) {
  const Wide<C> d;
  const Index n = lanes<C>();
  C tile_max = row_max(s, begin, end);
  if (tile_max == kMinusInf<C>) {
    // Nothing visible, unless a NaN hides behind the maximum: then the row is NaN.
    const C* found = std::find_if(s + begin, s + end, [](C x) { return x != kMinusInf<C>; });
    if (found == s + end) {
      std::fill(s + begin, s + end, C{0});
      return;
    }
    tile_max = *found;
  }
  const C old_max = *max;
  if (!(tile_max <= old_max)) {
    *max = tile_max;
    if (old_max != kMinusInf<C>) {
      const auto alpha = hn::Set(d, std::exp(old_max - tile_max));
      hn::StoreU(hn::Mul(alpha, hn::LoadU(d, sums)), d, sums);
      for (Index c = 0; c < out_size; c += n) hn::StoreU(hn::Mul(alpha, hn::LoadU(d, out + c)), d, out + c);
    }
  }
  const auto m = hn::Set(d, *max);
  auto sum = hn::Zero(d);
  for (Index c = begin; c < end; c += n) {
    const auto p = exp_nonpositive(d, hn::Sub(hn::LoadU(d, s + c), m));
    hn::StoreU(p, d, s + c);
    sum = hn::Add(sum, p);
  }
  hn::StoreU(hn::Add(hn::LoadU(d, sums), sum), d, sums);
}

// A tile of keys and values: packed, and the next one's rows to prefetch meanwhile.
template <typename C>
struct KeyTile {
  Range keys;
  C k_magnitude = 0;
  RightRows<C> v;
  Rows next_k, next_v;
};

// Values are summed with weights up to 1 before they are divided by the sum of weights, so large ones could
// overflow where their mean does not: from this magnitude on they are summed scaled down, exactly.
template <typename C>
inline constexpr C kLargeValue = std::is_same_v<C, float> ? C(0x1p80) : C(0x1p900);
template <typename C>
inline constexpr C kLargeValueScale = std::is_same_v<C, float> ? C(0x1p-64) : C(0x1p-128);

// One query tile against one key tile. next: the part of the next key tile's rows to prefetch.
template <typename C>
void forward_tile(const Problem& p, const Buffers& buffers, Index b, const QueryTile& tile, TileKind kind,
                  C q_magnitude, KeyTile<C>& key_tile, Range next, const ForwardScratch<C>& scratch, const C* q, C* out,
                  C* max, C* sum, Index ld_out) {
  const Range keys = key_tile.keys;
  RightRows<C>& v = key_tile.v;
  const Index n = lanes<C>();
  const Index count = keys.size();
  const Index group_count = ceil_div(tile.size(), kBlockRows);
  const ScoreRules<C> head_rules(p, buffers, b, tile.head);
  GroupColumns groups[kMaxGroups];
  for (Index g = 0; g < group_count; ++g) {
    groups[g] = group_columns<C>(head_rules.vis, kind, tile, g, keys.begin, count);
  }

  score_product(groups, group_count, count, p.head_dim, q, scratch.kt, scratch.scores,
                may_overflow(q_magnitude, key_tile.k_magnitude, p.head_dim));

  const bool plain = head_rules.plain(kind);
  const Dropout dropout{p.dropout_p, p.seed};
  for (Index g = 0; g < group_count; ++g) {
    const Index first = next.begin + g * next.size() / group_count;
    const Index last = next.begin + (g + 1) * next.size() / group_count;
    prefetch(key_tile.next_k, first, last);
    prefetch(key_tile.next_v, first, last);
    const Index begin = groups[g].begin, end = groups[g].end;
    if (begin >= end) continue;
    const Index rounded = begin + round_up(end - begin, n);
    for (Index r = g * kBlockRows; r < g * kBlockRows + groups[g].rows; ++r) {
      C* s = scratch.scores + r * tile_stride;
      const Index h = tile.head_of(r), i = tile.row_of(r);
      if (plain) {
        std::fill(s + end, s + rounded, kMinusInf<C>);
      } else {
        finish_scores(h == tile.head ? head_rules : ScoreRules<C>(p, buffers, b, h), kind, i, keys.begin, begin, end, s,
                      static_cast<C*>(nullptr), scratch.row);
      }
      softmax_row(s, begin, rounded, max + r, sum + r * n, out + r * ld_out, ld_out);
      if (dropout.active()) {
        dropout_factors<C>(dropout, b, h, i, keys.begin, begin, end, scratch.row);
        for (Index c = begin; c < end; ++c) s[c] *= scratch.row[c];
      }
    }
  }

  if (head_rules.hides(kind)) v.isolate_bad();
  add_tile_product(groups, group_count, scratch.scores, v, out, ld_out, ld_out / n);
  for (Index bad = 0; bad < v.bad_count; ++bad) {
    const Index j = v.bad[bad];
    for (Index r = 0; r < tile.size(); ++r) {
      if (!ScoreRules<C>(p, buffers, b, tile.head_of(r)).visible(tile.row_of(r), keys.begin + j)) continue;
      v.add_bad(j, scratch.scores[r * tile_stride + j], out + r * ld_out);
    }
  }
}

// Rows of the output: out / sum, and lse, with the sink as one more key that has no value.
template <typename C>
void write_rows(const ForwardPlan& plan, const Buffers& buffers, Index b, const QueryTile& tile, const C* out,
                const C* max, const C* sums, C value_scale) {
  const Problem& p = *plan.problem;
  const Index batch = p.ragged ? 0 : b, q_begin = p.sequences[static_cast<std::size_t>(b)].q_begin;
  const Rows rows_ahead{.data = buffers.out,
                        .dtype = p.dtype,
                        .offset = p.out.at(batch, q_begin + tile.row, tile.head),
                        .stride = p.out.row,
                        .count = tile.heads == 1 ? tile.rows : 0,
                        .size = p.value_dim};
  for (Index r = 0; r < tile.size(); ++r) {
    const Index h = tile.head_of(r), row = q_begin + tile.row_of(r);
    prefetch(rows_ahead, r + 8, r + 9);
    SoftmaxState<double> state{static_cast<double>(max[r]), static_cast<double>(sums[r])};
    double kept = 1.0;
    if (p.has_sinks) kept = state.update(static_cast<double>(buffers.sinks[h * p.sinks_stride])).kept;
    const auto result = state.finalize();
    with_elements<C>(buffers.out, p.dtype, [&](auto* dst) HEADRACE_ATTR {
      narrow_row(out + r * plan.ld_out, static_cast<C>(kept * result.scale / static_cast<double>(value_scale)),
                 p.value_dim, dst + p.out.at(batch, row, h));
    });
    if (p.has_lse) store_element(buffers.lse, p.lse_dtype, p.lse.at(batch, h, row), result.lse);
  }
}

template <typename C>
void forward_task(const ForwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace) {
  const Problem& p = *plan.problem;
  const ForwardTask& task = plan.tasks[index];
  const Index b = task.sequence, n = lanes<C>();
  const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
  const Index batch = p.ragged ? 0 : b;
  const ForwardScratch<C> scratch(plan, workspace.scratch);
  const Index rows_per_tile = round_up(tile_q, kBlockRows);

  QueryTile tiles[max_tiles_per_task];
  C q_magnitude[max_tiles_per_task];
  // The key tiles of this task's part of the keys that each query tile sees. They begin at multiples of
  // tile_k of the sequence, and a query tile's parts depend on it alone: the bits of a row do not depend
  // on its neighbours.
  Range visited[max_tiles_per_task];
  Range all{ceil_div(seq.k_len, tile_k), 0};
  for (Index t = 0; t < task.count; ++t) {
    tiles[t] = plan.query_tile(seq.q_len, task.head_kv, task.first + t);
    const QueryTile& tile = tiles[t];
    C* q = scratch.q + t * rows_per_tile * p.head_dim;
    pack_transposed<C>({.data = buffers.q,
                        .dtype = p.dtype,
                        .offset = p.q.at(batch, seq.q_begin + tile.row, tile.head),
                        .stride = p.q.row,
                        .count = tile.size(),
                        .size = p.head_dim,
                        .inner = tile.heads == 1 ? 0 : tile.rows,
                        .outer_stride = p.q.head},
                       Scaling<C>(p.scale).before, kBlockRows, q);
    q_magnitude[t] = max_magnitude(q, round_up(tile.size(), kBlockRows) * p.head_dim);
    const Range keys = visibility(p, buffers, b, tile.head).keys_of_rows({tile.row, tile.row + tile.rows});
    if (keys.empty()) continue;
    const Index begin = keys.begin / tile_k, count = ceil_div(keys.end, tile_k) - begin;
    visited[t] = {begin + count * task.split / plan.splits, begin + count * (task.split + 1) / plan.splits};
    all = {std::min(all.begin, visited[t].begin), std::max(all.end, visited[t].end)};
  }
  for (Index t = 0; t < task.count; ++t) {
    const Index row = t * rows_per_tile, size = tiles[t].size();
    std::fill_n(scratch.out + row * plan.ld_out, size * plan.ld_out, C{0});
    std::fill_n(scratch.max + row, size, kMinusInf<C>);
    std::fill_n(scratch.sum + row * n, size * n, C{0});
  }

  C value_scale = 1;
  const auto rows_of = [&](const void* data, const RowStrides& strides, Range keys, Index size) {
    return Rows{.data = data,
                .dtype = p.dtype,
                .offset = strides.at(batch, seq.k_begin + keys.begin, task.head_kv),
                .stride = strides.row,
                .count = keys.size(),
                .size = size};
  };
  for (Index index_k = all.begin; index_k < all.end; ++index_k) {
    KeyTile<C> key_tile;
    key_tile.keys = {index_k * tile_k, std::min<Index>(seq.k_len, (index_k + 1) * tile_k)};
    bool packed = false;
    for (Index t = 0; t < task.count; ++t) {
      if (index_k < visited[t].begin || index_k >= visited[t].end) continue;
      const TileKind kind = classify(p, buffers, b, tiles[t], key_tile.keys);
      if (kind == TileKind::hidden) continue;
      if (!packed) {
        packed = true;
        pack_transposed<C>(rows_of(buffers.k, p.k, key_tile.keys, p.head_dim), C{1}, panel_width<C>(), scratch.kt);
        key_tile.k_magnitude = max_magnitude(scratch.kt, round_up(key_tile.keys.size(), panel_width<C>()) * p.head_dim);
        key_tile.v = RightRows<C>(rows_of(buffers.v, p.v, key_tile.keys, p.value_dim), scratch.v);
        if (value_scale == C{1} && key_tile.v.magnitude() >= kLargeValue<C>) {
          value_scale = kLargeValueScale<C>;
          std::transform(scratch.out, scratch.out + task.count * rows_per_tile * plan.ld_out, scratch.out,
                         [](C x) { return x * kLargeValueScale<C>; });
        }
        if (value_scale != C{1}) key_tile.v.scale(value_scale);
        const Range next{key_tile.keys.end, index_k + 1 < all.end
                                                ? std::min<Index>(seq.k_len, key_tile.keys.end + tile_k)
                                                : key_tile.keys.end};
        if (!next.empty()) {
          key_tile.next_k = rows_of(buffers.k, p.k, next, p.head_dim);
          key_tile.next_v = rows_of(buffers.v, p.v, next, p.value_dim);
        }
      }
      const Index row = t * rows_per_tile;
      forward_tile(p, buffers, b, tiles[t], kind, q_magnitude[t], key_tile,
                   {key_tile.next_k.count * t / task.count, key_tile.next_k.count * (t + 1) / task.count}, scratch,
                   scratch.q + row * p.head_dim, scratch.out + row * plan.ld_out, scratch.max + row,
                   scratch.sum + row * n, plan.ld_out);
    }
  }

  for (Index t = 0; t < task.count; ++t) {
    const Index row = t * rows_per_tile;
    for (Index r = row; r < row + tiles[t].size(); ++r) {
      scratch.sum[r] = hn::GetLane(hn::SumOfLanes(Wide<C>(), hn::LoadU(Wide<C>(), scratch.sum + r * n)));
    }
    if (plan.splits == 1) {
      write_rows(plan, buffers, b, tiles[t], scratch.out + row * plan.ld_out, scratch.max + row, scratch.sum + row,
                 value_scale);
    }
  }
  if (plan.splits == 1) return;
  // The state of this part of the keys: out, max and the sum of each row.
  const PartialState<C> partial(plan, workspace.shared, index);
  *partial.value_scale = value_scale;
  for (Index t = 0; t < task.count; ++t) {
    const Index row = t * rows_per_tile, size = tiles[t].size();
    std::copy_n(scratch.out + row * plan.ld_out, size * plan.ld_out, partial.out + row * plan.ld_out);
    std::copy_n(scratch.max + row, size, partial.max + row);
    std::copy_n(scratch.sum + row, size, partial.sum + row);
  }
}

// Merges the states of all parts of the keys, in their order, and writes the rows.
template <typename C>
void merge_splits(const ForwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace) {
  const Problem& p = *plan.problem;
  const ForwardTask& task = plan.tasks[index];
  const Sequence& seq = p.sequences[static_cast<std::size_t>(task.sequence)];
  const Index rows_per_tile = round_up(tile_q, kBlockRows);
  const PartialState<C> merged(plan, workspace.shared, index);
  C value_scale = 1;
  for (Index split = 0; split < plan.splits; ++split) {
    const PartialState<C> part(plan, workspace.shared, index + static_cast<std::size_t>(split));
    value_scale = std::min(value_scale, *part.value_scale);
  }
  for (Index t = 0; t < task.count; ++t) {
    const QueryTile tile = plan.query_tile(seq.q_len, task.head_kv, task.first + t);
    const Index first = t * rows_per_tile;
    if (*merged.value_scale != value_scale) {
      std::transform(merged.out + first * plan.ld_out, merged.out + (first + tile.size()) * plan.ld_out,
                     merged.out + first * plan.ld_out, [&](C x) { return x * value_scale; });
    }
    for (Index split = 1; split < plan.splits; ++split) {
      const PartialState<C> part(plan, workspace.shared, index + static_cast<std::size_t>(split));
      const C part_scale = value_scale / *part.value_scale;
      for (Index r = first; r < first + tile.size(); ++r) {
        SoftmaxState<C> state{merged.max[r], merged.sum[r]};
        const SoftmaxState<C> added{part.max[r], part.sum[r]};
        if (added.empty()) continue;
        const auto weights = state.merge(added);
        C* out = merged.out + r * plan.ld_out;
        const C* part_out = part.out + r * plan.ld_out;
        for (Index c = 0; c < plan.ld_out; ++c)
          out[c] = weights.kept * out[c] + weights.added * (part_scale * part_out[c]);
        merged.max[r] = state.m;
        merged.sum[r] = state.l;
      }
    }
    write_rows(plan, buffers, task.sequence, tile, merged.out + first * plan.ld_out, merged.max + first,
               merged.sum + first, value_scale);
  }
}

void forward_any(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
  plan.problem->dtype == HR_FLOAT64 ? forward_task<double>(plan, buffers, task, workspace)
                                    : forward_task<float>(plan, buffers, task, workspace);
}

void merge_any(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
  plan.problem->dtype == HR_FLOAT64 ? merge_splits<double>(plan, buffers, task, workspace)
                                    : merge_splits<float>(plan, buffers, task, workspace);
}

void add_forward(KernelTable& table) {
  table.lanes_f32 = lanes<float>();
  table.lanes_f64 = lanes<double>();
  table.rows = kBlockRows;
  table.forward = forward_any;
  table.merge_splits = merge_any;
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
