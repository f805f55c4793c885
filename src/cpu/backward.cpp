// Streaming attention, backward (FlashAttention-2, Dao 2023, algorithm 2): for each tile of keys all
// query tiles pass by; probabilities are rebuilt from q, k and lse; dk and dv stay in the cache. dq of a
// query tile is added up by the tasks of its key tiles in the order of the keys, each waiting for its
// turn: the sum has one order, whatever the number of threads, and needs no copies.
#include "cpu/simd/target.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu/kernels.hpp"
#include "cpu/simd/amx-inl.h"
#include "cpu/simd/attributes-inl.h"
#include "cpu/simd/gemm-inl.h"
#include "cpu/simd/math-inl.h"
#include "cpu/simd/pack-inl.h"
#include "cpu/simd/pairs-inl.h"
#include "cpu/simd/scores-inl.h"
#include "cpu/simd/tile-inl.h"
#include "cpu/tile_config.hpp"
#include "hwy/highway.h"

HEADRACE_BEFORE_NAMESPACE();
namespace headrace::cpu::HWY_NAMESPACE {

// The memory of one task: its thread's scratch, and the row statistics that all tasks share.
template <typename C>
struct BackwardMemory {
  C *q, *dout, *kt, *vt, *k_rows, *p, *ds, *dk, *dv, *row, *dbias;
  BFloat16 *p_rounded, *ds_rounded, *ds_rows_rounded;
  C *delta, *lse, *dq_accumulator;
  std::int32_t* turns;

  BackwardMemory(const BackwardPlan& plan, Workspace workspace)
      : delta(at(workspace.shared, plan.delta)),
        lse(at(workspace.shared, plan.lse)),
        dq_accumulator(at(workspace.shared, plan.dq_accumulator)),
        turns(reinterpret_cast<std::int32_t*>(workspace.shared + plan.turns)) {
    std::byte* scratch = workspace.scratch;
    q = at(scratch, plan.q), dout = at(scratch, plan.dout);
    kt = at(scratch, plan.kt), vt = at(scratch, plan.vt), k_rows = at(scratch, plan.k_rows);
    p = at(scratch, plan.p), ds = at(scratch, plan.ds);
    dk = at(scratch, plan.dk), dv = at(scratch, plan.dv);
    row = at(scratch, plan.row), dbias = at(scratch, plan.dbias);
    p_rounded = reinterpret_cast<BFloat16*>(scratch + plan.p_rounded);
    ds_rounded = reinterpret_cast<BFloat16*>(scratch + plan.ds_rounded);
    ds_rows_rounded = reinterpret_cast<BFloat16*>(scratch + plan.ds_rows_rounded);
  }

 private:
  static C* at(std::byte* base, std::size_t offset) { return reinterpret_cast<C*>(base + offset); }
};

// Rows of a tensor of one sequence and head.
HWY_INLINE Rows rows_of(const Problem& problem, const void* data, const RowStrides& strides, Index b, Index head,
                        Index first, Index count, Index size) {
  return {.data = data,
          .dtype = problem.dtype,
          .offset = strides.at(problem.ragged ? 0 : b, first, head),
          .stride = strides.row,
          .count = count,
          .size = size};
}

// A tile of queries (one head) against a tile of keys, with packed operands.
template <typename C>
struct GradientTile {
  QueryTile rows;
  Range keys;
  TileKind kind = TileKind::hidden;
  const C *q = nullptr, *dout = nullptr;  // packed for the products with k and v
  // What will be read next: bytes of packed queries, counted from q; or rows of the caller.
  Range ahead;
  Rows rows_ahead[2];
  C q_magnitude = 0, k_magnitude = 0, dout_magnitude = 0, v_magnitude = 0;
  GroupColumns groups[kMaxGroups];
  Index group_count = 0;

  // Asks for a part of what will be read next, that of row r, to be in the L2 cache soon: to ask for all of it at once
  // would take as long as to read it.
  void prefetch(Index r) const {
    constexpr Index line = 64;
    const char* const bytes = reinterpret_cast<const char*>(q);
    for (Index at = ahead.begin + r * line; at < ahead.end; at += rows.rows * line)
      __builtin_prefetch(bytes + at, 0, 2);
    for (const Rows& source : rows_ahead) {
      if (r < source.count) prefetch_row(source, r);
    }
  }
};

// The part of a score's gradient that a caller needs.
enum class Gradient {
  score,  // of scale * (q . k) divided by q . k: what dq and dk are products with
  bias    // of the score after softcap, where the bias is added
};

// One row: scores s and products dp = dout . v to probabilities (with dropout) and score gradients, in
// place. Columns outside [begin, end) become 0 in both.
template <typename C>
HWY_NOINLINE void gradient_row(const ScoreRules<C>& rules, const GradientTile<C>& tile, Gradient gradient, Index i,
                               Index begin, Index end, C lse, C delta, C* HWY_RESTRICT s, C* HWY_RESTRICT dp,
                               C* HWY_RESTRICT row) {
  const Wide<C> d;
  const Index n = lanes<C>(), count = tile.keys.size();
  if (lse == kMinusInf<C> || begin >= end) {
    std::fill(s, s + count, C{0});
    std::fill(dp, dp + count, C{0});
    return;
  }
  const Problem& p = rules.problem;
  C* const temp = row;
  C* const slopes = row + tile_stride;  // of the softcap
  C* const factors = row + 2 * tile_stride;
  if (rules.plain(tile.kind)) {
    std::fill(s + end, s + begin + round_up(end - begin, n), kMinusInf<C>);
  } else {
    finish_scores(rules, tile.kind, i, tile.keys.begin, begin, end, s, slopes, temp);
  }
  const bool drops = p.dropout_p > 0.0;
  if (drops) {
    dropout_factors<C>({p.dropout_p, p.seed}, rules.b, rules.h, i, tile.keys.begin, begin, end, factors);
  }
  const bool capped = gradient == Gradient::score && p.softcap > 0.0;
  const auto scale = hn::Set(d, gradient == Gradient::score ? static_cast<C>(p.scale) : C{1});
  const auto unit = hn::Set(d, rules.scaling.unit), lse_vec = hn::Set(d, lse), delta_vec = hn::Set(d, delta),
             zero = hn::Zero(d);
  const auto minus_inf = hn::Set(d, kMinusInf<C>);
  for (Index c = begin; c < end; c += n) {
    const auto score = hn::LoadU(d, s + c);
    // p <= 1: where lse is so large that its rounding says otherwise, nothing may overflow.
    const auto x = hn::Sub(hn::Mul(score, unit), lse_vec);  // 0 where this is the row's only key: as lse was rounded
    const auto prob = exp_nonpositive(d, hn::IfThenElse(hn::Gt(x, zero), zero, x));
    auto dprob = hn::LoadU(d, dp + c);
    auto kept = prob;
    if (drops) {
      const auto factor = hn::LoadU(d, factors + c);
      kept = hn::Mul(prob, factor);
      dprob = hn::Mul(dprob, factor);
    }
    auto ds = hn::Mul(prob, hn::Sub(dprob, delta_vec));
    if (capped) ds = hn::Mul(ds, hn::LoadU(d, slopes + c));
    ds = hn::Mul(ds, scale);
    // A hidden pair has no gradient, even where v, dout or lse are not finite.
    const auto hidden = hn::Eq(score, minus_inf);
    hn::StoreU(hn::IfThenZeroElse(hidden, ds), d, dp + c);
    hn::StoreU(hn::IfThenZeroElse(hidden, kept), d, s + c);
  }
  std::fill(s, s + begin, C{0});
  std::fill(dp, dp + begin, C{0});
  std::fill(s + end, s + count, C{0});
  std::fill(dp + end, dp + count, C{0});
}

// The five products of the backward pass, and the layouts of their operands, in vectors of C.
template <typename C>
struct VectorGradients {
  using Number = C;
  using Right = RightRows<C>;
  static constexpr Index kRows = kBlockRows;  // of a group, which share the columns that they need

  static C pack_left(const Rows& rows, C factor, C* dst) { return pack_transposed(rows, factor, kBlockRows, dst); }
  static C pack_keys(const Rows& rows, C* dst) { return pack_transposed(rows, C{1}, panel_width<C>(), dst); }
  static void scores(GradientTile<C>& tile, Index dim, const C* left, const C* right, bool wide, C* target) {
    if (wide) return score_product_wide(tile.groups, tile.group_count, dim, left, right, target);
    score_product(tile.groups, tile.group_count, tile.keys.size(), dim, left, right, target, nullptr);
  }
  static void round(const GradientTile<C>& /*tile*/, const BackwardMemory<C>& /*memory*/) {}
  // p and the scores' gradients, as the products with dout, q and k read them.
  static const C* p(const BackwardMemory<C>& memory) { return memory.p; }
  static const C* ds(const BackwardMemory<C>& memory) { return memory.ds; }
  static const C* ds_of_rows(const BackwardMemory<C>& memory) { return memory.ds; }
};

#if HWY_TARGET == HWY_AVX3_DL
// The same with pairs of bfloat16: p and ds are rounded to it.
struct PairGradients {
  using Number = float;
  using Right = PairRightRows;
  static constexpr Index kRows = kBlockRows;

  static float pack_left(const Rows& rows, float factor, float* dst) {
    return pack_pairs_transposed(rows, 0, rows.count, factor, kBlockRows, reinterpret_cast<Pair*>(dst));
  }
  static float pack_keys(const Rows& rows, float* dst) {
    return pack_pairs_transposed(rows, 0, rows.count, 1.0f, panel_width<float>(), reinterpret_cast<Pair*>(dst));
  }
  static void scores(GradientTile<float>& tile, Index dim, const float* left, const float* right, bool wide,
                     float* target) {
    const auto *a = reinterpret_cast<const Pair*>(left), *b = reinterpret_cast<const Pair*>(right);
    if (wide) return pair_score_product_wide(tile.groups, tile.group_count, pairs_of(dim), a, b, target);
    score_product(tile.groups, tile.group_count, tile.keys.size(), pairs_of(dim), a, b, target, nullptr);
  }
  static void round(const GradientTile<float>& tile, const BackwardMemory<float>& memory) {
    const Index rows = tile.rows.rows, keys = tile.keys.size();
    for (Index r = 0; r < rows; r += 2) {
      const auto pair = [&](const float* values, BFloat16* pairs) HEADRACE_ATTR {
        const float* const first = values + r * tile_stride;
        round_row_pair(first, r + 1 < rows ? first + tile_stride : nullptr, keys, pairs + r * tile_stride);
      };
      pair(memory.p, memory.p_rounded);
      pair(memory.ds, memory.ds_rounded);
    }
    for (Index r = 0; r < rows; ++r)
      round_weights(memory.ds + r * tile_stride, 0, keys, memory.ds_rows_rounded + r * weight_stride);
  }
  static const Pair* p(const BackwardMemory<float>& memory) { return reinterpret_cast<const Pair*>(memory.p_rounded); }
  static const Pair* ds(const BackwardMemory<float>& memory) {
    return reinterpret_cast<const Pair*>(memory.ds_rounded);
  }
  static const Pair* ds_of_rows(const BackwardMemory<float>& memory) {
    return reinterpret_cast<const Pair*>(memory.ds_rows_rounded);
  }
};

// The same on AMX tiles: of p and ds, the products with dout and q read the transpose.
struct AmxGradients {
  using Number = float;
  using Right = AmxRightRows;
  static constexpr Index kRows = kAmxRows;

  static float pack_left(const Rows& rows, float factor, float* dst) {
    return amx_pack_left(rows, factor, reinterpret_cast<BFloat16*>(dst));
  }
  static float pack_keys(const Rows& rows, float* dst) {
    return amx_pack_keys(rows, 0, rows.count, reinterpret_cast<BFloat16*>(dst));
  }
  static void scores(GradientTile<float>& tile, Index dim, const float* left, const float* right, bool wide,
                     float* target) {
    const auto *a = reinterpret_cast<const BFloat16*>(left), *b = reinterpret_cast<const BFloat16*>(right);
    if (wide) return amx_score_product_wide(tile.groups, tile.group_count, dim, a, b, target);
    amx_score_product(tile.groups, tile.group_count, tile.keys.size(), dim, a, b, target);
  }
  static void round(const GradientTile<float>& tile, const BackwardMemory<float>& memory) {
    const Index rows = tile.rows.rows, keys = tile.keys.size();
    amx_round_transposed(memory.p, rows, keys, memory.p_rounded);
    amx_round_transposed(memory.ds, rows, keys, memory.ds_rounded);
    for (Index r = 0; r < rows; ++r)
      round_weights(memory.ds + r * tile_stride, 0, keys, memory.ds_rows_rounded + r * weight_stride);
  }
  static const BFloat16* p(const BackwardMemory<float>& memory) { return memory.p_rounded; }
  static const BFloat16* ds(const BackwardMemory<float>& memory) { return memory.ds_rounded; }
  static const BFloat16* ds_of_rows(const BackwardMemory<float>& memory) { return memory.ds_rows_rounded; }
};
#endif

// memory.p and memory.ds of the tile, from the packed q, dout, k and v. lse, delta: of the tile's rows.
template <class Gradients, typename C = typename Gradients::Number>
void gradient_tile(const ScoreRules<C>& rules, GradientTile<C>& tile, Gradient gradient, const C* lse, const C* delta,
                   const BackwardMemory<C>& memory) {
  const Problem& p = rules.problem;
  constexpr Index group_rows = Gradients::kRows;
  tile.group_count = ceil_div(tile.rows.size(), group_rows);
  for (Index g = 0; g < tile.group_count; ++g) {
    tile.groups[g] =
        group_columns<C, group_rows>(rules.vis, tile.kind, tile.rows, g, tile.keys.begin, tile.keys.size());
  }
  Gradients::scores(tile, p.head_dim, tile.q, memory.kt, may_overflow(tile.q_magnitude, tile.k_magnitude, p.head_dim),
                    memory.p);
  Gradients::scores(tile, p.value_dim, tile.dout, memory.vt,
                    may_overflow(tile.dout_magnitude, tile.v_magnitude, p.value_dim), memory.ds);
  for (Index r = 0; r < tile.rows.rows; ++r) {
    const GroupColumns& group = tile.groups[r / group_rows];
    tile.prefetch(r);
    gradient_row(rules, tile, gradient, tile.rows.row + r, group.begin, group.end, lse[r], delta[r],
                 memory.p + r * tile_stride, memory.ds + r * tile_stride, memory.row);
  }
}

// Rows of the tile that may see keys [begin, end) of it.
template <typename C>
Range rows_that_see(const ScoreRules<C>& rules, const GradientTile<C>& tile, Index begin, Index end) {
  if (tile.kind != TileKind::edge) return {0, tile.rows.rows};
  const Range seen = rules.vis.rows_of_keys({tile.keys.begin + begin, tile.keys.begin + end});
  const Index first = std::clamp<Index>(seen.begin - tile.rows.row, 0, tile.rows.rows);
  return {first, std::clamp<Index>(seen.end - tile.rows.row, first, tile.rows.rows)};
}

// target[key] += sum over rows of units (row, key) * right[row]: the products with transposed tiles.
template <class Right, typename T, typename C = typename Unit<T>::Sum>
void multiply_transposed(const ScoreRules<C>& rules, const GradientTile<C>& tile, const T* units, const Right& right,
                         C* target, Index ld) {
  constexpr Index elements = Unit<T>::elements;
  const Index n = lanes<C>(), vecs = ld / n, count = tile.keys.size();
  for (Index vec = 0; vec < vecs; vec += kBlockVecs) {
    for (Index c = 0; c < count; c += kBlockRows) {
      const Index keys = std::min<Index>(kBlockRows, count - c);
      const Range rows = rows_that_see(rules, tile, c, c + keys);
      if (rows.empty()) continue;
      const Index begin = rows.begin / elements;
      gemm<Left::transposed_tile, Into::add>(keys, std::min<Index>(kBlockVecs, vecs - vec),
                                             ceil_div(rows.end, elements) - begin, units + begin * tile_stride + c,
                                             right.at(begin, vec), target + c * ld + vec * n, ld);
    }
  }
}

// target[row] += sum over keys of units (row, key) * right[key].
template <class Right, typename T, typename C = typename Unit<T>::Sum>
void multiply_rows(const GradientTile<C>& tile, const T* units, const Right& right, C* target, Index ld, Index vecs) {
  add_tile_product(tile.groups, tile.group_count, units, right, target, ld, vecs);
}

#if HWY_TARGET == HWY_AVX3_DL
void multiply_transposed(const ScoreRules<float>& rules, const GradientTile<float>& tile, const BFloat16* transposed,
                         const AmxRightRows& right, float* target, Index ld) {
  constexpr Index most_groups = 3;
  const Index count = tile.keys.size();
  for (Index c = 0; c < count; c += most_groups * kAmxRows) {
    const Index group_count = std::min(most_groups, ceil_div(count - c, kAmxRows));
    GroupColumns groups[most_groups];
    for (Index g = 0; g < group_count; ++g) {
      const Index first = c + g * kAmxRows, keys = std::min(kAmxRows, count - first);
      const Range rows = rows_that_see(rules, tile, first, first + keys);
      groups[g] = {.rows = keys, .begin = rows.begin, .end = rows.end};
    }
    amx_add_product(groups, group_count, transposed + c * transposed_stride, transposed_stride, right, target + c * ld,
                    ld);
  }
}

void multiply_rows(const GradientTile<float>& tile, const BFloat16* weights, const AmxRightRows& right, float* target,
                   Index ld, Index /*vecs*/) {
  amx_add_product(tile.groups, tile.group_count, weights, weight_stride, right, target, ld);
}
#endif

// target[key] += sum over rows of weights[row][key] * right[row]. units: the weights as the product reads them.
template <class Right, typename T, typename C>
void add_transposed_product(const ScoreRules<C>& rules, const GradientTile<C>& tile, const C* weights, const T* units,
                            const Right& right, C* target, Index ld) {
  multiply_transposed(rules, tile, units, right, target, ld);
  for (Index bad = 0; bad < right.bad->count; ++bad) {
    const Index r = right.bad->rows[bad];
    for (Index c = 0; c < tile.keys.size(); ++c) {
      if (rules.visible(tile.rows.row + r, tile.keys.begin + c)) {
        right.add_bad(r, weights[r * tile_stride + c], target + c * ld);
      }
    }
  }
}

// dq[row] += sum over keys of ds[row][key] * k[key]. units: ds as the product reads it.
template <class Right, typename T, typename C>
void add_query_gradient(const ScoreRules<C>& rules, const GradientTile<C>& tile, const C* ds, const T* units,
                        const Right& k, C* dq, Index dq_stride, Index vecs) {
  multiply_rows(tile, units, k, dq, dq_stride, vecs);
  for (Index bad = 0; bad < k.bad->count; ++bad) {
    const Index c = k.bad->rows[bad];
    for (Index r = 0; r < tile.rows.rows; ++r) {
      if (rules.visible(tile.rows.row + r, tile.keys.begin + c)) {
        k.add_bad(c, ds[r * tile_stride + c], dq + r * dq_stride);
      }
    }
  }
}

// Packs k and v of a key tile for the products with q and dout.
template <class Gradients, typename C = typename Gradients::Number>
void pack_keys(const Problem& p, const Buffers& buffers, Index b, Index head_kv, GradientTile<C>& tile,
               const BackwardMemory<C>& memory) {
  const Index first = p.sequences[static_cast<std::size_t>(b)].k_begin + tile.keys.begin, count = tile.keys.size();
  tile.k_magnitude = Gradients::pack_keys(rows_of(p, buffers.k, p.k, b, head_kv, first, count, p.head_dim), memory.kt);
  tile.v_magnitude = Gradients::pack_keys(rows_of(p, buffers.v, p.v, b, head_kv, first, count, p.value_dim), memory.vt);
}

// q and dout of a query tile, packed: as left operands of the products with k and v, and as right ones of those with p
// and ds.
template <class Gradients>
struct QueryOperands {
  using C = typename Gradients::Number;

  Rows q_source, dout_source;
  C *q, *dout;
  PackedQueries* facts;
  typename Gradients::Right q_rows, dout_rows;

  QueryOperands(const BackwardPlan& plan, const Buffers& buffers, Index b, Index h, Index query_tile,
                Workspace workspace) {
    const Problem& p = *plan.problem;
    const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
    const Index row = query_tile * tile_q, count = std::min(tile_q, seq.q_len - row);
    q_source = rows_of(p, buffers.q, p.q, b, h, seq.q_begin + row, count, p.head_dim);
    dout_source = rows_of(p, buffers.dout, p.dout, b, h, seq.q_begin + row, count, p.value_dim);
    std::byte* const memory = plan.shares_queries
                                  ? workspace.shared + plan.queries +
                                        static_cast<std::size_t>(plan.tile_number(b, h, query_tile)) * plan.tile_bytes
                                  : workspace.scratch + plan.own_tile;
    q = reinterpret_cast<C*>(memory);
    dout = reinterpret_cast<C*>(memory + plan.tile_dout);
    facts = reinterpret_cast<PackedQueries*>(memory + plan.tile_facts);
    q_rows = {q_source, reinterpret_cast<C*>(memory + plan.tile_q_rows), &facts->q};
    dout_rows = {dout_source, reinterpret_cast<C*>(memory + plan.tile_dout_rows), &facts->dout};
  }

  void pack(C q_factor) {
    *facts = {};
    facts->q_magnitude = static_cast<double>(Gradients::pack_left(q_source, q_factor, q));
    facts->dout_magnitude = static_cast<double>(Gradients::pack_left(dout_source, C{1}, dout));
    q_rows.pack(0, q_source.count);
    dout_rows.pack(0, dout_source.count);
    q_rows.isolate_bad();
    dout_rows.isolate_bad();
  }
};

template <typename C>
void write_rows(const C* rows, Index ld, const Rows& target, void* data) {
  with_elements<C>(data, target.dtype, [&](auto* dst) HEADRACE_ATTR {
    for (Index r = 0; r < target.count; ++r) narrow_row(rows + r * ld, C{1}, target.size, dst + target.at(r));
  });
}

template <class Gradients>
void backward_task(const BackwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace) {
  using C = typename Gradients::Number;
  using Right = typename Gradients::Right;
  const Problem& p = *plan.problem;
  const BackwardTask& task = plan.tasks[index];
  const Index b = task.sequence;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
  const BackwardMemory<C> memory(plan, workspace);
  const Index n = lanes<C>();

  GradientTile<C> tile;
  tile.keys = {task.key_tile * plan.tile_keys, std::min<Index>(seq.k_len, (task.key_tile + 1) * plan.tile_keys)};
  const Index k_first = seq.k_begin + tile.keys.begin, key_count = tile.keys.size();
  Right k;
  BadRows bad_keys;
  bool packed = false;
  std::fill_n(memory.dk, key_count * plan.ld_q, C{0});
  std::fill_n(memory.dv, key_count * plan.ld_v, C{0});

  const Index query_tiles = ceil_div(seq.q_len, tile_q);
  for (Index h = task.head_kv * p.group(); h < (task.head_kv + 1) * p.group(); ++h) {
    const ScoreRules<C> rules(p, buffers, b, h);
    for (Index query_tile = 0; query_tile < query_tiles; ++query_tile) {
      const Range rows{query_tile * tile_q, std::min<Index>(seq.q_len, (query_tile + 1) * tile_q)};
      const Range seen = rules.vis.keys_of_rows(rows);
      const Index first_turn = seen.begin / plan.tile_keys;
      if (seen.empty() || task.key_tile < first_turn || task.key_tile >= ceil_div(seen.end, plan.tile_keys)) continue;

      tile.kind = rules.vis.classify(rows, tile.keys);
      if (tile.kind != TileKind::hidden) {
        if (!packed) {
          packed = true;
          pack_keys<Gradients>(p, buffers, b, task.head_kv, tile, memory);
          k = Right(rows_of(p, buffers.k, p.k, b, task.head_kv, k_first, key_count, p.head_dim), memory.k_rows,
                    &bad_keys);
          k.pack(0, key_count);
        }
        QueryOperands<Gradients> queries(plan, buffers, b, h, query_tile, workspace);
        if (!plan.shares_queries) queries.pack(rules.scaling.before);
        tile.rows = {.head = h, .heads = 1, .row = rows.begin, .rows = rows.size()};
        tile.q = queries.q;
        tile.dout = queries.dout;
        const Index bytes = static_cast<Index>(plan.tile_bytes);
        const bool is_last = query_tile + 1 == query_tiles;
        tile.ahead = plan.shares_queries && !is_last ? Range{bytes, 2 * bytes} : Range{};
        tile.rows_ahead[0] = tile.rows_ahead[1] = {};
        if (!plan.shares_queries && !is_last) {
          const Index next = seq.q_begin + rows.end, count = std::min(tile_q, seq.q_len - rows.end);
          tile.rows_ahead[0] = rows_of(p, buffers.q, p.q, b, h, next, count, p.head_dim);
          tile.rows_ahead[1] = rows_of(p, buffers.dout, p.dout, b, h, next, count, p.value_dim);
        }
        tile.q_magnitude = static_cast<C>(queries.facts->q_magnitude);
        tile.dout_magnitude = static_cast<C>(queries.facts->dout_magnitude);
        const Index statistics = plan.head_row(b, h) + rows.begin;
        gradient_tile<Gradients>(rules, tile, Gradient::score, memory.lse + statistics, memory.delta + statistics,
                                 memory);
        Gradients::round(tile, memory);

        if (rules.hides(tile.kind)) k.isolate_bad();
        add_transposed_product(rules, tile, memory.p, Gradients::p(memory), queries.dout_rows, memory.dv, plan.ld_v);
        add_transposed_product(rules, tile, memory.ds, Gradients::ds(memory), queries.q_rows, memory.dk, plan.ld_q);
      }

      std::atomic_ref<std::int32_t> turn(memory.turns[plan.tile_number(b, h, query_tile)]);
      const std::int32_t mine = static_cast<std::int32_t>(task.key_tile - first_turn);
      while (turn.load(std::memory_order_acquire) != mine) sched_yield();
      if (tile.kind != TileKind::hidden) {
        C* dq;
        Index dq_stride;
        if (plan.dq_direct) {
          dq = static_cast<C*>(buffers.dq) + p.dq.at(p.ragged ? 0 : b, seq.q_begin + rows.begin, h);
          dq_stride = p.dq.row;
        } else {
          dq = memory.dq_accumulator + (plan.head_row(b, h) + rows.begin) * plan.ld_q;
          dq_stride = plan.ld_q;
        }
        add_query_gradient(rules, tile, memory.ds, Gradients::ds_of_rows(memory), k, dq, dq_stride, plan.ld_q / n);
      }
      turn.store(mine + 1, std::memory_order_release);
    }
  }
  write_rows(memory.dk, plan.ld_q, rows_of(p, nullptr, p.dk, b, task.head_kv, k_first, key_count, p.head_dim),
             buffers.dk);
  write_rows(memory.dv, plan.ld_v, rows_of(p, nullptr, p.dv, b, task.head_kv, k_first, key_count, p.value_dim),
             buffers.dv);
}

// delta = dout . out - dlse and lse of every row, in C; packed queries; dq's accumulators and the turns set to zero.
template <class Gradients>
void prepare(const BackwardPlan& plan, const Buffers& buffers, Index b, Index h, Workspace workspace) {
  using C = typename Gradients::Number;
  const Problem& p = *plan.problem;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
  const BackwardMemory<C> memory(plan, workspace);
  const Index batch = p.ragged ? 0 : b, statistics = plan.head_row(b, h);
  const Wide<C> d;
  const Index n = lanes<C>();
  for (Index i = 0; i < seq.q_len; ++i) {
    const Index row = seq.q_begin + i;
    const double lse = load_element(buffers.lse, p.lse_dtype, p.lse.at(batch, h, row));
    C delta = 0;
    with_elements<C>(buffers.out, p.dtype, [&](auto* out) HEADRACE_ATTR {
      using T = std::remove_pointer_t<decltype(out)>;
      const T* dout = static_cast<const T*>(buffers.dout) + p.dout.at(batch, row, h);
      widen_row(out + p.out.at(batch, row, h), p.value_dim, memory.dv);
      widen_row(dout, p.value_dim, memory.dk);
      auto sum = hn::Zero(d);
      for (Index c = 0; c < p.value_dim; c += n) {
        sum = hn::MulAdd(hn::LoadU(d, memory.dv + c), hn::LoadU(d, memory.dk + c), sum);
      }
      delta = hn::GetLane(hn::SumOfLanes(d, sum));
      if (!std::isfinite(delta)) {  // a partial sum may have overflowed
        double wide = 0.0;
        for (Index c = 0; c < p.value_dim; ++c) {
          wide += static_cast<double>(memory.dv[c]) * static_cast<double>(memory.dk[c]);
        }
        delta = static_cast<C>(wide);
      }
    });
    if (p.has_dlse && lse != kMinusInf<double>) {
      delta -= static_cast<C>(load_element(buffers.dlse, p.dlse_dtype, p.dlse.at(batch, h, row)));
    }
    memory.delta[statistics + i] = delta;
    memory.lse[statistics + i] = static_cast<C>(lse);
    if (plan.dq_direct) {
      std::fill_n(static_cast<C*>(buffers.dq) + p.dq.at(batch, row, h), p.head_dim, C{0});
    } else {
      std::fill_n(memory.dq_accumulator + (statistics + i) * plan.ld_q, plan.ld_q, C{0});
    }
  }
  for (Index query_tile = 0; query_tile < ceil_div(seq.q_len, tile_q); ++query_tile) {
    if (plan.shares_queries)
      QueryOperands<Gradients>(plan, buffers, b, h, query_tile, workspace).pack(Scaling<C>(p).before);
    memory.turns[plan.tile_number(b, h, query_tile)] = 0;
  }
}

template <typename C>
void finish(const BackwardPlan& plan, const Buffers& buffers, Index b, Index h, Workspace workspace) {
  const Problem& p = *plan.problem;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
  const BackwardMemory<C> memory(plan, workspace);
  const Index row = plan.head_row(b, h);
  write_rows(memory.dq_accumulator + row * plan.ld_q, plan.ld_q,
             rows_of(p, nullptr, p.dq, b, h, seq.q_begin, seq.q_len, p.head_dim), buffers.dq);
}

// dsink = -sum of p_sink * delta over the rows of the head, p_sink = exp(sink - lse).
template <typename C>
void sinks(const BackwardPlan& plan, const Buffers& buffers, Index h, Workspace workspace) {
  const Problem& p = *plan.problem;
  const BackwardMemory<C> memory(plan, workspace);
  const double sink = static_cast<double>(buffers.sinks[h * p.sinks_stride]);
  double sum = 0.0;
  for (Index b = 0; b < p.batch; ++b) {
    const Index first = plan.head_row(b, h);
    for (Index r = first; r < first + p.sequences[static_cast<std::size_t>(b)].q_len; ++r) {
      const double lse = static_cast<double>(memory.lse[r]);
      if (lse == kMinusInf<double> || sink == kMinusInf<double>) continue;
      sum -= std::exp(sink - lse) * static_cast<double>(memory.delta[r]);
    }
  }
  buffers.dsinks[h * p.dsinks_stride] = static_cast<float>(sum);
}

// One tile of dbias. A task owns its elements and walks whatever the bias broadcasts over, so the sum
// has one order; the scores' gradients are computed once more for that.
template <typename C>
void bias_task(const BackwardPlan& plan, const Buffers& buffers, std::size_t index, Workspace workspace) {
  const Problem& p = *plan.problem;
  const BiasTask& task = plan.bias_tasks[index];
  const BackwardMemory<C> memory(plan, workspace);
  const bool per_batch = p.bias_shape[0] > 1, per_head = p.bias_shape[1] > 1;
  const bool per_query = p.bias_shape[2] > 1, per_key = p.bias_shape[3] > 1;
  std::fill_n(memory.dbias, tile_q * tile_stride, C{0});

  const Index first_b = per_batch ? task.batch : 0, last_b = per_batch ? task.batch + 1 : p.batch;
  const Index first_h = per_head ? task.head : 0, last_h = per_head ? task.head + 1 : p.heads_q;
  for (Index b = first_b; b < last_b; ++b) {
    const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
    const Index first_k = per_key ? task.key_tile : 0;
    const Index last_k = std::min(per_key ? task.key_tile + 1 : ceil_div(seq.k_len, plan.tile_keys),
                                  ceil_div(seq.k_len, plan.tile_keys));
    const Index first_q = per_query ? task.query_tile : 0;
    const Index last_q =
        std::min(per_query ? task.query_tile + 1 : ceil_div(seq.q_len, tile_q), ceil_div(seq.q_len, tile_q));
    for (Index h = first_h; h < last_h; ++h) {
      const ScoreRules<C> rules(p, buffers, b, h);
      for (Index key_tile = first_k; key_tile < last_k; ++key_tile) {
        GradientTile<C> tile;
        tile.keys = {key_tile * plan.tile_keys, std::min<Index>(seq.k_len, (key_tile + 1) * plan.tile_keys)};
        bool packed = false;
        for (Index query_tile = first_q; query_tile < last_q; ++query_tile) {
          const Range rows{query_tile * tile_q, std::min<Index>(seq.q_len, (query_tile + 1) * tile_q)};
          tile.kind = rules.vis.classify(rows, tile.keys);
          if (tile.kind == TileKind::hidden) continue;
          if (!packed) pack_keys<VectorGradients<C>>(p, buffers, b, h / p.group(), tile, memory);
          packed = true;
          tile.rows = {.head = h, .heads = 1, .row = rows.begin, .rows = rows.size()};
          const Index first = seq.q_begin + rows.begin;
          tile.q_magnitude = VectorGradients<C>::pack_left(
              rows_of(p, buffers.q, p.q, b, h, first, rows.size(), p.head_dim), Scaling<C>(p).before, memory.q);
          tile.dout_magnitude = VectorGradients<C>::pack_left(
              rows_of(p, buffers.dout, p.dout, b, h, first, rows.size(), p.value_dim), C{1}, memory.dout);
          tile.q = memory.q;
          tile.dout = memory.dout;
          const Index statistics = plan.head_row(b, h) + rows.begin;
          gradient_tile<VectorGradients<C>>(rules, tile, Gradient::bias, memory.lse + statistics,
                                            memory.delta + statistics, memory);
          for (Index r = 0; r < rows.size(); ++r) {
            const C* ds = memory.ds + r * tile_stride;
            C* sum = memory.dbias + (per_query ? r * tile_stride : 0);
            if (per_key) {
              for (Index c = 0; c < tile.keys.size(); ++c) sum[c] += ds[c];
            } else {
              C row_sum = 0;
              for (Index c = 0; c < tile.keys.size(); ++c) row_sum += ds[c];
              sum[0] += row_sum;
            }
          }
        }
      }
    }
  }
  const Index first_row = task.query_tile * tile_q, first_key = task.key_tile * plan.tile_keys;
  const Index rows = std::min<Index>(tile_q, p.bias_shape[2] - first_row);
  const Index keys = std::min<Index>(plan.tile_keys, p.bias_shape[3] - first_key);
  for (Index r = 0; r < rows; ++r) {
    for (Index c = 0; c < keys; ++c) {
      store_element(buffers.dbias, p.bias_dtype, p.dbias.at(task.batch, task.head, first_row + r, first_key + c),
                    static_cast<double>(memory.dbias[r * tile_stride + c]));
    }
  }
}

void add_backward(KernelTable& table) {
  table.backward_prepare = [](const BackwardPlan& plan, const Buffers& buffers, Index b, Index h, Workspace workspace) {
#if HWY_TARGET == HWY_AVX3_DL
    if (plan.products == ProductKind::pairs) return prepare<PairGradients>(plan, buffers, b, h, workspace);
    if (plan.products == ProductKind::amx) return prepare<AmxGradients>(plan, buffers, b, h, workspace);
#endif
    plan.problem->dtype == HR_FLOAT64 ? prepare<VectorGradients<double>>(plan, buffers, b, h, workspace)
                                      : prepare<VectorGradients<float>>(plan, buffers, b, h, workspace);
  };
  table.backward = [](const BackwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
#if HWY_TARGET == HWY_AVX3_DL
    if (plan.products == ProductKind::pairs) return backward_task<PairGradients>(plan, buffers, task, workspace);
    if (plan.products == ProductKind::amx) {
      const AmxScope scope;
      return backward_task<AmxGradients>(plan, buffers, task, workspace);
    }
#endif
    plan.problem->dtype == HR_FLOAT64 ? backward_task<VectorGradients<double>>(plan, buffers, task, workspace)
                                      : backward_task<VectorGradients<float>>(plan, buffers, task, workspace);
  };
  table.backward_finish = [](const BackwardPlan& plan, const Buffers& buffers, Index b, Index h, Workspace workspace) {
    plan.problem->dtype == HR_FLOAT64 ? finish<double>(plan, buffers, b, h, workspace)
                                      : finish<float>(plan, buffers, b, h, workspace);
  };
  table.backward_sinks = [](const BackwardPlan& plan, const Buffers& buffers, Index h, Workspace workspace) {
    plan.problem->dtype == HR_FLOAT64 ? sinks<double>(plan, buffers, h, workspace)
                                      : sinks<float>(plan, buffers, h, workspace);
  };
  table.backward_bias = [](const BackwardPlan& plan, const Buffers& buffers, std::size_t task, Workspace workspace) {
    plan.problem->dtype == HR_FLOAT64 ? bias_task<double>(plan, buffers, task, workspace)
                                      : bias_task<float>(plan, buffers, task, workspace);
  };
}

}  // namespace headrace::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
