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

Index ForwardPlan::key_reuse() const {
  const Index longest = problem->seqlen_q;
  return std::max<Index>(1, std::min(tiles_per_task, query_tiles(longest)) * heads_per_tile(longest));
}

namespace {

// Key tiles that a task visits by position, times its query tiles: what the schedule sorts by.
Index cost(const ForwardPlan& plan, const ForwardTask& task) {
  const Problem& p = *plan.problem;
  const Sequence& seq = p.sequences[static_cast<std::size_t>(task.sequence)];
  const Visibility vis{.band = p.band(task.sequence), .seqlen_q = seq.q_len, .seqlen_k = seq.k_len, .blocks = {}};
  Index tiles = 0;
  for (Index t = 0; t < task.count; ++t) {
    const QueryTile tile = plan.query_tile(seq.q_len, task.head_kv, task.first + t);
    const Range keys = vis.keys_of_rows({tile.row, tile.row + tile.rows});
    if (!keys.empty()) tiles += ceil_div(keys.end, tile_k) - keys.begin / tile_k;
  }
  return tiles;
}

}  // namespace

ForwardPlan plan_forward(const Problem& p, const KernelTable& kernels, int threads) {
  ForwardPlan plan;
  plan.problem = &p;
  Index all_tiles = 0;
  for (const Sequence& seq : p.sequences) all_tiles += p.heads_kv * plan.query_tiles(seq.q_len);
  if (!p.batch_invariant && all_tiles > 0 && all_tiles < split_below_tiles) {
    const Index longest = ceil_div(p.seqlen_k, tile_k);
    plan.splits = std::max<Index>(1, std::min(ceil_div(split_below_tiles, all_tiles), longest / min_split_tiles));
  }
  const bool wide = p.dtype == HR_FLOAT64;
  const Index lanes = wide ? kernels.lanes_f64 : kernels.lanes_f32;
  const std::size_t element = wide ? sizeof(double) : sizeof(float);
  const auto bytes = [&](Index elements) { return static_cast<std::size_t>(elements) * element; };
  plan.amx = kernels.amx && p.dtype == HR_BFLOAT16;
  plan.ld_q = plan.amx ? std::max<Index>(p.head_dim, 16) : p.head_dim;  // AMX: rows of a multiple of 64 bytes
  plan.ld_out = round_up(p.value_dim, lanes);
  const Index tile_rows = round_up(tile_q, kernels.rows);
  const Index fitting =
      task_state_l2 * l2_cache_bytes() / static_cast<Index>(bytes(tile_rows * (plan.ld_q + plan.ld_out + lanes)));
  const Index wanted = std::min(all_tiles * plan.splits / (tasks_per_thread * threads), fitting);
  plan.tiles_per_task = std::clamp<Index>(wanted, 1, max_tiles_per_task);
  for (Index b = 0; b < p.batch; ++b) {
    const Index tiles = plan.query_tiles(p.sequences[static_cast<std::size_t>(b)].q_len);
    if (tiles == 0) continue;
    const Index count = ceil_div(tiles, ceil_div(tiles, plan.tiles_per_task));  // tasks of about the same size
    for (Index head = 0; head < p.heads_kv; ++head) {
      for (Index first = 0; first < tiles; first += count) {
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

  const Index rows = plan.tiles_per_task * tile_rows;
  Arena arena;
  plan.q = arena.add(bytes(rows * plan.ld_q));
  for (std::size_t& kt : plan.kt) kt = arena.add(bytes((tile_k + 2 * lanes) * plan.ld_q));
  for (std::size_t& v : plan.v) v = arena.add(bytes(tile_k * round_up(p.value_dim, 2 * lanes)));
  plan.scores = arena.add(bytes(tile_rows * tile_stride));
  plan.out = arena.add(bytes(rows * plan.ld_out));
  plan.max = arena.add(bytes(rows));
  plan.sum = arena.add(bytes(rows * lanes));
  plan.value_scale = arena.add(bytes(rows));
  plan.row = arena.add(bytes(tile_stride));
  if (plan.amx) plan.weights = arena.add(bytes(tile_rows * tile_stride));
  plan.scratch_bytes = arena.bytes;
  if (plan.splits > 1) plan.partial_bytes = (bytes(rows * (plan.ld_out + 3)) + 63) / 64 * 64;
  return plan;
}

}  // namespace headrace::cpu
