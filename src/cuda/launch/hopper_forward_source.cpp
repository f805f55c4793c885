#include "cuda/launch/hopper_forward_source.hpp"

#include <algorithm>
#include <array>

namespace headrace::cuda {
namespace {

// Chosen by measurement on an H200: three warpgroups of 64 rows where registers allow, the largest block of keys that
// fits the registers beside the output, as many stages as fit the 227 KiB of shared memory.
constexpr std::array<HopperForwardTile, 5> tiles = {{
    {64, 64, 3, 128, 3, 2, false, 32, 160},
    {96, 96, 2, 128, 2, 1, true, 24, 240},
    {128, 128, 2, 128, 2, 1, true, 24, 240},
    {192, 128, 2, 128, 2, 1, false, 24, 240},
    {256, 256, 2, 80, 2, 1, false, 24, 240},
}};

KernelSource source_of(const HopperForwardTile& t, bool float16,
                       std::vector<std::pair<std::string, long long>> options) {
  KernelSource source{.entry = "hopper_forward",
                      .file = "hopper_forward.cuh",
                      .constants = {{"FLOAT16", float16},
                                    {"HEAD_DIM", t.head_dim},
                                    {"VALUE_DIM", t.value_dim},
                                    {"WARPGROUPS", t.warpgroups},
                                    {"KEYS", t.keys},
                                    {"STAGES", t.stages},
                                    {"Q_BUFFERS", t.q_buffers},
                                    {"Q_IN_REGISTERS", t.q_in_registers},
                                    {"PRODUCER_REGISTERS", t.producer_registers},
                                    {"CONSUMER_REGISTERS", t.consumer_registers}}};
  source.constants.insert(source.constants.end(), options.begin(), options.end());
  return source;
}

std::vector<std::pair<std::string, long long>> plain_options(bool paired) {
  return {{"SMALL_SCALE", 1}, {"PAIRED", paired}, {"SOFTCAP", 0}, {"ALIBI", 0},  {"BIAS", 0},
          {"MASK", 0},        {"BLOCK_MASK", 0},  {"SINKS", 0},   {"DROPOUT", 0}};
}

}  // namespace

const HopperForwardTile& hopper_forward_tile(std::int64_t head_dim, std::int64_t value_dim) {
  const auto fits = [&](const HopperForwardTile& t) { return head_dim <= t.head_dim && value_dim <= t.value_dim; };
  return *std::find_if(tiles.begin(), tiles.end() - 1, fits);
}

bool paired(const Problem& p) { return p.batch > 0 && !p.band(0).everything(); }

KernelSource hopper_forward_source(const Problem& p) {
  return source_of(hopper_forward_tile(p.head_dim, p.value_dim), p.dtype == HR_FLOAT16,
                   {{"SMALL_SCALE", p.scale > 0 && p.scale <= 0.693},
                    {"PAIRED", paired(p)},
                    {"SOFTCAP", p.softcap > 0},
                    {"ALIBI", p.has_alibi},
                    {"BIAS", !p.has_bias                  ? 0
                             : p.bias_dtype == HR_FLOAT32 ? 2
                                                          : 1},
                    {"MASK", p.has_mask},
                    {"BLOCK_MASK", p.has_block_mask},
                    {"SINKS", p.has_sinks},
                    {"DROPOUT", p.dropout_p > 0}});
}

std::vector<KernelSource> hopper_forward_standard_set() {
  std::vector<KernelSource> set;
  for (const HopperForwardTile& tile : tiles) {
    for (const bool float16 : {false, true}) {
      for (const bool paired : {false, true}) set.push_back(source_of(tile, float16, plain_options(paired)));
    }
  }
  return set;
}

}  // namespace headrace::cuda
