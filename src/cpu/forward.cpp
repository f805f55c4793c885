// Streaming attention, forward (FlashAttention-2, Dao 2023, algorithm 1, for a CPU's caches): keys and
// values pass through the cache in tiles; each query row carries its running maximum, sum and output.
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
  C *q, *kt[2], *v[2], *scores, *out, *max, *sum, *value_scale, *row;
  BFloat16* weights;
  ForwardScratch(const ForwardPlan& plan, std::byte* base)
      : q(reinterpret_cast<C*>(base + plan.q)),
        kt{reinterpret_cast<C*>(base + plan.kt[0]), reinterpret_cast<C*>(base + plan.kt[1])},
        v{reinterpret_cast<C*>(base + plan.v[0]), reinterpret_cast<C*>(base + plan.v[1])},
        scores(reinterpret_cast<C*>(base + plan.scores)),
        out(reinterpret_cast<C*>(base + plan.out)),
        max(reinterpret_cast<C*>(base + plan.max)),
        sum(reinterpret_cast<C*>(base + plan.sum)),
        value_scale(reinterpret_cast<C*>(base + plan.value_scale)),
        row(reinterpret_cast<C*>(base + plan.row)),
        weights(reinterpret_cast<BFloat16*>(base + plan.weights)) {}
};

// The state that a task on one part of the keys leaves for merge_splits.
template <typename C>
struct PartialState {
  C *out, *max, *sum, *value_scale;
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

// s[begin, end) = exp(s - max), and the sums of that, lane by lane, added to sums. There are two chains of sums, for
// even and odd vectors of the tile: begin is even, so that columns that are left out before it change no bit.
// The weight of the maximum is exactly 1, which a multiply-add instead of difference and product would not keep.
template <typename C>
HWY_INLINE void exponentiate(C* HWY_RESTRICT s, Index begin, Index end, C max, C* HWY_RESTRICT sums) {
  const Wide<C> d;
  const Index n = lanes<C>();
  const auto m = hn::Set(d, max), log2e = hn::Set(d, kLog2E<C>);
  auto even = hn::Zero(d), odd = even;
  Index c = begin;
  for (; c + 4 * n <= end; c += 4 * n) {
    hn::Vec<Wide<C>> p[4];
    HEADRACE_UNROLL
    for (int i = 0; i < 4; ++i) p[i] = hn::Mul(hn::Sub(hn::LoadU(d, s + c + i * n), m), log2e);
    exp2_nonpositive(d, p);
    HEADRACE_UNROLL
    for (int i = 0; i < 4; ++i) hn::StoreU(p[i], d, s + c + i * n);
    even = hn::Add(hn::Add(even, p[0]), p[2]);
    odd = hn::Add(hn::Add(odd, p[1]), p[3]);
  }
  for (; c < end; c += n) {
    hn::Vec<Wide<C>> p[1] = {hn::Mul(hn::Sub(hn::LoadU(d, s + c), m), log2e)};
    exp2_nonpositive(d, p);
    hn::StoreU(p[0], d, s + c);
    if ((c - begin) / n % 2 == 0) {
      even = hn::Add(even, p[0]);
    } else {
      odd = hn::Add(odd, p[0]);
    }
  }
  hn::StoreU(hn::Add(hn::LoadU(d, sums), hn::Add(even, odd)), d, sums);
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
  exponentiate(s, begin, end, *max, sums);
}

// A query tile of a task: its part of the scratch memory, and the key tiles that it visits.
template <typename C>
struct TileState {
  QueryTile tile;
  // Those of this task's part of the keys. They begin at multiples of tile_k of the sequence, and a query tile's
  // parts depend on it alone: the bits of a row do not depend on its neighbours.
  Range visited;
  Rows q_rows, out_rows;
  C *q, *out, *max, *sum, *value_scale;
  C q_magnitude = 0;
  bool begun = false, ended = false;
};

// A tile of keys and values, and the query tiles of a task that see it. It is packed in pieces, while the query
// tiles pass by the tile before it.
template <class Products>
struct KeyTile {
  using C = typename Products::Number;
  static constexpr Index piece_rows = 16;

  Index index = 0;
  Range keys;
  TileKind kinds[max_tiles_per_task];
  Index visits = 0;  // by query tiles
  Rows k;
  C* kt = nullptr;
  C k_magnitude = 0;
  typename Products::Values v;
  C value_scale = 1;  // of the packed v
  Index packed = 0;   // pieces of k, then of v

  [[nodiscard]] Index pieces_of_each() const { return ceil_div(keys.size(), piece_rows); }
  [[nodiscard]] Index pieces() const { return 2 * pieces_of_each(); }

  void pack_until(Index end) {
    for (; packed < end; ++packed) {
      const Range rows = rows_of(packed);
      if (packed < pieces_of_each()) {
        k_magnitude = std::max(k_magnitude, Products::pack_keys(k, rows.begin, rows.end, kt));
      } else {
        v.pack(rows.begin, rows.end);
      }
    }
  }

  // What pack_until(end) will read.
  void prefetch_until(Index end, Prefetcher& prefetcher) const {
    const Index each = pieces_of_each();
    const auto row = [this](Index piece) { return std::min(keys.size(), piece * piece_rows); };
    prefetcher.add(k, row(packed), row(std::min(end, each)));
    prefetcher.add(v.source, row(std::max(packed, each) - each), row(end - each));
  }

 private:
  [[nodiscard]] Range rows_of(Index piece) const {
    const Index begin = piece % pieces_of_each() * piece_rows;
    return {begin, std::min(keys.size(), begin + piece_rows)};
  }
};

// Values are summed with weights up to 1 before they are divided by the sum of weights, so large ones could
// overflow where their mean does not: from this magnitude on they are summed scaled down, exactly.
template <typename C>
inline constexpr C kLargeValue = std::is_same_v<C, float> ? C(0x1p80) : C(0x1p900);
template <typename C>
inline constexpr C kLargeValueScale = std::is_same_v<C, float> ? C(0x1p-64) : C(0x1p-128);

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
  // Steps of a prefetcher in a full tile; those of the second product are left over.
  static Index steps() { return kMaxGroups * ceil_div(tile_k, panel_width<C>()); }

  static C pack_queries(const Rows& rows, double scale, C* q) {
    return pack_transposed(rows, Scaling<C>(scale).before, kBlockRows, q);
  }
  static C pack_keys(const Rows& rows, Index begin, Index end, C* kt) {
    return pack_transposed(rows, begin, end, C{1}, panel_width<C>(), kt);
  }
  static void scores(ScoreRules<C>& rules, const GroupColumns* groups, Index group_count, const TileState<C>& state,
                     const KeyTile<VectorProducts>& key_tile, C* scores, Prefetcher& prefetcher) {
    const Index depth = rules.problem.head_dim;
    score_product(groups, group_count, key_tile.keys.size(), depth, state.q, key_tile.kt, scores,
                  may_overflow(state.q_magnitude, key_tile.k_magnitude, depth), prefetcher);
  }
  static void round_weights(const ForwardScratch<C>& /*scratch*/, Index /*r*/, Index /*begin*/, Index /*end*/) {}
  static void add_values(const GroupColumns* groups, Index group_count, const ForwardScratch<C>& scratch,
                         const Values& v, C* out, Index ld_out, Prefetcher& prefetcher) {
    add_tile_product(groups, group_count, scratch.scores, v, out, ld_out, ld_out / lanes<C>(), prefetcher);
  }
};

#if HWY_TARGET == HWY_AVX3_DL
// The same on AMX tiles. q is not scaled before it is rounded, so the scale comes after the product.
struct AmxProducts {
  using Number = float;
  using Values = AmxRightRows;
  static constexpr Index kRows = kAmxRows;
  static Index steps() { return tile_k / kAmxRows; }

  static float pack_queries(const Rows& rows, double /*scale*/, float* q) {
    return amx_pack_left(rows, reinterpret_cast<BFloat16*>(q));
  }
  static float pack_keys(const Rows& rows, Index begin, Index end, float* kt) {
    return amx_pack_keys(rows, begin, end, reinterpret_cast<BFloat16*>(kt));
  }
  static void scores(ScoreRules<float>& rules, const GroupColumns* groups, Index group_count,
                     const TileState<float>& state, const KeyTile<AmxProducts>& key_tile, float* scores,
                     Prefetcher& prefetcher) {
    const Index depth = rules.problem.head_dim;
    const auto* q = reinterpret_cast<const BFloat16*>(state.q);
    const auto* k = reinterpret_cast<const BFloat16*>(key_tile.kt);
    rules.scaling.before = 1;
    rules.scaling.after = static_cast<float>(rules.problem.scale);
    if (may_overflow(state.q_magnitude, key_tile.k_magnitude, depth)) {
      rules.scaling.after = 1;
      return amx_score_product_wide(groups, group_count, depth, q, k, rules.problem.scale, scores);
    }
    amx_score_product(groups, group_count, key_tile.keys.size(), depth, q, k, scores, prefetcher);
  }
  static void round_weights(const ForwardScratch<float>& scratch, Index r, Index begin, Index end) {
    amx_round_weights(scratch.scores + r * tile_stride, begin, end, scratch.weights + r * amx_weight_stride);
  }
  static void add_values(const GroupColumns* groups, Index group_count, const ForwardScratch<float>& scratch,
                         const Values& v, float* out, Index ld_out, Prefetcher& prefetcher) {
    amx_add_product(groups, group_count, scratch.weights, v, out, ld_out, prefetcher);
  }
};
#endif

// One query tile against one key tile.
template <class Products, typename C = typename Products::Number>
void forward_tile(const Problem& p, const Buffers& buffers, Index b, const TileState<C>& state, TileKind kind,
                  KeyTile<Products>& key_tile, const ForwardScratch<C>& scratch, Index ld_out, Prefetcher& prefetcher) {
  const QueryTile& tile = state.tile;
  const Range keys = key_tile.keys;
  typename Products::Values& v = key_tile.v;
  const Index n = lanes<C>();
  const Index group_count = ceil_div(tile.size(), Products::kRows);
  ScoreRules<C> head_rules(p, buffers, b, tile.head);
  GroupColumns groups[kMaxGroups];
  for (Index g = 0; g < group_count; ++g) {
    groups[g] = group_columns<C, Products::kRows>(head_rules.vis, kind, tile, g, keys.begin, keys.size());
  }
  Products::scores(head_rules, groups, group_count, state, key_tile, scratch.scores, prefetcher);
  const auto rules_of = [&](Index h) HEADRACE_ATTR {
    ScoreRules<C> rules(p, buffers, b, h);
    rules.scaling = head_rules.scaling;
    return rules;
  };

  const bool plain = head_rules.plain(kind);
  const Dropout dropout{p.dropout_p, p.seed};
  for (Index g = 0; g < group_count; ++g) {
    const Index begin = groups[g].begin, end = groups[g].end;
    if (begin >= end) continue;
    const Index rounded = begin + round_up(end - begin, n);
    for (Index r = g * Products::kRows; r < g * Products::kRows + groups[g].rows; ++r) {
      C* s = scratch.scores + r * tile_stride;
      const Index h = tile.head_of(r), i = tile.row_of(r);
      if (plain) {
        std::fill(s + end, s + rounded, kMinusInf<C>);
      } else {
        finish_scores(h == tile.head ? head_rules : rules_of(h), kind, i, keys.begin, begin, end, s,
                      static_cast<C*>(nullptr), scratch.row);
      }
      softmax_row(s, begin, rounded, state.max + r, state.sum + r * n, state.out + r * ld_out, ld_out);
      if (dropout.active()) {
        dropout_factors<C>(dropout, b, h, i, keys.begin, begin, end, scratch.row);
        for (Index c = begin; c < end; ++c) s[c] *= scratch.row[c];
      }
      if (key_tile.value_scale != C{1} || state.value_scale[r] != C{1}) {
        match_value_scale(key_tile.value_scale, s, begin, end, state.value_scale + r, state.out + r * ld_out, ld_out);
      }
      Products::round_weights(scratch, r, begin, end);
    }
  }

  if (head_rules.hides(kind)) v.isolate_bad();
  Products::add_values(groups, group_count, scratch, v, state.out, ld_out, prefetcher);
  for (Index bad = 0; bad < v.bad_count; ++bad) {
    const Index j = v.bad[bad];
    for (Index r = 0; r < tile.size(); ++r) {
      if (!ScoreRules<C>(p, buffers, b, tile.head_of(r)).visible(tile.row_of(r), keys.begin + j)) continue;
      v.add_bad(j, scratch.scores[r * tile_stride + j], state.out + r * ld_out);
    }
  }
}

// Rows of the output: out / sum, and lse, with the sink as one more key that has no value.
template <typename C>
void write_rows(const ForwardPlan& plan, const Buffers& buffers, Index b, const QueryTile& tile, const C* out,
                const C* max, const C* sums, const C* value_scales) {
  const Problem& p = *plan.problem;
  const Index batch = p.ragged ? 0 : b, q_begin = p.sequences[static_cast<std::size_t>(b)].q_begin;
  for (Index r = 0; r < tile.size(); ++r) {
    const Index h = tile.head_of(r), row = q_begin + tile.row_of(r);
    SoftmaxState<double> state{static_cast<double>(max[r]), static_cast<double>(sums[r])};
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

// The query tiles of a task against its part of the keys. A query tile is packed when its first key tile comes and
// written after its last one, while its neighbours' rows are on their way through the caches.
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
        scratch_(plan, workspace.scratch),
        partial_(plan, workspace.shared, index) {
    const Index b = task_.sequence, n = lanes<C>(), batch = p_.ragged ? 0 : b;
    const auto rows_of = [&](const void* data, const RowStrides& strides, const QueryTile& tile, Index size) {
      return Rows{.data = data,
                  .dtype = p_.dtype,
                  .offset = strides.at(batch, seq_.q_begin + tile.row, tile.head),
                  .stride = strides.row,
                  .count = tile.size(),
                  .size = size,
                  .inner = tile.heads == 1 ? 0 : tile.rows,
                  .outer_stride = strides.head};
    };
    for (Index t = 0; t < task_.count; ++t) {
      TileState<C>& state = tiles_[t];
      const Index row = t * round_up(tile_q, kBlockRows);
      const QueryTile tile = plan.query_tile(seq_.q_len, task_.head_kv, task_.first + t);
      state.tile = tile;
      state.q_rows = rows_of(buffers.q, p_.q, tile, p_.head_dim);
      state.out_rows = rows_of(buffers.out, p_.out, tile, p_.value_dim);
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
    KeyTile<Products> key_tiles[2];
    Index current = 0;
    find(all_.begin, 0, key_tiles[0]);
    key_tiles[0].pack_until(key_tiles[0].pieces());
    for (; key_tiles[current].index < all_.end; current = 1 - current) {
      find(key_tiles[current].index + 1, 1 - current, key_tiles[1 - current]);
      visit(key_tiles[current], key_tiles[1 - current]);
    }
    for (Index t = 0; t < task_.count; ++t) {
      if (!tiles_[t].begun) begin(t);
      if (!tiles_[t].ended) end(t);
    }
  }

 private:
  [[nodiscard]] Rows key_rows(const void* data, const RowStrides& strides, Range keys, Index size) const {
    return {.data = data,
            .dtype = p_.dtype,
            .offset = strides.at(p_.ragged ? 0 : task_.sequence, seq_.k_begin + keys.begin, task_.head_kv),
            .stride = strides.row,
            .count = keys.size(),
            .size = size};
  }

  // The first key tile from `index` on that a query tile sees, to be packed into the scratch memory's tile `slot`.
  void find(Index index, Index slot, KeyTile<Products>& key_tile) const {
    key_tile = {};
    for (; index < all_.end && key_tile.visits == 0; ++index) {
      key_tile.keys = {index * tile_k, std::min<Index>(seq_.k_len, (index + 1) * tile_k)};
      for (Index t = 0; t < task_.count; ++t) {
        const TileState<C>& state = tiles_[t];
        TileKind& kind = key_tile.kinds[t];
        kind = TileKind::hidden;
        if (index < state.visited.begin || index >= state.visited.end) continue;
        kind = classify(p_, buffers_, task_.sequence, state.tile, key_tile.keys);
        if (kind != TileKind::hidden) ++key_tile.visits;
      }
    }
    if (key_tile.visits == 0) {
      key_tile.index = all_.end;
      key_tile.keys = {};
      return;
    }
    key_tile.index = index - 1;
    key_tile.k = key_rows(buffers_.k, p_.k, key_tile.keys, p_.head_dim);
    key_tile.kt = scratch_.kt[slot];
    key_tile.v =
        typename Products::Values(key_rows(buffers_.v, p_.v, key_tile.keys, p_.value_dim), scratch_.v[slot], 0);
  }

  // All query tiles that see the current key tile, while the next one is packed.
  void visit(KeyTile<Products>& current, KeyTile<Products>& next) {
    if (current.v.magnitude >= kLargeValue<C>) {
      current.value_scale = kLargeValueScale<C>;
      current.v.scale(current.value_scale);
    }
    Index visits = 0;
    for (Index t = 0; t < task_.count; ++t) {
      if (current.kinds[t] == TileKind::hidden) continue;
      TileState<C>& state = tiles_[t];
      if (!state.begun) begin(t);
      const bool last = current.index + 1 == state.visited.end;
      const Index pieces = next.pieces() * ++visits / current.visits;  // of the next key tile, packed from now on
      Prefetcher prefetcher;
      next.prefetch_until(pieces, prefetcher);
      if (t + 1 < task_.count && !tiles_[t + 1].begun)
        prefetcher.add(tiles_[t + 1].q_rows, 0, tiles_[t + 1].q_rows.count);
      if (last && plan_.splits == 1) prefetcher.add(state.out_rows, 0, state.out_rows.count);
      prefetcher.start(Products::steps());
      forward_tile(p_, buffers_, task_.sequence, state, current.kinds[t], current, scratch_, plan_.ld_out, prefetcher);
      if (last) end(t);
      next.pack_until(pieces);
    }
  }

  void begin(Index t) {
    TileState<C>& state = tiles_[t];
    const Index size = state.tile.size();
    state.begun = true;
    state.q_magnitude = Products::pack_queries(state.q_rows, p_.scale, state.q);
    std::fill_n(state.out, size * plan_.ld_out, C{0});
    std::fill_n(state.max, size, kMinusInf<C>);
    std::fill_n(state.value_scale, size, C{1});
    std::fill_n(state.sum, size * lanes<C>(), C{0});
  }

  // The sum of each row; then its output, or the state for merge_splits.
  void end(Index t) {
    TileState<C>& state = tiles_[t];
    state.ended = true;
    const Index size = state.tile.size(), n = lanes<C>(), row = t * round_up(tile_q, kBlockRows);
    C* const sum = plan_.splits == 1 ? state.sum : partial_.sum + row;
    for (Index r = 0; r < size; ++r) {
      sum[r] = hn::GetLane(hn::SumOfLanes(Wide<C>(), hn::LoadU(Wide<C>(), state.sum + r * n)));
    }
    if (plan_.splits == 1) {
      return write_rows(plan_, buffers_, task_.sequence, state.tile, state.out, state.max, sum, state.value_scale);
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
template <typename C>
void merge_splits(const ForwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace) {
  const Problem& p = *plan.problem;
  const ForwardTask& task = plan.tasks[index];
  const Sequence& seq = p.sequences[static_cast<std::size_t>(task.sequence)];
  const Index rows_per_tile = round_up(tile_q, kBlockRows);
  const PartialState<C> merged(plan, workspace.shared, index);
  for (Index t = 0; t < task.count; ++t) {
    const QueryTile tile = plan.query_tile(seq.q_len, task.head_kv, task.first + t);
    const Index first = t * rows_per_tile;
    for (Index split = 1; split < plan.splits; ++split) {
      const PartialState<C> part(plan, workspace.shared, index + static_cast<std::size_t>(split));
      for (Index r = first; r < first + tile.size(); ++r) {
        SoftmaxState<C> state{merged.max[r], merged.sum[r]};
        const SoftmaxState<C> added{part.max[r], part.sum[r]};
        if (added.empty()) continue;
        auto weights = state.merge(added);
        const C scale = std::min(merged.value_scale[r], part.value_scale[r]);
        weights.kept *= scale / merged.value_scale[r];
        weights.added *= scale / part.value_scale[r];
        merged.value_scale[r] = scale;
        C* out = merged.out + r * plan.ld_out;
        const C* part_out = part.out + r * plan.ld_out;
        for (Index c = 0; c < plan.ld_out; ++c) out[c] = weights.kept * out[c] + weights.added * part_out[c];
        merged.max[r] = state.m;
        merged.sum[r] = state.l;
      }
    }
    write_rows(plan, buffers, task.sequence, tile, merged.out + first * plan.ld_out, merged.max + first,
               merged.sum + first, merged.value_scale + first);
  }
}

void forward_any(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
  plan.problem->dtype == HR_FLOAT64 ? forward_task<VectorProducts<double>>(plan, buffers, task, workspace)
                                    : forward_task<VectorProducts<float>>(plan, buffers, task, workspace);
}

#if HWY_TARGET == HWY_AVX3_DL
void forward_amx(const ForwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
  if (!plan.amx) return forward_any(plan, buffers, task, workspace);
  const AmxScope scope;
  forward_task<AmxProducts>(plan, buffers, task, workspace);
}

void add_amx(KernelTable& table) {
  table.amx = true;
  table.forward = forward_amx;
}
#endif

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
