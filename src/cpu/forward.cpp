// Streaming attention, forward (FlashAttention-2, Dao 2023, algorithm 1, for a CPU's caches): keys and values are
// packed once, for all threads, into tiles as the products read them; then these pass through the cache, and each query
// row carries its running maximum, sum and output.
#include "cpu/simd/target.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/kernels.hpp"
#include "cpu/simd/amx-inl.h"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/pairs-inl.h"
#include "cpu/simd/scores-inl.h"
#include "cpu/simd/softmax-inl.h"
#include "cpu/simd/stream-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "describe/tensor_view.hpp"
#include "headrace/streaming.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

// The scratch memory of one task. Row r of query tile t is row t * rows_per_tile + r of the state.
template <typename C>
struct ForwardScratch {
  C *q, *scores, *out, *max, *sum, *value_scale, *row;
  BFloat16* weights;
  std::byte* keys;
  ForwardScratch(const ForwardPlan& plan, std::byte* base)
      : q(reinterpret_cast<C*>(base + plan.q)),
        scores(reinterpret_cast<C*>(base + plan.scores)),
        out(reinterpret_cast<C*>(base + plan.out)),
        max(reinterpret_cast<C*>(base + plan.max)),
        sum(reinterpret_cast<C*>(base + plan.sum)),
        value_scale(reinterpret_cast<C*>(base + plan.value_scale)),
        row(reinterpret_cast<C*>(base + plan.row)),
        weights(reinterpret_cast<BFloat16*>(base + plan.weights)),
        keys(base + plan.keys) {}
};

// The state that a task on one part of the keys leaves for merge_splits.
template <typename C>
struct PartialState {
  C *out, *max, *sum, *value_scale;
  PartialState(const ForwardPlan& plan, std::byte* shared, std::size_t task) {
    const Index rows = plan.tiles_per_task * plan.tile_rows;
    out = reinterpret_cast<C*>(shared + plan.partials + task * plan.partial_bytes);
    max = out + rows * plan.ld_out;
    sum = max + rows;
    value_scale = sum + rows;
  }
};

// A query tile of a task: its part of the scratch memory, and the key tiles that it visits.
template <typename C>
struct TileState {
  QueryTile tile;
  // Those of this task's part of the keys. They begin at multiples of tile_k of the sequence, and a query tile's
  // parts depend on it alone: the bits of a row do not depend on its neighbours.
  Range visited;
  Rows q_rows;
  C *q, *out, *max, *sum, *value_scale;
  C q_magnitude = 0;
  bool begun = false;
};

// Groups of rows of a query tile that meet a key tile together, from row `row` on. q: the tile's.
template <typename C>
struct Step {
  const GroupColumns* groups;
  Index group_count, row;
  const C* q;
  C q_magnitude;
};

// Values are summed with weights up to 1 before they are divided by the sum of weights, so large ones could
// overflow where their mean does not: from this magnitude on they are summed scaled down, exactly.
template <typename C>
inline constexpr C kLargeValue = std::is_same_v<C, float> ? C(0x1p80) : C(0x1p900);
template <typename C>
inline constexpr C kLargeValueScale = std::is_same_v<C, float> ? C(0x1p-64) : C(0x1p-128);

// A packed tile of keys and values.
template <class Products>
struct KeyTile {
  using C = typename Products::Number;

  Range keys;
  Rows k;
  C* kt;
  typename Products::Values v;
  PackedTile* facts;

  // memory: where it is packed.
  KeyTile(const ForwardPlan& plan, const Buffers& buffers, Index b, Index head_kv, Index index, std::byte* memory) {
    const Problem& p = *plan.problem;
    const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
    const PackedSequence& packed = plan.packed[static_cast<std::size_t>(b)];
    keys = {index * tile_k, std::min<Index>(seq.k_len, (index + 1) * tile_k)};
    facts = reinterpret_cast<PackedTile*>(memory + packed.tile);
    const auto rows = [&](const void* data, const RowStrides& strides, Index size) {
      Rows result{.data = data,
                  .dtype = p.dtype,
                  .offset = strides.at(p.ragged ? 0 : b, seq.k_begin + keys.begin, head_kv),
                  .stride = strides.row,
                  .count = keys.size(),
                  .size = size};
      // A head's share of a later tile of all heads, which is contiguous.
      const Index later = keys.begin + plan.ahead_tiles * tile_k;
      if (plan.ahead_tiles > 0 && later + tile_k <= seq.k_len) {
        const Index offset = strides.at(p.ragged ? 0 : b, seq.k_begin + later, 0) + head_kv * tile_k * size;
        result.ahead = static_cast<const std::byte*>(data) + offset * static_cast<Index>(dtype_size(p.dtype));
      }
      return result;
    };
    k = rows(buffers.k, p.k, p.head_dim);
    kt = reinterpret_cast<C*>(memory);
    v = typename Products::Values(rows(buffers.v, p.v, p.value_dim), reinterpret_cast<C*>(memory + packed.v),
                                  &facts->bad);
  }

  // Packs some rows; then, when all are packed, what depends on all of them.
  void pack(Index begin, Index end) {
    const auto larger = [](double& most, C magnitude) { most = std::max(most, static_cast<double>(magnitude)); };
    larger(facts->k_magnitude, Products::pack_keys(k, begin, end, kt));
    larger(facts->v_magnitude, v.pack(begin, end));
  }
  void finish_packing() {
    if (facts->v_magnitude >= static_cast<double>(kLargeValue<C>)) {
      facts->value_scale = static_cast<double>(kLargeValueScale<C>);
      v.scale(kLargeValueScale<C>);
    }
    v.isolate_bad();
  }
};

// A row's weights s and what it has of the output, brought to one scale of the values: that of the key tile, or the one
// that the row had before. A row that sees nothing of the tile keeps its own: scaling down costs small values
// their last bits.
template <typename C>
HWY_NOINLINE void match_value_scale(C tile_scale, C* s, Index begin, Index end, C* row_scale, C* out, Index out_size) {
  if (tile_scale == *row_scale || std::all_of(s + begin, s + end, [](C x) { return x == C{0}; })) return;
  const auto multiply = [](C* first, C* last, C factor) {
    std::transform(first, last, first, [factor](C x) { return x * factor; });
  };
  if (tile_scale > *row_scale) return multiply(s + begin, s + end, *row_scale);
  multiply(out, out + out_size, tile_scale);
  *row_scale = tile_scale;
}

// The two products of the forward pass, and the layouts of their operands, in vectors of C.
template <typename C>
struct VectorProducts {
  using Number = C;
  using Values = RightRows<C>;
  static constexpr Index kRows = kBlockRows;  // rows of a group, which share the columns that they need
  static constexpr Index kGroups = 1;         // groups of a step: their scores stay in the L1 cache

  static Scaling<C> scaling(const Problem& p) { return Scaling<C>(p); }
  static C pack_queries(const Rows& rows, const Scaling<C>& scaling, C* q) {
    return pack_transposed(rows, scaling.before, kBlockRows, q);
  }
  static C pack_keys(const Rows& rows, Index begin, Index end, C* kt) {
    return pack_transposed(rows, begin, end, C{1}, panel_width<C>(), kt);
  }
  static void scores(ScoreRules<C>& rules, const Step<C>& step, const KeyTile<VectorProducts>& key_tile, C* scores) {
    const Index depth = rules.problem.head_dim;
    const C* const q = step.q + step.row * depth;
    if (may_overflow(step.q_magnitude, static_cast<C>(key_tile.facts->k_magnitude), depth))
      return score_product_wide(step.groups, step.group_count, depth, q, key_tile.kt, scores);
    score_product(step.groups, step.group_count, key_tile.keys.size(), depth, q, key_tile.kt, scores);
  }
  static void round_weights(const ForwardScratch<C>& /*scratch*/, Index /*r*/, Index /*begin*/, Index /*end*/) {}
  static void add_values(const Step<C>& step, const ForwardScratch<C>& scratch, const KeyTile<VectorProducts>& key_tile,
                         C* out, Index ld_out) {
    add_tile_product(step.groups, step.group_count, scratch.scores, key_tile.v, out, ld_out, ld_out / lanes<C>());
  }
};

// The same for few queries, without packing: keys and values stay where they are.
template <typename C>
struct StreamProducts {
  using Number = C;
  using Values = StreamedRows<C>;
  static constexpr Index kRows = kBlockRows, kGroups = kMaxGroups;

  static Scaling<C> scaling(const Problem& p) { return Scaling<C>(p); }
  static C pack_queries(const Rows& rows, const Scaling<C>& scaling, C* q) {
    C magnitude{0};
    with_elements<C>(rows.data, rows.dtype, [&](auto* data) HEADRACE_ATTR {
      for (Index r = 0; r < rows.count; ++r) {
        C* const row = q + r * rows.size;
        widen_row(data + rows.at(r), rows.size, row);
        for (Index c = 0; c < rows.size; ++c) {
          row[c] *= scaling.before;
          magnitude = std::max(magnitude, std::abs(row[c]));
        }
      }
    });
    return magnitude;
  }
  static C pack_keys(const Rows& /*rows*/, Index /*begin*/, Index /*end*/, C* /*kt*/) { return C{0}; }
  static void scores(ScoreRules<C>& rules, const Step<C>& step, const KeyTile<StreamProducts>& key_tile, C* scores) {
    const Index dim = rules.problem.head_dim;
    const C magnitude = stream_scores(step.groups, step.group_count, step.q, dim, key_tile.k, scores);
    if (may_overflow(step.q_magnitude, magnitude, dim))
      stream_scores_wide(step.groups, step.group_count, step.q, dim, key_tile.k, scores);
  }
  static void round_weights(const ForwardScratch<C>& /*scratch*/, Index /*r*/, Index /*begin*/, Index /*end*/) {}
  static void add_values(const Step<C>& step, const ForwardScratch<C>& scratch, const KeyTile<StreamProducts>& key_tile,
                         C* out, Index ld_out) {
    stream_values(step.groups, step.group_count, scratch.scores, key_tile.v,
                  static_cast<C>(key_tile.facts->value_scale), out, ld_out);
  }
};

#if HWY_TARGET == HWY_AVX3_DL
// The same with pairs of bfloat16.
struct PairProducts {
  using Number = float;
  using Values = PairRightRows;
  static constexpr Index kRows = kBlockRows, kGroups = 1;

  static Scaling<float> scaling(const Problem& p) { return Scaling<float>(p); }
  static float pack_queries(const Rows& rows, const Scaling<float>& scaling, float* q) {
    return pack_pairs_transposed(rows, 0, rows.count, scaling.before, kBlockRows, reinterpret_cast<Pair*>(q));
  }
  static float pack_keys(const Rows& rows, Index begin, Index end, float* kt) {
    return pack_pairs_transposed(rows, begin, end, 1.0f, panel_width<float>(), reinterpret_cast<Pair*>(kt));
  }
  static void scores(ScoreRules<float>& rules, const Step<float>& step, const KeyTile<PairProducts>& key_tile,
                     float* scores) {
    const Index dim = rules.problem.head_dim, depth = pairs_of(dim);
    const auto* q = reinterpret_cast<const Pair*>(step.q) + step.row * depth;
    const auto* k = reinterpret_cast<const Pair*>(key_tile.kt);
    if (may_overflow(step.q_magnitude, static_cast<float>(key_tile.facts->k_magnitude), dim))
      return pair_score_product_wide(step.groups, step.group_count, depth, q, k, scores);
    score_product(step.groups, step.group_count, key_tile.keys.size(), depth, q, k, scores);
  }
  static void round_weights(const ForwardScratch<float>& scratch, Index r, Index begin, Index end) {
    HWY_NAMESPACE::round_weights(scratch.scores + r * tile_stride, begin, end, scratch.weights + r * weight_stride);
  }
  static void add_values(const Step<float>& step, const ForwardScratch<float>& scratch,
                         const KeyTile<PairProducts>& key_tile, float* out, Index ld_out) {
    add_tile_product(step.groups, step.group_count, reinterpret_cast<const Pair*>(scratch.weights), key_tile.v, out,
                     ld_out, ld_out / lanes<float>());
  }
};

// The same on AMX tiles. q is not scaled before it is rounded, so the scale comes after the product.
struct AmxProducts {
  using Number = float;
  using Values = AmxRightRows;
  static constexpr Index kRows = kAmxRows, kGroups = 3;

  static Scaling<float> scaling(const Problem& p) {
    Scaling<float> scaling(p);
    scaling.before = scaling.unit = 1;
    scaling.after = static_cast<float>(p.scale);
    return scaling;
  }
  static float pack_queries(const Rows& rows, const Scaling<float>& /*scaling*/, float* q) {
    return amx_pack_left(rows, reinterpret_cast<BFloat16*>(q));
  }
  static float pack_keys(const Rows& rows, Index begin, Index end, float* kt) {
    return amx_pack_keys(rows, begin, end, reinterpret_cast<BFloat16*>(kt));
  }
  static void scores(ScoreRules<float>& rules, const Step<float>& step, const KeyTile<AmxProducts>& key_tile,
                     float* scores) {
    const Index depth = rules.problem.head_dim;
    const auto* q = reinterpret_cast<const BFloat16*>(step.q);
    const auto* k = reinterpret_cast<const BFloat16*>(key_tile.kt);
    if (may_overflow(step.q_magnitude, static_cast<float>(key_tile.facts->k_magnitude), depth)) {
      rules.scaling.after = 1;
      return amx_score_product_wide(step.groups, step.group_count, depth, q, k, rules.problem.scale, scores);
    }
    amx_score_product(step.groups, step.group_count, key_tile.keys.size(), depth, q, k, scores);
  }
  static void round_weights(const ForwardScratch<float>& scratch, Index r, Index begin, Index end) {
    PairProducts::round_weights(scratch, r, begin, end);
  }
  static void add_values(const Step<float>& step, const ForwardScratch<float>& scratch,
                         const KeyTile<AmxProducts>& key_tile, float* out, Index ld_out) {
    amx_add_product(step.groups, step.group_count, scratch.weights, key_tile.v, out, ld_out);
  }
};
#endif

// A step of one query tile against one key tile: scores, weights, and their product with the values.
template <class Products, typename C = typename Products::Number>
void forward_step(const Buffers& buffers, ScoreRules<C>& head_rules, const TileState<C>& state, TileKind kind,
                  const Step<C>& step, const KeyTile<Products>& key_tile, const ForwardScratch<C>& scratch,
                  Index ld_out) {
  const Problem& p = head_rules.problem;
  const Index b = head_rules.b, n = lanes<C>();
  const QueryTile& tile = state.tile;
  const Range keys = key_tile.keys;
  const typename Products::Values& v = key_tile.v;
  const C value_scale = static_cast<C>(key_tile.facts->value_scale);
  C* const out = state.out + step.row * ld_out;
  Products::scores(head_rules, step, key_tile, scratch.scores);
  const auto rules_of = [&](Index h) HEADRACE_ATTR {
    ScoreRules<C> rules(p, buffers, b, h);
    rules.scaling = head_rules.scaling;
    return rules;
  };

  const bool plain = head_rules.plain(kind);
  const Dropout dropout{p.dropout_p, p.seed};
  for (Index g = 0; g < step.group_count; ++g) {
    const auto [rows, begin, end] = step.groups[g];
    if (begin >= end) continue;
    const Index rounded = begin + round_up(end - begin, n);
    const Index first = g * Products::kRows, last = first + rows;  // in the step
    for (Index r = first; r < last; ++r) {
      C* s = scratch.scores + r * tile_stride;
      if (plain) {
        std::fill(s + end, s + rounded, kMinusInf<C>);
      } else {
        const Index h = tile.head_of(step.row + r);
        finish_scores(h == tile.head ? head_rules : rules_of(h), kind, tile.row_of(step.row + r), keys.begin, begin,
                      end, s, static_cast<C*>(nullptr), scratch.row);
      }
    }
    softmax_rows<Products::kRows>(
        scratch.scores + first * tile_stride, rows, begin, rounded, kLog2E<C> * head_rules.scaling.unit,
        SoftmaxRows<C>{state.max + step.row + first, state.sum + (step.row + first) * n, out + first * ld_out, ld_out});
    for (Index r = first; r < last; ++r) {
      C* s = scratch.scores + r * tile_stride;
      if (dropout.active()) {
        dropout_factors<C>(dropout, b, tile.head_of(step.row + r), tile.row_of(step.row + r), keys.begin, begin, end,
                           scratch.row);
        for (Index c = begin; c < end; ++c) s[c] *= scratch.row[c];
      }
      C& row_scale = state.value_scale[step.row + r];
      if (value_scale != C{1} || row_scale != C{1}) {
        match_value_scale(value_scale, s, begin, end, &row_scale, out + r * ld_out, ld_out);
      }
      Products::round_weights(scratch, r, begin, end);
    }
  }

  Products::add_values(step, scratch, key_tile, out, ld_out);
  for (Index bad = 0; bad < v.bad->count; ++bad) {
    const Index j = v.bad->rows[bad];
    for (Index r = 0; r < step.group_count * Products::kRows && step.row + r < tile.size(); ++r) {
      const ScoreRules<C> rules(p, buffers, b, tile.head_of(step.row + r));
      if (!rules.visible(tile.row_of(step.row + r), keys.begin + j)) continue;
      v.add_bad(j, scratch.scores[r * tile_stride + j], out + r * ld_out);
    }
  }
}

// One query tile against one key tile.
template <class Products, typename C = typename Products::Number>
void forward_tile(const Problem& p, const Buffers& buffers, Index b, const Scaling<C>& scaling,
                  const TileState<C>& state, TileKind kind, const KeyTile<Products>& key_tile,
                  const ForwardScratch<C>& scratch, Index ld_out) {
  const Index group_count = ceil_div(state.tile.size(), Products::kRows);
  ScoreRules<C> rules(p, buffers, b, state.tile.head);
  rules.scaling = scaling;
  GroupColumns groups[kMaxGroups];
  for (Index g = 0; g < group_count; ++g) {
    groups[g] =
        group_columns<C, Products::kRows>(rules.vis, kind, state.tile, g, key_tile.keys.begin, key_tile.keys.size());
  }
  for (Index g = 0; g < group_count; g += Products::kGroups) {
    const Step<C> step{.groups = groups + g,
                       .group_count = std::min<Index>(Products::kGroups, group_count - g),
                       .row = g * Products::kRows,
                       .q = state.q,
                       .q_magnitude = state.q_magnitude};
    forward_step(buffers, rules, state, kind, step, key_tile, scratch, ld_out);
  }
}

// Rows of the output: out / sum, and lse, with the sink as one more key that has no value.
template <typename C>
void write_rows(const ForwardPlan& plan, const Buffers& buffers, Index b, C unit, const QueryTile& tile, const C* out,
                const C* max, const C* sums, const C* value_scales) {
  const Problem& p = *plan.problem;
  const Index batch = p.ragged ? 0 : b, q_begin = p.sequences[static_cast<std::size_t>(b)].q_begin;
  for (Index r = 0; r < tile.size(); ++r) {
    const Index h = tile.head_of(r), row = q_begin + tile.row_of(r);
    SoftmaxState<double> state{static_cast<double>(unit) * static_cast<double>(max[r]), static_cast<double>(sums[r])};
    double kept = 1.0;
    if (p.has_sinks) kept = state.update(static_cast<double>(buffers.sinks[h * p.sinks_stride])).kept;
    const auto result = state.finalize();
    with_elements<C>(buffers.out, p.dtype, [&](auto* dst) HEADRACE_ATTR {
      narrow_row(out + r * plan.ld_out, static_cast<C>(kept * result.scale / static_cast<double>(value_scales[r])),
                 p.value_dim, dst + p.out.at(batch, row, h));
    });
    if (p.has_lse) store_element(buffers.lse, p.lse_dtype, p.lse.at(batch, h, row), result.lse);
  }
}

// Packs a key tile of every head: rows of neighbouring heads share pages, so all heads take a few rows in turn.
template <class Products>
void pack_task(const ForwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace) {
  constexpr Index rows_at_a_time = 32;
  const Problem& p = *plan.problem;
  const PackTask& task = plan.pack_tasks[index];
  const Index b = task.sequence;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
  const auto key_tile_of = [&](Index head) {
    std::byte* const memory = workspace.shared + plan.packed[static_cast<std::size_t>(b)].at(head, task.key_tile);
    return KeyTile<Products>(plan, buffers, b, head, task.key_tile, memory);
  };
  const Range keys = key_tile_of(0).keys;
  // What no query sees is not read. Where the last queries see everything, the first look finds it.
  const auto seen = [&](Index head) {
    for (Index t = plan.query_tiles(seq.q_len); t-- > 0;) {
      if (classify(p, buffers, b, plan.query_tile(seq.q_len, head, t), keys) != TileKind::hidden) return true;
    }
    return false;
  };
  for (Index head = 0; head < p.heads_kv; ++head) *key_tile_of(head).facts = {};
  for (Index begin = 0; begin < keys.size(); begin += rows_at_a_time) {
    const Index end = std::min(keys.size(), begin + rows_at_a_time);
    for (Index head = 0; head < p.heads_kv; ++head) {
      KeyTile<Products> tile = key_tile_of(head);
      if (begin == 0) tile.facts->seen = seen(head);
      if (!tile.facts->seen) continue;
      tile.pack(begin, end);
    }
  }
  for (Index head = 0; head < p.heads_kv; ++head) {
    KeyTile<Products> tile = key_tile_of(head);
    if (tile.facts->seen) tile.finish_packing();
  }
}

// The query tiles of a task against its part of the keys. A query tile is packed when its first key tile comes.
template <class Products>
class ForwardTaskRun {
  using C = typename Products::Number;

 public:
  ForwardTaskRun(const ForwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace)
      : plan_(plan),
        p_(*plan.problem),
        buffers_(buffers),
        task_(plan.tasks[index]),
        seq_(p_.sequences[static_cast<std::size_t>(task_.sequence)]),
        scaling_(Products::scaling(p_)),
        packed_(plan.packed[static_cast<std::size_t>(task_.sequence)]),
        shared_(workspace.shared),
        scratch_(plan, workspace.scratch),
        partial_(plan, workspace.shared, index) {
    const Index b = task_.sequence, n = lanes<C>();
    for (Index t = 0; t < task_.count; ++t) {
      TileState<C>& state = tiles_[t];
      const Index row = t * plan.tile_rows;
      const QueryTile tile = plan.query_tile(seq_.q_len, task_.head_kv, task_.first + t);
      state.tile = tile;
      state.q_rows = {.data = buffers.q,
                      .dtype = p_.dtype,
                      .offset = p_.q.at(p_.ragged ? 0 : b, seq_.q_begin + tile.row, tile.head),
                      .stride = p_.q.row,
                      .count = tile.size(),
                      .size = p_.head_dim,
                      .inner = tile.heads == 1 ? 0 : tile.rows,
                      .outer_stride = p_.q.head};
      state.q = scratch_.q + row * plan.ld_q;
      state.out = scratch_.out + row * plan.ld_out;
      state.max = scratch_.max + row;
      state.value_scale = scratch_.value_scale + row;
      state.sum = scratch_.sum + row * n;
      const Range keys = visibility(p_, buffers, b, tile.head).keys_of_rows({tile.row, tile.row + tile.rows});
      if (keys.empty()) continue;
      const Index begin = keys.begin / tile_k, count = ceil_div(keys.end, tile_k) - begin;
      state.visited = {begin + count * task_.split / plan.splits, begin + count * (task_.split + 1) / plan.splits};
      if (!state.visited.empty()) {
        all_ = {std::min(all_.begin, state.visited.begin), std::max(all_.end, state.visited.end)};
      }
    }
  }

  void run() {
    for (Index index = all_.begin; index < all_.end; ++index) visit(index);
    for (Index t = 0; t < task_.count; ++t) {
      if (!tiles_[t].begun) begin(t);
      end(t);
    }
  }

 private:
  // All query tiles that see a key tile.
  void visit(Index index) {
    std::byte* const memory = plan_.shares_keys ? shared_ + packed_.at(task_.head_kv, index) : scratch_.keys;
    KeyTile<Products> key_tile(plan_, buffers_, task_.sequence, task_.head_kv, index, memory);
    bool packed = plan_.shares_keys;
    for (Index t = 0; t < task_.count; ++t) {
      TileState<C>& state = tiles_[t];
      if (index < state.visited.begin || index >= state.visited.end) continue;
      const TileKind kind = classify(p_, buffers_, task_.sequence, state.tile, key_tile.keys);
      if (kind == TileKind::hidden) continue;
      if (!state.begun) begin(t);
      if (!packed) {
        packed = true;
        *key_tile.facts = {};
        key_tile.pack(0, key_tile.keys.size());
        key_tile.finish_packing();
      }
      forward_tile(p_, buffers_, task_.sequence, scaling_, state, kind, key_tile, scratch_, plan_.ld_out);
    }
  }

  void begin(Index t) {
    TileState<C>& state = tiles_[t];
    const Index size = state.tile.size();
    state.begun = true;
    state.q_magnitude = Products::pack_queries(state.q_rows, scaling_, state.q);
    std::fill_n(state.out, size * plan_.ld_out, C{0});
    std::fill_n(state.max, size, kMinusInf<C>);
    std::fill_n(state.value_scale, size, C{1});
    std::fill_n(state.sum, size * lanes<C>(), C{0});
  }

  // The sum of each row; then its output, or the state for merge_splits.
  void end(Index t) {
    TileState<C>& state = tiles_[t];
    const Index size = state.tile.size(), n = lanes<C>(), row = t * plan_.tile_rows;
    C* const sum = plan_.splits == 1 ? state.sum : partial_.sum + row;
    for (Index r = 0; r < size; ++r) {
      sum[r] = hn::GetLane(hn::SumOfLanes(Wide<C>(), hn::LoadU(Wide<C>(), state.sum + r * n)));
    }
    if (plan_.splits == 1) {
      return write_rows(plan_, buffers_, task_.sequence, scaling_.unit, state.tile, state.out, state.max, sum,
                        state.value_scale);
    }
    std::copy_n(state.value_scale, size, partial_.value_scale + row);
    std::copy_n(state.out, size * plan_.ld_out, partial_.out + row * plan_.ld_out);
    std::copy_n(state.max, size, partial_.max + row);
  }

  const ForwardPlan& plan_;
  const Problem& p_;
  const Buffers& buffers_;
  const ForwardTask& task_;
  const Sequence& seq_;
  const Scaling<C> scaling_;
  const PackedSequence& packed_;
  std::byte* const shared_;
  const ForwardScratch<C> scratch_;
  const PartialState<C> partial_;
  TileState<C> tiles_[max_tiles_per_task];
  Range all_{std::numeric_limits<Index>::max(), 0};  // key tiles that any query tile visits
};

template <class Products>
void forward_task(const ForwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace) {
  ForwardTaskRun<Products>(plan, buffers, index, workspace).run();
}

// Merges the states of all parts of the keys, in their order, and writes the rows.
template <class Products>
void merge_splits(const ForwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace) {
  using C = typename Products::Number;
  const Problem& p = *plan.problem;
  const ForwardTask& task = plan.tasks[index];
  const Sequence& seq = p.sequences[static_cast<std::size_t>(task.sequence)];
  const C unit = Products::scaling(p).unit;
  const PartialState<C> merged(plan, workspace.shared, index);
  for (Index t = 0; t < task.count; ++t) {
    const QueryTile tile = plan.query_tile(seq.q_len, task.head_kv, task.first + t);
    const Index first = t * plan.tile_rows;
    for (Index split = 1; split < plan.splits; ++split) {
      const PartialState<C> part(plan, workspace.shared, index + static_cast<std::size_t>(split));
      for (Index r = first; r < first + tile.size(); ++r) {
        const auto natural = [unit](C max, C sum) {
          return SoftmaxState<double>{static_cast<double>(unit) * static_cast<double>(max), static_cast<double>(sum)};
        };
        SoftmaxState<double> state = natural(merged.max[r], merged.sum[r]);
        const SoftmaxState<double> added = natural(part.max[r], part.sum[r]);
        if (added.empty()) continue;
        const auto weights = state.merge(added);
        const C scale = std::min(merged.value_scale[r], part.value_scale[r]);
        const C kept = static_cast<C>(weights.kept) * (scale / merged.value_scale[r]);
        const C entering = static_cast<C>(weights.added) * (scale / part.value_scale[r]);
        merged.value_scale[r] = scale;
        C* out = merged.out + r * plan.ld_out;
        const C* part_out = part.out + r * plan.ld_out;
        for (Index c = 0; c < plan.ld_out; ++c) out[c] = kept * out[c] + entering * part_out[c];
        merged.max[r] = part.max[r] > merged.max[r] || part.max[r] != part.max[r] ? part.max[r] : merged.max[r];
        merged.sum[r] = static_cast<C>(state.l);
      }
    }
    write_rows(plan, buffers, task.sequence, unit, tile, merged.out + first * plan.ld_out, merged.max + first,
               merged.sum + first, merged.value_scale + first);
  }
}

// Calls f.operator()<P>() with the products of the plan.
template <typename F>
void with_products(const ForwardPlan& plan, F f) {
#if HWY_TARGET == HWY_AVX3_DL
  if (plan.products == ProductKind::pairs) return f.template operator()<PairProducts>();
  if (plan.products == ProductKind::amx) return f.template operator()<AmxProducts>();
#endif
  const bool wide = plan.problem->dtype == HR_FLOAT64;
  if (plan.products == ProductKind::stream) {
    return wide ? f.template operator()<StreamProducts<double>>() : f.template operator()<StreamProducts<float>>();
  }
  wide ? f.template operator()<VectorProducts<double>>() : f.template operator()<VectorProducts<float>>();
}

void pack_any(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
  with_products(plan, [&]<class P>() HEADRACE_ATTR { pack_task<P>(plan, buffers, task, workspace); });
}

void forward_any(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
#if HWY_TARGET == HWY_AVX3_DL
  if (plan.products == ProductKind::amx) {
    const AmxScope scope;
    return forward_task<AmxProducts>(plan, buffers, task, workspace);
  }
#endif
  with_products(plan, [&]<class P>() HEADRACE_ATTR { forward_task<P>(plan, buffers, task, workspace); });
}

void merge_any(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
  with_products(plan, [&]<class P>() HEADRACE_ATTR { merge_splits<P>(plan, buffers, task, workspace); });
}

void add_forward(KernelTable& table) {
  table.lanes_f32 = lanes<float>();
  table.lanes_f64 = lanes<double>();
  table.rows = kBlockRows;
#if HWY_TARGET == HWY_AVX3_DL
  table.bfloat16 = ProductKind::pairs;
#endif
  table.forward_pack = pack_any;
  table.forward = forward_any;
  table.merge_splits = merge_any;
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
