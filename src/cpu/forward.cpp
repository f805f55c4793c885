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
  C *q, *scores, *out, *max, *sum, *value_scale, *row, *values;
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
        values(reinterpret_cast<C*>(base + plan.values)),
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

// Keys of a sequence and key-value head: rows of k or v.
HWY_INLINE Rows key_rows(const Problem& p, Index b, Index head_kv, Range keys, const void* data,
                         const RowStrides& strides, Index size) {
  return {
      .data = data,
      .dtype = p.dtype,
      .offset = strides.at(p.ragged ? 0 : b, p.sequences[static_cast<std::size_t>(b)].k_begin + keys.begin, head_kv),
      .stride = strides.row,
      .count = keys.size(),
      .size = size};
}

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
    k = key_rows(p, b, head_kv, keys, buffers.k, p.k, p.head_dim);
    kt = reinterpret_cast<C*>(memory);
    v = typename Products::Values(key_rows(p, b, head_kv, keys, buffers.v, p.v, p.value_dim),
                                  reinterpret_cast<C*>(memory + packed.v), &facts->bad);
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

  static C pack_queries(const Rows& rows, const Scaling<C>& scaling, C* q) {
    return pack_transposed(rows, scaling.before, kBlockRows, q);
  }
  static C pack_keys(const Rows& rows, Index begin, Index end, C* kt) {
    return pack_transposed(rows, begin, end, C{1}, panel_width<C>(), kt);
  }
  // maxima: of the lanes of each row, -inf before; true if they are told.
  static bool scores(const ScoreRules<C>& rules, const Step<C>& step, const KeyTile<VectorProducts>& key_tile,
                     C* scores, C* maxima) {
    const Index depth = rules.problem.head_dim;
    const C* const q = step.q + step.row * depth;
    if (may_overflow(step.q_magnitude, static_cast<C>(key_tile.facts->k_magnitude), depth)) {
      score_product_wide(step.groups, step.group_count, depth, q, key_tile.kt, scores);
      return false;
    }
    score_product(step.groups, step.group_count, key_tile.keys.size(), depth, q, key_tile.kt, scores, maxima);
    return true;
  }
  static BFloat16* weights(const ForwardScratch<C>& /*scratch*/) { return nullptr; }
  // kept: of softmax_rows, for each row of the step.
  static void add_values(const Step<C>& step, const ForwardScratch<C>& scratch, const KeyTile<VectorProducts>& key_tile,
                         const C* kept, C* out, Index ld_out) {
    add_tile_product<Into::scale_add>(step.groups, step.group_count, scratch.scores, key_tile.v, out, ld_out,
                                      ld_out / lanes<C>(), kept);
  }
};

// Few queries, without packing: keys and values stay where they are.
template <typename C, class StreamKernel>
struct StreamProducts {
  using Number = C;
  using Kernel = StreamKernel;
  static constexpr Index kRows = stream_rows;

  static C pack_queries(const Rows& rows, const Scaling<C>& scaling, C* q, C* temp) {
    with_elements<C>(rows.data, rows.dtype, [&](auto* data) HEADRACE_ATTR {
      for (Index r = 0; r < rows.count; ++r) {
        widen_row(data + rows.at(r), rows.size, temp);
        for (Index c = 0; c < rows.size; ++c) temp[c] *= scaling.before;
        Kernel::pack_query(temp, rows.size, q, r);
      }
    });
    return C{0};  // not needed
  }
};

#if HWY_TARGET == HWY_AVX3_DL
// The same with pairs of bfloat16.
struct PairProducts {
  using Number = float;
  using Values = PairRightRows;
  static constexpr Index kRows = kBlockRows, kGroups = 1;

  static float pack_queries(const Rows& rows, const Scaling<float>& scaling, float* q) {
    return pack_pairs_transposed(rows, 0, rows.count, scaling.before, kBlockRows, reinterpret_cast<Pair*>(q));
  }
  static float pack_keys(const Rows& rows, Index begin, Index end, float* kt) {
    return pack_pairs_transposed(rows, begin, end, 1.0f, panel_width<float>(), reinterpret_cast<Pair*>(kt));
  }
  static bool scores(const ScoreRules<float>& rules, const Step<float>& step, const KeyTile<PairProducts>& key_tile,
                     float* scores, float* maxima) {
    const Index dim = rules.problem.head_dim, depth = pairs_of(dim);
    const auto* q = reinterpret_cast<const Pair*>(step.q) + step.row * depth;
    const auto* k = reinterpret_cast<const Pair*>(key_tile.kt);
    if (may_overflow(step.q_magnitude, static_cast<float>(key_tile.facts->k_magnitude), dim)) {
      pair_score_product_wide(step.groups, step.group_count, depth, q, k, scores);
      return false;
    }
    score_product(step.groups, step.group_count, key_tile.keys.size(), depth, q, k, scores, maxima);
    return true;
  }
  static BFloat16* weights(const ForwardScratch<float>& scratch) { return scratch.weights; }
  static void add_values(const Step<float>& step, const ForwardScratch<float>& scratch,
                         const KeyTile<PairProducts>& key_tile, const float* kept, float* out, Index ld_out) {
    add_tile_product<Into::scale_add>(step.groups, step.group_count, reinterpret_cast<const Pair*>(scratch.weights),
                                      key_tile.v, out, ld_out, ld_out / lanes<float>(), kept);
  }
};

// The same on AMX tiles.
struct AmxProducts {
  using Number = float;
  using Values = AmxRightRows;
  static constexpr Index kRows = kAmxRows, kGroups = 3;

  static float pack_queries(const Rows& rows, const Scaling<float>& scaling, float* q) {
    return amx_pack_left(rows, scaling.before, reinterpret_cast<BFloat16*>(q));
  }
  static float pack_keys(const Rows& rows, Index begin, Index end, float* kt) {
    return amx_pack_keys(rows, begin, end, reinterpret_cast<BFloat16*>(kt));
  }
  static bool scores(const ScoreRules<float>& rules, const Step<float>& step, const KeyTile<AmxProducts>& key_tile,
                     float* scores, float* /*maxima*/) {
    const Index depth = rules.problem.head_dim;
    const auto* q = reinterpret_cast<const BFloat16*>(step.q);
    const auto* k = reinterpret_cast<const BFloat16*>(key_tile.kt);
    if (may_overflow(step.q_magnitude, static_cast<float>(key_tile.facts->k_magnitude), depth)) {
      amx_score_product_wide(step.groups, step.group_count, depth, q, k, scores);
    } else {
      amx_score_product(step.groups, step.group_count, key_tile.keys.size(), depth, q, k, scores);
    }
    return false;
  }
  static BFloat16* weights(const ForwardScratch<float>& scratch) { return scratch.weights; }
  static void add_values(const Step<float>& step, const ForwardScratch<float>& scratch,
                         const KeyTile<AmxProducts>& key_tile, const float* kept, float* out, Index ld_out) {
    for (Index g = 0; g < step.group_count; ++g) {
      const Index first = g * kRows;
      if (step.groups[g].begin < step.groups[g].end)
        keep_output(kept + first, step.groups[g].rows, out + first * ld_out, ld_out);
    }
    amx_add_product(step.groups, step.group_count, scratch.weights, weight_stride, key_tile.v, out, ld_out);
  }
};
#endif

// The scores of a group of rows, from row `row` of the query tile on, to weights of values that are scaled by
// value_scale; the rows' state moves to the new maxima, and their output is to be multiplied by kept. maxima: of the
// lanes of each row of scores, or null. weights: where they go rounded to bfloat16, or null.
template <Index kRows, typename C>
void finish_weights(const Buffers& buffers, const ScoreRules<C>& head_rules, const TileState<C>& state, TileKind kind,
                    const GroupColumns& columns, Index row, Index first_key, C value_scale, C* scores, const C* maxima,
                    BFloat16* weights, C* kept, C* temp, Index ld_out) {
  const Problem& p = head_rules.problem;
  const Index b = head_rules.b, n = lanes<C>();
  const QueryTile& tile = state.tile;
  const auto [rows, begin, end] = columns;
  const Index rounded = begin + round_up(end - begin, 2 * n);
  C* const out = state.out + row * ld_out;
  const bool plain = head_rules.plain(kind);
  const bool whole = plain && end == rounded;  // as the product left them, and with its maxima
  for (Index r = 0; r < rows && !whole; ++r) {
    C* s = scores + r * tile_stride;
    if (!plain) {
      const Index h = tile.head_of(row + r);
      finish_scores(h == tile.head ? head_rules : ScoreRules<C>(p, buffers, b, h), kind, tile.row_of(row + r),
                    first_key, begin, end, s, static_cast<C*>(nullptr), temp);
    }
    std::fill(s + end, s + rounded, kMinusInf<C>);
  }
  softmax_rows<kRows>(scores, rows, begin, rounded, kLog2E<C> * head_rules.scaling.unit, whole ? maxima : nullptr,
                      SoftmaxRows<C>{state.max + row, state.sum + row * n}, kept, weights);
  const Dropout dropout{p.dropout_p, p.seed};
  const bool drops = dropout.active();
  for (Index r = 0; r < rows; ++r) {
    C* s = scores + r * tile_stride;
    if (drops) {
      dropout_factors<C>(dropout, b, tile.head_of(row + r), tile.row_of(row + r), first_key, begin, end, temp);
      for (Index c = begin; c < end; ++c) s[c] *= temp[c];
    }
    C& row_scale = state.value_scale[row + r];
    if (value_scale != C{1} || row_scale != C{1}) {
      match_value_scale(value_scale, s, begin, end, &row_scale, out + r * ld_out, ld_out);
    } else if (!drops) {
      continue;
    }
#if HWY_TARGET == HWY_AVX3_DL
    if constexpr (std::is_same_v<C, float>) {
      if (weights != nullptr) round_weights(s, begin, end, weights + r * weight_stride);
    }
#endif
  }
}

// A step of one query tile against one key tile: scores, weights, and their product with the values.
template <class Products, typename C = typename Products::Number>
void forward_step(const Buffers& buffers, const ScoreRules<C>& head_rules, const TileState<C>& state, TileKind kind,
                  const Step<C>& step, const KeyTile<Products>& key_tile, const ForwardScratch<C>& scratch,
                  Index ld_out) {
  const QueryTile& tile = state.tile;
  const typename Products::Values& v = key_tile.v;
  C* const out = state.out + step.row * ld_out;
  constexpr Index step_rows = Products::kGroups * Products::kRows;
  HWY_ALIGN C maxima[step_rows * hn::MaxLanes(Wide<C>())];
  C kept[step_rows + hn::MaxLanes(Wide<C>())];
  std::fill_n(maxima, step_rows * lanes<C>(), kMinusInf<C>);
  BFloat16* const weights = Products::weights(scratch);  // of all groups; null where they are not rounded
  const bool told = Products::scores(head_rules, step, key_tile, scratch.scores, maxima);
  for (Index g = 0; g < step.group_count; ++g) {
    const GroupColumns& columns = step.groups[g];
    if (columns.begin >= columns.end) continue;
    const Index first = g * Products::kRows;
    finish_weights<Products::kRows>(buffers, head_rules, state, kind, columns, step.row + first, key_tile.keys.begin,
                                    static_cast<C>(key_tile.facts->value_scale), scratch.scores + first * tile_stride,
                                    told ? maxima + first * lanes<C>() : nullptr,
                                    weights == nullptr ? nullptr : weights + first * weight_stride, kept + first,
                                    scratch.row, ld_out);
  }

  Products::add_values(step, scratch, key_tile, kept, out, ld_out);
  for (Index bad = 0; bad < v.bad->count; ++bad) {
    const Index j = v.bad->rows[bad];
    for (Index r = 0; r < step.group_count * Products::kRows && step.row + r < tile.size(); ++r) {
      const ScoreRules<C> rules(head_rules.problem, buffers, head_rules.b, tile.head_of(step.row + r));
      if (!rules.visible(tile.row_of(step.row + r), key_tile.keys.begin + j)) continue;
      v.add_bad(j, scratch.scores[r * tile_stride + j], out + r * ld_out);
    }
  }
}

// One query tile against one key tile.
template <class Products, typename C = typename Products::Number>
void forward_tile(const Problem& p, const Buffers& buffers, Index b, const TileState<C>& state, TileKind kind,
                  const KeyTile<Products>& key_tile, const ForwardScratch<C>& scratch, Index ld_out) {
  const Index group_count = ceil_div(state.tile.size(), Products::kRows);
  const ScoreRules<C> rules(p, buffers, b, state.tile.head);
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

// Adds the weighted values of a chunk of streamed keys to the output where the plain sum of them is not to be trusted:
// it is not finite, or might not stay so. Hidden rows that are not finite are left out, large values scaled down.
template <typename C>
HWY_NOINLINE void add_unusual_values(const Buffers& buffers, const ScoreRules<C>& rules, const TileState<C>& state,
                                     const StreamTile<C>& tile, Range chunk, Index first_key, C* temp, Index ld_out) {
  const Wide<C> d;
  const Rows& v = tile.v;
  BadRows bad_rows;
  HiddenRows<C> bad{v, &bad_rows};
  const auto for_rows = [&](auto f) HEADRACE_ATTR {
    with_elements<C>(v.data, v.dtype, [&](auto* data) HEADRACE_ATTR {
      for (Index j = chunk.begin, next_bad = 0; j < chunk.end; ++j) {
        if (next_bad < bad_rows.count && bad_rows.rows[next_bad] == j) {
          ++next_bad;
          continue;
        }
        widen_row(data + v.at(j), v.size, temp);
        f(j);
      }
    });
  };
  bool large = false;
  for_rows([&](Index j) HEADRACE_ATTR {
    if (!all_finite(temp, v.size)) {
      bad.add(j);
    } else if (!all_below(temp, v.size, kLargeValue<C>)) {
      large = true;
    }
  });
  for (Index r = 0; r < tile.columns.rows; ++r) {
    C* const s = tile.scores + r * tile_stride;
    if (large && state.value_scale[r] == C{1}) {
      const auto scale = [](C* first, C* last) {
        std::transform(first, last, first, [](C x) { return x * kLargeValueScale<C>; });
      };
      scale(s + chunk.begin, s + tile.columns.end);
      scale(state.out + r * ld_out, state.out + (r + 1) * ld_out);
      state.value_scale[r] = kLargeValueScale<C>;
    }
    std::fill_n(tile.values + r * v.size, v.size, C{0});
  }
  for_rows([&](Index j) HEADRACE_ATTR {
    for (Index r = 0; r < tile.columns.rows; ++r) {
      C* const sums = tile.values + r * v.size;
      const auto weight = hn::Set(d, tile.scores[r * tile_stride + j]);
      for (Index c = 0; c < v.size; c += lanes<C>())
        hn::StoreU(hn::MulAdd(weight, hn::LoadU(d, temp + c), hn::LoadU(d, sums + c)), d, sums + c);
    }
  });
  for (Index bad_row = 0; bad_row < bad_rows.count; ++bad_row) {
    const Index j = bad_rows.rows[bad_row];
    for (Index r = 0; r < tile.columns.rows; ++r) {
      const ScoreRules<C> row_rules(rules.problem, buffers, rules.b, state.tile.head_of(r));
      if (!row_rules.visible(state.tile.row_of(r), first_key + j)) continue;
      bad.add_bad(j, tile.scores[r * tile_stride + j], tile.values + r * v.size);
    }
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
        scaling_(p_),
        packed_(plan.packed[static_cast<std::size_t>(task_.sequence)]),
        shared_(workspace.shared),
        scratch_(plan, workspace.scratch),
        partial_(plan, workspace.shared, index) {
    const Index b = task_.sequence, n = lanes<C>();
    for (Index t = 0; t < task_.count; ++t) {
      TileState<C>& state = tiles_[t];
      const Index row = t * plan.tile_rows;
      const QueryTile tile = plan.tile_of(task_, t);
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
    for (Index index = all_.begin; index < all_.end; ++index) {
      if constexpr (requires { typename Products::Kernel; }) {
        stream(index);
      } else {
        visit(index);
      }
    }
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
      forward_tile(p_, buffers_, task_.sequence, state, kind, key_tile, scratch_, plan_.ld_out);
    }
  }

  // The same without packing: each tile is another head. Where the heads of a key lie side by side, all of them pass
  // together, from one end of the memory to the other.
  void stream(Index index) {
    const Range keys{index * tile_k, std::min<Index>(seq_.k_len, (index + 1) * tile_k)};
    const bool side_by_side = std::abs(p_.k.head) <= std::abs(p_.k.row);
    const Index together = side_by_side ? task_.count : 1;
    for (Index first = 0; first < task_.count; first += together) stream(index, keys, first, first + together);
  }

  void stream(Index index, Range keys, Index first, Index last) {
    StreamTile<C> tiles[max_tiles_per_task];
    TileKind kinds[max_tiles_per_task];
    Index visiting[max_tiles_per_task];
    std::size_t count = 0;
    for (Index t = first; t < last; ++t) {
      TileState<C>& state = tiles_[t];
      if (index < state.visited.begin || index >= state.visited.end) continue;
      const TileKind kind = classify(p_, buffers_, task_.sequence, state.tile, keys);
      if (kind == TileKind::hidden) continue;
      if (!state.begun) begin(t);
      const ScoreRules<C> rules(p_, buffers_, task_.sequence, state.tile.head);
      const Index row = t * plan_.tile_rows;
      kinds[count] = kind;
      visiting[count] = t;
      tiles[count++] = {
          .columns = group_columns<C, stream_rows>(rules.vis, kind, state.tile, 0, keys.begin, keys.size()),
          .q = state.q,
          .scores = scratch_.scores + row * tile_stride,
          .values = scratch_.values + row * plan_.ld_out,
          .weights = scratch_.weights + row * weight_stride,
          .k = key_rows(p_, task_.sequence, task_.head_kv + t, keys, buffers_.k, p_.k, p_.head_dim),
          .v = key_rows(p_, task_.sequence, task_.head_kv + t, keys, buffers_.v, p_.v, p_.value_dim)};
    }
    if (count == 0) return;
    const std::span<const StreamTile<C>> all(tiles, count);
    stream_scores<typename Products::Kernel>(all);
    for (std::size_t n = 0; n < count; ++n) {
      if (tiles[n].columns.begin >= tiles[n].columns.end) continue;
      const TileState<C>& state = tiles_[visiting[n]];
      const ScoreRules<C> rules(p_, buffers_, task_.sequence, state.tile.head);
      stream_scores_wide<typename Products::Kernel>(tiles[n]);
      C kept[stream_rows + hn::MaxLanes(Wide<C>())];
      finish_weights<stream_rows>(buffers_, rules, state, kinds[n], tiles[n].columns, 0, keys.begin, C{1},
                                  tiles[n].scores, static_cast<const C*>(nullptr), nullptr, kept, scratch_.row,
                                  plan_.ld_out);
      keep_output(kept, tiles[n].columns.rows, state.out, plan_.ld_out);
      Products::Kernel::round(tiles[n]);
    }
    constexpr Index longest_chain = 128;  // as in add_tile_product
    for (Index begin = 0; begin < keys.size(); begin += longest_chain) {
      const Range columns{begin, std::min(keys.size(), begin + longest_chain)};
      stream_values<typename Products::Kernel>(all, columns);
      for (std::size_t n = 0; n < count; ++n) add_streamed_values(tiles_[visiting[n]], tiles[n], columns, keys.begin);
    }
  }

  void add_streamed_values(const TileState<C>& state, const StreamTile<C>& tile, Range columns, Index first_key) {
    const Wide<C> d;
    const Range chunk{std::max(columns.begin, tile.columns.begin), std::min(columns.end, tile.columns.end)};
    if (chunk.empty()) return;
    if (!all_below(tile.values, tile.columns.rows * tile.v.size, kLargeValue<C>)) {
      const ScoreRules<C> rules(p_, buffers_, task_.sequence, state.tile.head);
      add_unusual_values(buffers_, rules, state, tile, chunk, first_key, scratch_.row, plan_.ld_out);
      Products::Kernel::round(tile);  // later weights may have been scaled
    }
    for (Index r = 0; r < tile.columns.rows; ++r) {
      C* const out = state.out + r * plan_.ld_out;
      for (Index c = 0; c < tile.v.size; c += lanes<C>())
        hn::StoreU(hn::Add(hn::LoadU(d, out + c), hn::LoadU(d, tile.values + r * tile.v.size + c)), d, out + c);
    }
  }

  void begin(Index t) {
    TileState<C>& state = tiles_[t];
    const Index size = state.tile.size();
    state.begun = true;
    if (t + 1 < task_.count) prefetch_rows(tiles_[t + 1].q_rows);
    if constexpr (requires { typename Products::Kernel; }) {
      state.q_magnitude = Products::pack_queries(state.q_rows, scaling_, state.q, scratch_.row);
    } else {
      state.q_magnitude = Products::pack_queries(state.q_rows, scaling_, state.q);
    }
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

// Merges the states that query tile t of a task has from all parts of the keys, in their order, and writes its rows.
template <class Products>
void merge_splits(const ForwardPlan& plan, const Buffers& buffers, std::size_t index, Index t, Workspace workspace) {
  using C = typename Products::Number;
  const Problem& p = *plan.problem;
  const ForwardTask& task = plan.tasks[index];
  const C unit = Scaling<C>(p).unit;
  const PartialState<C> merged(plan, workspace.shared, index);
  const QueryTile tile = plan.tile_of(task, t);
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

// Calls f.operator()<P>() with the products of the plan.
template <typename F>
void with_products(const ForwardPlan& plan, F f) {
#if HWY_TARGET == HWY_AVX3_DL
  if (plan.products == ProductKind::pairs) return f.template operator()<PairProducts>();
  if (plan.products == ProductKind::amx) return f.template operator()<AmxProducts>();
  if (plan.products == ProductKind::stream_pairs) return f.template operator()<StreamProducts<float, StreamPairs>>();
#endif
  const bool wide = plan.problem->dtype == HR_FLOAT64;
  if (plan.products == ProductKind::stream) {
    return wide ? f.template operator()<StreamProducts<double, StreamVectors<double>>>()
                : f.template operator()<StreamProducts<float, StreamVectors<float>>>();
  }
  wide ? f.template operator()<VectorProducts<double>>() : f.template operator()<VectorProducts<float>>();
}

void pack_any(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
  with_products(plan, [&]<class P>() HEADRACE_ATTR {
    if constexpr (requires { typename P::Values; }) pack_task<P>(plan, buffers, task, workspace);
  });
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

void merge_any(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Index tile, Workspace workspace) {
  with_products(plan, [&]<class P>() HEADRACE_ATTR { merge_splits<P>(plan, buffers, task, tile, workspace); });
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
