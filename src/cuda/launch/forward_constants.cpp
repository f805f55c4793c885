#include "cuda/launch/forward_constants.hpp"

namespace headrace::cuda {

Constants option_constants(const Problem& p, bool loads_bias) {
  return {{"SOFTCAP", p.softcap > 0},
          {"ALIBI", p.has_alibi},
          {"BIAS", !p.has_bias                  ? 0
                   : loads_bias                 ? 3
                   : p.bias_dtype == HR_FLOAT32 ? 2
                                                : 1},
          {"MASK", p.has_mask},
          {"BLOCK_MASK", p.has_block_mask},
          {"SINKS", p.has_sinks},
          {"DROPOUT", p.dropout_p > 0}};
}

Constants plain_constants() { return option_constants(Problem{}); }

bool has_small_scale(const Problem& p) { return p.scale > 0 && p.scale <= 0.693; }

bool is_banded(const Problem& p) { return p.batch > 0 && !p.band(0).everything(); }

int multiprocessors_to_fill(int multiprocessors) {
  return pretended_multiprocessors != 0 ? pretended_multiprocessors : multiprocessors;
}

}  // namespace headrace::cuda
