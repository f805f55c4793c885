#include "cuda/launch/hopper_forward_source.hpp"

#include <algorithm>
#include <array>

#include "cuda/launch/forward_constants.hpp"
#include "cuda/launch/tma_rows.hpp"

namespace headrace::cuda {
namespace {

// Chosen by measurement on an H200: three warpgroups of 64 rows where registers allow, the largest block of keys that
// fits the registers beside the output, as many stages as fit the 227 KiB of shared memory.
constexpr std::array<HopperForwardTile, 5> large_tiles = {{
    {64, 64, 1, 3, 128, 3, 2, false, 2, 32, 160},
    {96, 96, 1, 2, 128, 2, 1, true, 2, 24, 240},
    {128, 128, 1, 2, 128, 2, 1, true, 2, 24, 240},
    {192, 128, 1, 2, 128, 2, 1, false, 1, 24, 240},
    {256, 256, 1, 2, 64, 2, 1, false, 2, 24, 240},
}};
// One warpgroup, and several blocks of threads on a multiprocessor, which hide each other's beginnings and ends.
constexpr std::array<HopperForwardTile, 2> small_tiles = {{
    {64, 64, 3, 1, 64, 3, 1, false, 1, 24, 128},
    {128, 128, 2, 1, 64, 2, 1, true, 2, 24, 224},
}};

template <std::size_t kCount>
const HopperForwardTile* fitting(const std::array<HopperForwardTile, kCount>& tiles, const Problem& p) {
  const auto* tile = std::find_if(tiles.begin(), tiles.end(), [&](const HopperForwardTile& t) {
    return p.head_dim <= t.head_dim && p.value_dim <= t.value_dim;
  });
  return tile == tiles.end() ? nullptr : tile;
}

std::int64_t tiles_of(const Problem& p, const HopperForwardTile& tile) {
  return ceil_div(p.seqlen_q, tile.rows()) * p.batch * p.heads_q;
}

bool prefers_small(const Problem& p, const HopperForwardTile& large, int multiprocessors) {
  const bool narrow = large.head_dim <= 64;
  if (is_banded(p) && narrow && p.seqlen_k <= 1024) return true;  // most of a large tile would be edges
  return tiles_of(p, large) <= (is_banded(p) || narrow ? multiprocessors : multiprocessors / 2);
}

KernelSource source_of(const HopperForwardTile& t, bool float16, bool small_scale, bool paired,
                       const Constants& options) {
  KernelSource source{.entry = "hopper_forward",
                      .file = "hopper_forward.cuh",
                      .constants = {{"FLOAT16", float16},
                                    {"HEAD_DIM", t.head_dim},
                                    {"VALUE_DIM", t.value_dim},
                                    {"BLOCKS_PER_SM", t.blocks_per_sm},
                                    {"WARPGROUPS", t.warpgroups},
                                    {"KEYS", t.keys},
                                    {"STAGES", t.stages},
                                    {"Q_BUFFERS", t.q_buffers},
                                    {"Q_IN_REGISTERS", t.q_in_registers},
                                    {"OUT_PANELS", t.out_panels_of_warp()},
                                    {"PRODUCER_REGISTERS", t.producer_registers},
                                    {"CONSUMER_REGISTERS", t.consumer_registers},
                                    {"SMALL_SCALE", small_scale},
                                    {"PAIRED", paired}}};
  source.constants.insert(source.constants.end(), options.begin(), options.end());
  return source;
}

}  // namespace

int HopperForwardTile::out_panels_of_warp() const { return std::min(out_panels, (value_dim + 63) / 64); }

HopperForwardVariant hopper_forward_variant(const Problem& p, int multiprocessors) {
  multiprocessors = multiprocessors_to_fill(multiprocessors);
  const HopperForwardTile* large = fitting(large_tiles, p);
  const HopperForwardTile* small = fitting(small_tiles, p);
  const HopperForwardTile* tile = small != nullptr && prefers_small(p, *large, multiprocessors) ? small : large;
  return {tile, is_banded(p) && tiles_of(p, *tile) > static_cast<std::int64_t>(multiprocessors) * tile->blocks_per_sm};
}

bool loads_bias(const Problem& p, const HopperForwardTile& tile) {
  return tile.has_room_for_bias() && tma_walks_bias(p);
}

KernelSource hopper_forward_source(const Problem& p, const HopperForwardVariant& variant) {
  return source_of(*variant.tile, p.dtype == HR_FLOAT16, has_small_scale(p), variant.paired,
                   option_constants(p, loads_bias(p, *variant.tile)));
}

std::vector<KernelSource> hopper_forward_standard_set() {
  std::vector<KernelSource> set;
  const auto add = [&](const HopperForwardTile& tile) {
    for (const bool float16 : {false, true}) {
      for (const bool paired : {false, true}) set.push_back(source_of(tile, float16, true, paired, plain_constants()));
    }
  };
  std::for_each(large_tiles.begin(), large_tiles.end(), add);
  std::for_each(small_tiles.begin(), small_tiles.end(), add);
  return set;
}

}  // namespace headrace::cuda
