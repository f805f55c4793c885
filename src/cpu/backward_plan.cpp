// Plans the backward pass: tasks, the order of their turns, scratch memory. No SIMD here.
#include <algorithm>

#include "cpu/plans.hpp"
#include "cpu/tile_config.hpp"

namespace headrace::cpu {

BackwardPlan plan_backward(const Problem& p, const KernelTable& kernels) {
  BackwardPlan plan;
  plan.problem = &p;
  if (p.dtype == HR_BFLOAT16) plan.products = kernels.bfloat16;
  const bool rounds = plan.products != ProductKind::vectors, amx = plan.products == ProductKind::amx;
  if (amx) plan.row_multiple = amx_rows;
  // bfloat16 takes half the memory.
  plan.tile_keys = (p.head_dim + p.value_dim) / (rounds ? 2 : 1) <= backward_wide_below ? tile_k : tile_k / 2;

  Index rows = 0, tiles = 0;
  for (Index b = 0; b < p.batch; ++b) {
    plan.row_offset.push_back(rows);
    plan.tile_offset.push_back(tiles);
    rows += p.heads_q * plan.head_rows(b);
    tiles += p.heads_q * ceil_div(p.sequences[static_cast<std::size_t>(b)].q_len, tile_q);
  }
  // Key tiles outermost: neighbouring tasks then belong to different heads and do not wait for each other.
  const Index key_tiles = ceil_div(p.seqlen_k, plan.tile_keys);
  for (Index key_tile = 0; key_tile < key_tiles; ++key_tile) {
    for (Index b = 0; b < p.batch; ++b) {
      if (key_tile * plan.tile_keys >= p.sequences[static_cast<std::size_t>(b)].k_len) continue;
      for (Index head = 0; head < p.heads_kv; ++head) {
        plan.tasks.push_back({.sequence = static_cast<std::int32_t>(b),
                              .head_kv = static_cast<std::int32_t>(head),
                              .key_tile = key_tile});
      }
    }
  }
  if (p.need_dbias) {
    for (Index b = 0; b < p.bias_shape[0]; ++b) {
      for (Index h = 0; h < p.bias_shape[1]; ++h) {
        for (Index q = 0; q < ceil_div(p.bias_shape[2], tile_q); ++q) {
          for (Index k = 0; k < ceil_div(p.bias_shape[3], plan.tile_keys); ++k) {
            plan.bias_tasks.push_back({.batch = static_cast<std::int32_t>(b),
                                       .head = static_cast<std::int32_t>(h),
                                       .query_tile = q,
                                       .key_tile = k});
          }
        }
      }
    }
  }

  const bool wide = p.dtype == HR_FLOAT64;
  const Index lanes = wide ? kernels.lanes_f64 : kernels.lanes_f32;
  const std::size_t element = wide ? sizeof(double) : sizeof(float);
  const auto bytes = [&](Index elements) { return static_cast<std::size_t>(elements) * element; };
  plan.ld_q = round_up(p.head_dim, lanes);
  plan.ld_v = round_up(p.value_dim, lanes);
  plan.dq_direct = (p.dtype == HR_FLOAT32 || wide) && p.head_dim % lanes == 0;

  const Index tile_rows = round_up(tile_q, kernels.rows), padded_keys = plan.tile_keys + 2 * lanes;
  const auto panels = [&](Index size) { return round_up(size, 2 * lanes); };
  Arena scratch;
  const auto depth = [&](Index size) { return amx ? round_up(size, packed_pairs) : round_up(size, 2); };
  plan.kt = scratch.add(bytes(padded_keys * depth(p.head_dim)));
  plan.vt = scratch.add(bytes(padded_keys * depth(p.value_dim)));
  plan.k_rows = scratch.add(bytes(plan.tile_keys * panels(p.head_dim)));
  plan.p = scratch.add(bytes(tile_rows * tile_stride));
  plan.ds = scratch.add(bytes(tile_rows * tile_stride));
  plan.dk = scratch.add(bytes(std::max(plan.tile_keys * plan.ld_q, plan.ld_v)));  // also a row of dout
  plan.dv = scratch.add(bytes(plan.tile_keys * plan.ld_v));
  plan.row = scratch.add(bytes(3 * tile_stride));
  if (rounds) {
    for (std::size_t* part : {&plan.p_rounded, &plan.ds_rounded, &plan.ds_rows_rounded})
      *part = scratch.add(bytes(tile_rows * tile_stride));
  }
  if (p.need_dbias) {
    plan.q = scratch.add(bytes(tile_rows * p.head_dim));
    plan.dout = scratch.add(bytes(tile_rows * p.value_dim));
    plan.dbias = scratch.add(bytes(tile_q * tile_stride));
  }
  plan.scratch_bytes = scratch.bytes;

  Arena shared;
  plan.delta = shared.add(bytes(rows));
  plan.lse = shared.add(bytes(rows));
  plan.turns = shared.add(static_cast<std::size_t>(tiles) * sizeof(std::int32_t));
  if (!plan.dq_direct) plan.dq_accumulator = shared.add(bytes(rows * plan.ld_q));
  Arena tile;
  const auto operand = [&](Index elements) { return bytes(elements) / (rounds ? 2 : 1); };
  const Index right_rows = amx ? round_up(tile_q, packed_pairs) : tile_q;
  tile.add(operand(tile_rows * depth(p.head_dim)));
  plan.tile_dout = tile.add(operand(tile_rows * depth(p.value_dim)));
  plan.tile_q_rows = tile.add(operand(right_rows * panels(p.head_dim)));
  plan.tile_dout_rows = tile.add(operand(right_rows * panels(p.value_dim)));
  plan.tile_facts = tile.add(sizeof(PackedQueries));
  plan.tile_bytes = tile.bytes;
  const std::size_t all_queries = static_cast<std::size_t>(tiles) * plan.tile_bytes;
  plan.shares_queries = all_queries <= shared_queries_bytes && key_tiles > shared_queries_above;
  if (plan.shares_queries) {
    plan.queries = shared.add(all_queries);
  } else {
    plan.own_tile = scratch.add(plan.tile_bytes);
    plan.scratch_bytes = scratch.bytes;
  }
  plan.shared_bytes = shared.bytes;
  return plan;
}

}  // namespace headrace::cpu
