#include "cuda/launch/hopper_split_forward_source.hpp"

#include <algorithm>
#include <array>

#include "cuda/launch/forward_constants.hpp"

namespace headrace::cuda {
namespace {

// Chosen by measurement on an H200: blocks of keys as long as the registers, or beyond 128 columns the shared memory,
// hold beside both parts of everything.
constexpr std::array<HopperSplitTile, 3> split_tiles = {{
    {64, 64, 128, true},
    {128, 128, 64, false},
    {256, 128, 32, false},
}};

KernelSource source_of(const HopperSplitTile& t, bool paired, const Constants& options) {
  KernelSource source{.entry = "hopper_split_forward",
                      .file = "hopper_split_forward.cuh",
                      .constants = {{"HEAD_DIM", t.head_dim},
                                    {"VALUE_DIM", t.value_dim},
                                    {"WARPGROUPS", HopperSplitTile::warpgroups},
                                    {"KEYS", t.keys},
                                    {"STAGES", HopperSplitTile::stages},
                                    {"Q_IN_REGISTERS", t.q_in_registers},
                                    {"PRODUCER_REGISTERS", 24},
                                    {"CONSUMER_REGISTERS", 240},
                                    {"PAIRED", paired}}};
  source.constants.insert(source.constants.end(), options.begin(), options.end());
  return source;
}

// Rows of up to so many columns, in groups of up to so many rows: both parts of a tile's blocks.
KernelSource split_rows_source(int columns) {
  return {.entry = "split_rows",
          .file = "split_rows.cuh",
          .constants = {{"HEAD_DIM", columns}, {"GROUP_ROWS", columns <= 64 ? 128 : 64}}};
}

}  // namespace

std::int64_t HopperSplitVariant::value_chunks(const Problem& p) const { return ceil_div(p.value_dim, tile->value_dim); }

HopperSplitVariant hopper_split_variant(const Problem& p, int multiprocessors) {
  const auto* tile = std::find_if(split_tiles.begin(), split_tiles.end() - 1, [&](const HopperSplitTile& t) {
    return p.head_dim <= t.head_dim && (p.value_dim <= t.value_dim || t.head_dim > 64);
  });
  const HopperSplitVariant variant{tile, false};
  const std::int64_t all = ceil_div(p.seqlen_q, HopperSplitTile::rows) * p.batch * p.heads_q * variant.value_chunks(p);
  return {tile, is_banded(p) && all > multiprocessors_to_fill(multiprocessors)};
}

KernelSource hopper_split_forward_source(const Problem& p, const HopperSplitVariant& variant) {
  return source_of(*variant.tile, variant.paired, option_constants(p));
}

KernelSource split_rows_source(const Problem& p) {
  const std::int64_t columns = std::max(p.head_dim, p.value_dim);
  return split_rows_source(columns <= 64 ? 64 : columns <= 128 ? 128 : 256);
}

std::vector<KernelSource> hopper_split_standard_set() {
  std::vector<KernelSource> set;
  for (const HopperSplitTile& tile : split_tiles)
    for (const bool paired : {false, true}) set.push_back(source_of(tile, paired, plain_constants()));
  for (const int columns : {64, 128, 256}) set.push_back(split_rows_source(columns));
  return set;
}

}  // namespace headrace::cuda
