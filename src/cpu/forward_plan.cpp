// Plans the forward pass: tasks, splits of the keys, scratch memory. No SIMD here.
#include <algorithm>
#include <numeric>

#include "cpu/caches.hpp"
#include "cpu/plans.hpp"
#include "cpu/tile_config.hpp"

namespace headrace::cpu {

Index ForwardPlan::heads_per_tile(Index q_len) const {
  if (q_len == 0 || q_len > pack_heads_below) return 1;
  return std::min<Index>(problem->group(), tile_q / q_len);
}

Index ForwardPlan::query_tiles(Index q_len) const {
  if (q_len == 0 || problem->group() == 0) return 0;
  if (q_len <= pack_heads_below) return ceil_div(problem->group(), heads_per_tile(q_len));
  return problem->group() * ceil_div(q_len, tile_q);
}

QueryTile ForwardPlan::query_tile(Index q_len, Index head_kv, Index index) const {
  const Index first_head = head_kv * problem->group();
  if (q_len <= pack_heads_below) {
    const Index heads = heads_per_tile(q_len);
    return {.head = first_head + index * heads,
            .heads = std::min<Index>(heads, problem->group() - index * heads),
            .row = 0,
            .rows = q_len};
  }
  const Index tiles_per_head = ceil_div(q_len, tile_q);
  const Index begin = index % tiles_per_head * tile_q;
  return {
      .head = first_head + index / tiles_per_head, .heads = 1, .row = begin, .rows = std::min(tile_q, q_len - begin)};
}

QueryTile ForwardPlan::tile_of(const ForwardTask& task, Index t) const {
  const Index q_len = problem->sequences[static_cast<std::size_t>(task.sequence)].q_len;
  return streams() ? query_tile(q_len, task.head_kv + t, 0) : query_tile(q_len, task.head_kv, task.first + t);
}

Index ForwardPlan::key_reuse() const {
  const Index longest = problem->seqlen_q;
  return std::max<Index>(1, std::min(tiles_per_task, query_tiles(longest)) * heads_per_tile(longest));
}

std::size_t ForwardPlan::task_in_turn(std::size_t n) const {
  if (splits == 1 || streams()) return n;
  const std::size_t heads = static_cast<std::size_t>(problem->heads_kv), parts = static_cast<std::size_t>(splits);
  const std::size_t group = n / (heads * parts), in_group = n % (heads * parts);
  return (group * heads + in_group % heads) * parts + in_group / heads;
}

namespace {

// Few enough queries that reading keys and values is what takes the time. Other sums than those of prefill: not where
// the bits of a row must be the same in both.
bool streams(const Problem& p, Index lanes) {
  return !p.batch_invariant && p.seqlen_q * p.group() <= stream_rows && p.seqlen_k > tile_k &&
         p.head_dim % lanes == 0 && p.value_dim % lanes == 0;
}

// Key tiles that a task visits by position, times its query tiles: what the schedule sorts by.
Index cost(const ForwardPlan& plan, const ForwardTask& task) {
  const Problem& p = *plan.problem;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(task.sequence)];
  const Visibility vis{.band = p.band(task.sequence), .seqlen_q = seq.q_len, .seqlen_k = seq.k_len, .blocks = {}};
  Index tiles = 0;
  for (Index t = 0; t < task.count; ++t) {
    const QueryTile tile = plan.tile_of(task, t);
    const Range keys = vis.keys_of_rows({tile.row, tile.row + tile.rows});
    if (!keys.empty()) tiles += ceil_div(keys.end, tile_k) - keys.begin / tile_k;
  }
  return tiles;
}

}  // namespace

ForwardPlan plan_forward(const Problem& p, const KernelTable& kernels, int threads) {
  ForwardPlan plan;
  plan.problem = &p;
  const bool wide = p.dtype == HR_FLOAT64;
  const Index lanes = wide ? kernels.lanes_f64 : kernels.lanes_f32;
  if (streams(p, lanes)) {
    // Not where there is AMX: such processors do more with vectors than with pairs, see targets.cpp. (8 queries against
    // 4096 keys, head_dim 64: 1.13 times as fast; 1 query: the same.)
    const bool pairs = p.dtype == HR_BFLOAT16 && kernels.bfloat16 == ProductKind::pairs &&
                       p.head_dim % packed_pairs == 0 && p.value_dim % packed_pairs == 0;
    plan.products = pairs ? ProductKind::stream_pairs : ProductKind::stream;
  } else if (p.dtype == HR_BFLOAT16) {
    plan.products = kernels.bfloat16;
  }
  const bool packs = !plan.streams();
  const bool whole_elements = !packs || plan.products == ProductKind::vectors;
  const Index stream_heads = std::min<Index>(max_tiles_per_task, p.heads_kv);  // of a task
  Index all_tiles = 0;
  for (const Sequence& seq : p.sequences) all_tiles += p.heads_kv * plan.query_tiles(seq.q_len);
  if (!p.batch_invariant && all_tiles > 0 && (!packs || all_tiles < split_below_tiles)) {
    const Index longest = ceil_div(p.seqlen_k, tile_k);
    const Index wanted =
        packs ? ceil_div(split_below_tiles, all_tiles) : ceil_div(stream_parts * stream_heads, all_tiles);
    plan.splits = std::max<Index>(1, std::min(wanted, longest / (packs ? min_split_tiles : stream_split_tiles)));
  }
  const std::size_t element = wide ? sizeof(double) : sizeof(float);
  const auto bytes = [&](Index elements) { return static_cast<std::size_t>(elements) * element; };
  // Rows of packed bfloat16 take half of this or less, but AMX rounds them up to 64 bytes.
  plan.ld_q = whole_elements ? p.head_dim : round_up(p.head_dim, packed_pairs);
  plan.ld_out = round_up(p.value_dim, lanes);
  plan.tile_rows = packs ? round_up(tile_q, kernels.rows) : std::max<Index>(1, p.seqlen_q * p.group());
  const Index state_bytes = static_cast<Index>(bytes(plan.tile_rows * (plan.ld_q + plan.ld_out + lanes)));
  Arena shared;
  std::size_t largest_tile = 0;
  for (Index b = 0; b < p.batch; ++b) {
    const Sequence& seq = p.sequences[static_cast<std::size_t>(b)];
    PackedSequence packed{.tiles = ceil_div(seq.k_len, tile_k)};
    if (plan.query_tiles(seq.q_len) > 0) {
      const Index keys = std::min(tile_k, round_up(seq.k_len, packed_multiple));
      const auto operand = [&](Index size) {
        const std::size_t whole = bytes(keys * round_up(size, packed_multiple));
        return whole_elements ? whole : whole / 2;
      };
      Arena tile;
      if (packs) {
        tile.add(operand(p.head_dim));
        packed.v = tile.add(operand(p.value_dim));
      }
      packed.tile = tile.add(sizeof(PackedTile));
      packed.bytes = tile.bytes;
      packed.offset = shared.add(static_cast<std::size_t>(p.heads_kv * packed.tiles) * packed.bytes);
      largest_tile = std::max(largest_tile, packed.bytes);
      for (Index tile_index = 0; tile_index < packed.tiles; ++tile_index)
        plan.pack_tasks.push_back({.sequence = static_cast<std::int32_t>(b), .key_tile = tile_index});
    }
    plan.packed.push_back(packed);
  }
  plan.shares_keys = packs && shared.bytes <= shared_keys_bytes;
  if (!plan.shares_keys) {
    shared = {};
    plan.pack_tasks.clear();
  }

  const Index fitting =
      (plan.shares_keys ? l2_cache_bytes() / task_state_part_of_l2 : task_state_l2 * l2_cache_bytes()) / state_bytes;
  const Index wanted = std::min(all_tiles * plan.splits / (tasks_per_thread * threads), fitting);
  plan.tiles_per_task = packs ? std::clamp<Index>(wanted, 1, max_tiles_per_task) : std::max<Index>(1, stream_heads);
  for (Index b = 0; b < p.batch; ++b) {
    const Index tiles = plan.query_tiles(p.sequences[static_cast<std::size_t>(b)].q_len);
    if (tiles == 0) continue;
    for (Index head = 0; !packs && head < p.heads_kv; head += stream_heads) {
      plan.tasks.push_back({.sequence = static_cast<std::int32_t>(b),
                            .head_kv = static_cast<std::int32_t>(head),
                            .first = 0,
                            .count = static_cast<std::int32_t>(std::min<Index>(stream_heads, p.heads_kv - head)),
                            .split = 0});
    }
    if (!packs) continue;
    const Index count = ceil_div(tiles, ceil_div(tiles, plan.tiles_per_task));  // tasks of about the same size
    // Heads innermost: rows of neighbouring heads share pages, and so entries of the TLB.
    for (Index first = 0; first < tiles; first += count) {
      for (Index head = 0; head < p.heads_kv; ++head) {
        plan.tasks.push_back({.sequence = static_cast<std::int32_t>(b),
                              .head_kv = static_cast<std::int32_t>(head),
                              .first = first,
                              .count = static_cast<std::int32_t>(std::min(count, tiles - first)),
                              .split = 0});
      }
    }
  }
  // The longest tasks first, so that the threads end together.
  std::vector<Index> costs(plan.tasks.size());
  for (std::size_t n = 0; n < costs.size(); ++n) costs[n] = cost(plan, plan.tasks[n]);
  std::vector<std::size_t> order(plan.tasks.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t x, std::size_t y) { return costs[x] > costs[y]; });

  std::vector<ForwardTask> sorted;
  sorted.reserve(plan.tasks.size() * static_cast<std::size_t>(plan.splits));
  for (const std::size_t n : order) {
    for (Index split = 0; split < plan.splits; ++split) {
      sorted.push_back(plan.tasks[n]);
      sorted.back().split = static_cast<std::int32_t>(split);
    }
  }
  plan.tasks = std::move(sorted);

  const Index rows = plan.tiles_per_task * plan.tile_rows;
  Arena arena;
  plan.q = arena.add(bytes(rows * plan.ld_q));
  plan.scores = arena.add(bytes((packs ? plan.tile_rows : rows) * tile_stride));
  plan.out = arena.add(bytes(rows * plan.ld_out));
  plan.max = arena.add(bytes(rows + lanes));  // whole vectors of it are read
  plan.sum = arena.add(bytes(rows * lanes));
  plan.value_scale = arena.add(bytes(rows));
  plan.row = arena.add(bytes(std::max(tile_stride, plan.ld_out)));
  if (!packs) plan.values = arena.add(bytes(rows * plan.ld_out));
  if (!whole_elements || !packs) plan.weights = arena.add(bytes((packs ? plan.tile_rows : rows) * tile_stride));
  if (!plan.shares_keys) plan.keys = arena.add(largest_tile);
  plan.scratch_bytes = arena.bytes;
  if (plan.splits > 1) {
    plan.partial_bytes = (bytes(rows * (plan.ld_out + 3)) + 63) / 64 * 64;
    plan.partials = shared.add(plan.partial_bytes * plan.tasks.size());
  }
  plan.shared_bytes = shared.bytes;
  return plan;
}

}  // namespace headrace::cpu
