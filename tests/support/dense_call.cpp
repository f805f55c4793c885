#include "support/dense_call.hpp"

#include <memory>
#include <numeric>

namespace headrace::test {

DenseCall::DenseCall(const Call& call)
    : heads_q(call.spec.heads_q()),
      heads_kv(call.spec.heads_kv),
      group(call.spec.group),
      d(call.spec.head_dim),
      dv(call.spec.value_dim),
      q(call.q.values()),
      k(call.k.values()),
      v(call.v.values()),
      dout(call.dout.values()),
      dlse(call.dlse.values()),
      sinks(call.sinks.values()),
      bias_shape(call.bias.shape()),
      scale(call.spec.scale.value_or(1.0 / std::sqrt(static_cast<double>(call.spec.head_dim)))),
      softcap(call.spec.softcap),
      kept_scale(1.0 / (1.0 - call.spec.dropout_p)),
      spec_(call.spec),
      bias_(call.bias.values()),
      slopes_(call.alibi_slopes.values()),
      mask_(call.mask.values()),
      blocks_(call.block_mask.values()),
      mask_shape_(call.mask.shape()),
      blocks_shape_(call.block_mask.shape()),
      has_dlse_(call.dlse.present()),
      has_dbias_(call.dbias.present()),
      has_dsinks_(call.dsinks.present()) {
  std::int64_t q_begin = 0, k_begin = 0;
  for (std::int64_t b = 0; b < spec_.batch; ++b) {
    const auto n = static_cast<std::size_t>(b);
    const std::int64_t q_len = spec_.ragged ? spec_.lengths_q[n] : spec_.seqlen_q;
    const std::int64_t k_len = spec_.ragged ? spec_.lengths_k[n] : spec_.seqlen_k;
    sequences.push_back({b, q_begin, spec_.used_q.empty() ? q_len : spec_.used_q[n], k_begin,
                         spec_.used_k.empty() ? k_len : spec_.used_k[n]});
    q_begin += q_len;
    k_begin += k_len;
  }
  rows_q = q_begin + (spec_.ragged ? spec_.slack_q : 0);
  rows_k = k_begin + (spec_.ragged ? spec_.slack_k : 0);
  if (spec_.dropout_p > 0.0) {
    keep_shape_ = {spec_.batch, heads_q, spec_.longest_q(), spec_.longest_k()};
    keep_.resize(static_cast<std::size_t>(
        std::accumulate(keep_shape_.begin(), keep_shape_.end(), std::int64_t{1}, std::multiplies<>())));
    if (!keep_.empty()) dropout_mask({keep_.data(), DType::boolean, keep_shape_}, spec_.dropout_p, spec_.dropout_seed);
  }
}

std::size_t DenseCall::lse_at(std::int64_t row, std::int64_t h) const {
  if (spec_.ragged) return static_cast<std::size_t>(h * rows_q + row);
  const std::int64_t b = row / spec_.seqlen_q, i = row % spec_.seqlen_q;
  return static_cast<std::size_t>((b * heads_q + h) * spec_.seqlen_q + i);
}

bool DenseCall::visible(const DenseSequence& s, std::int64_t h, std::int64_t i, std::int64_t j) const {
  __extension__ using Wide = __int128;  // window bounds go up to the ends of int64
  const Wide shift = spec_.causal == Causal::top_left ? 0 : s.k_len - s.q_len;
  const Wide distance = Wide{j} - Wide{i} - shift;
  if (spec_.causal != Causal::none && distance > 0) return false;
  const auto bounded = [](const std::optional<std::int64_t>& bound) { return bound && *bound != HR_UNBOUNDED; };
  if (bounded(spec_.window_left) && distance < -Wide{*spec_.window_left}) return false;
  if (bounded(spec_.window_right) && distance > Wide{*spec_.window_right}) return false;
  if (!mask_.empty() && mask_[at(mask_shape_, s.b, h, i, j)] == 0.0) return false;
  if (bias(s.b, h, i, j) == -infinity) return false;
  if (!blocks_.empty()) {
    // A dimension of one block holds block 0 whether it broadcasts or not.
    if (blocks_[at(blocks_shape_, s.b, h, i / spec_.blocks.block_q, j / spec_.blocks.block_k)] == 0.0) return false;
  }
  return true;
}

double DenseCall::alibi(const DenseSequence& s, std::int64_t h, std::int64_t i, std::int64_t j) const {
  if (slopes_.empty()) return 0.0;
  const double slope = slopes_[static_cast<std::size_t>(spec_.alibi == Alibi::heads ? h : s.b * heads_q + h)];
  return slope * static_cast<double>(std::abs(i + s.k_len - s.q_len - j));
}

double DenseCall::dropout_factor(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  if (keep_.empty()) return 1.0;
  // Not at(): a mask of one query or key does not broadcast.
  const std::int64_t index = ((b * keep_shape_[1] + h) * keep_shape_[2] + i) * keep_shape_[3] + j;
  return keep_[static_cast<std::size_t>(index)] != 0 ? kept_scale : 0.0;
}

Results DenseCall::empty_results() const {
  const auto zeros = [](std::int64_t n) { return std::vector<double>(static_cast<std::size_t>(n), 0.0); };
  Results results;
  results.out = zeros(rows_q * heads_q * dv);
  results.lse.assign(static_cast<std::size_t>(rows_q * heads_q), -infinity);
  results.dq = zeros(rows_q * heads_q * d);
  results.dk = zeros(rows_k * heads_kv * d);
  results.dv = zeros(rows_k * heads_kv * dv);
  if (has_dbias_)
    results.dbias = zeros(std::accumulate(bias_shape.begin(), bias_shape.end(), std::int64_t{1}, std::multiplies<>()));
  if (has_dsinks_) results.dsinks = zeros(heads_q);
  return results;
}

}  // namespace headrace::test
