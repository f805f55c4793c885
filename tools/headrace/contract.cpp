#include "contract.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headrace::tool {
namespace {

constexpr double float32_unit = 0x1p-24;

double rms(const Array& array) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < array.size(); ++i) sum += array.at(i) * array.at(i);
  return array.size() == 0 ? 0.0 : std::sqrt(sum / static_cast<double>(array.size()));
}

double largest_finite(DType dtype) {
  if (dtype == DType::float16) return 65504.0;
  if (dtype == DType::bfloat16) return 0x1.FEp127;
  return dtype == DType::float32 ? double{std::numeric_limits<float>::max()} : std::numeric_limits<double>::max();
}

// computed - expected; 0 where both are the same infinity or both NaN, or where the type cannot hold what
// is expected and the computed value overflowed to infinity; NaN where one is finite and the other is not.
double difference(double computed, double expected, double largest) {
  if (std::isnan(computed) && std::isnan(expected)) return 0.0;
  if (computed == expected) return 0.0;
  if (std::isinf(computed) && std::abs(expected) > largest && std::signbit(computed) == std::signbit(expected))
    return 0.0;
  if (!std::isfinite(computed) || !std::isfinite(expected)) return std::numeric_limits<double>::quiet_NaN();
  return computed - expected;
}

// The size that an element of each output would have if its terms were independent and spread evenly over the keys.
class RandomSize {
 public:
  RandomSize(const Attention& options, const Tensors& tensors, bool backward) {
    const Array &q = tensors.at("q"), &k = tensors.at("k"), &v = tensors.at("v");
    const auto cu_seqlens = tensors.find("cu_seqlens_q");
    const bool ragged = cu_seqlens != tensors.end();
    const double sequences =
        ragged ? static_cast<double>(cu_seqlens->second.size() - 1) : static_cast<double>(q.shape[0]);
    const auto tokens = [&](const Array& x) {
      return static_cast<double>(ragged ? x.shape[0] : x.shape[0] * x.shape[1]) / std::max(1.0, sequences);
    };
    seqlen_q_ = tokens(q);
    seqlen_k_ = std::max(1.0, tokens(k));
    group_ = static_cast<double>(q.shape[q.shape.size() - 2]) /
             static_cast<double>(std::max<std::int64_t>(1, k.shape[k.shape.size() - 2]));
    const double kept = 1.0 / std::sqrt(1.0 - options.dropout_p);
    const double head_dim = static_cast<double>(q.shape.back()), value_dim = static_cast<double>(v.shape.back());
    scale_ = std::abs(options.scale.value_or(1.0 / std::sqrt(head_dim)));
    q_ = rms(q), k_ = rms(k), v_ = rms(v) * kept;
    if (backward) {
      dout_ = rms(tensors.at("dout")) * kept;
      dprobability_ = dout_ * rms(v) * std::sqrt(value_dim);
    }
    sequences_ = sequences;
    pairs_ = sequences * static_cast<double>(q.shape[q.shape.size() - 2]) * seqlen_q_ * seqlen_k_;
  }

  // count: elements of the whole output.
  [[nodiscard]] double of(const std::string& name, std::int64_t count) const {
    const double rows = std::sqrt(seqlen_q_ * group_) / seqlen_k_;  // a sum over rows of p ~ 1 / seqlen_k
    if (name == "out") return v_ / std::sqrt(seqlen_k_);
    if (name == "dq") return scale_ * dprobability_ * k_ / std::sqrt(seqlen_k_);
    if (name == "dk") return scale_ * dprobability_ * q_ * rows;
    if (name == "dv") return dout_ * rows;
    if (name == "dbias") return dprobability_ / seqlen_k_ * std::sqrt(pairs_ / static_cast<double>(count));
    return dprobability_ * std::sqrt(sequences_ * seqlen_q_) / seqlen_k_;  // dsinks
  }

 private:
  double sequences_ = 0.0, pairs_ = 0.0, seqlen_q_ = 0.0, seqlen_k_ = 1.0, group_ = 1.0, scale_ = 1.0;
  double q_ = 0.0, k_ = 0.0, v_ = 0.0, dout_ = 0.0, dprobability_ = 0.0;
};

double largest_lse(const Array& lse) {
  double largest = 0.0;
  for (std::int64_t i = 0; i < lse.size(); ++i)
    if (std::isfinite(lse.at(i))) largest = std::max(largest, std::abs(lse.at(i)));
  return largest;
}

Comparison compare_lse(const Array& computed, const Array& expected, DType dtype, double largest) {
  const double promised = contract(dtype).lse;
  const double unit = computed.dtype == DType::float64 ? 0x1p-53 : float32_unit;
  Comparison result{.tensor = "lse", .allowed = std::max(promised, 16.0 * unit * largest), .promised = promised};
  for (std::int64_t i = 0; i < computed.size(); ++i) {
    const double error = std::abs(difference(computed.at(i), expected.at(i), largest_finite(computed.dtype)));
    if (!(error <= result.error)) result.error = error;
    if (std::isnan(error)) break;
  }
  return result;
}

Comparison compare_vectors(const std::string& name, const Array& computed, const Array& expected, double promised,
                           double score_error, double random_size) {
  double error = 0.0, size = 0.0;
  for (std::int64_t i = 0; i < computed.size(); ++i) {
    const double delta = difference(computed.at(i), expected.at(i), largest_finite(computed.dtype));
    error += delta * delta;
    if (std::isfinite(expected.at(i))) size += expected.at(i) * expected.at(i);
  }
  error = std::sqrt(error), size = std::sqrt(size);
  const double at_random = random_size * std::sqrt(static_cast<double>(computed.size()));
  return {.tensor = name,
          .error = error == 0.0 ? 0.0 : error / std::max(size, at_random),
          .allowed = std::max(promised, score_error),
          .promised = promised};
}

}  // namespace

Contract contract(DType dtype) {
  const auto of = [](double output, double lse) { return Contract{output, 3.0 * output, lse}; };
  if (dtype == DType::float16) return of(1e-3, 1e-3);
  if (dtype == DType::bfloat16) return of(8e-3, 1e-3);
  if (dtype == DType::float64) return of(1e-13, 1e-13);
  return of(2e-6, 1e-5);
}

Tensors reference(const Attention& options, const Tensors& tensors, bool backward) {
  Tensors exact;
  for (const auto& [name, array] : tensors) {
    const bool widen = name == "q" || name == "k" || name == "v" || name == "bias" || name == "dout";
    exact[name] = widen ? convert(array, DType::float64) : array;
  }
  for (const char* name : {"out", "lse", "dq", "dk", "dv", "dbias"})
    if (const auto found = tensors.find(name); found != tensors.end())
      exact[name] = Array(DType::float64, found->second.shape);
  Attention call = options;
  bind_tensors(call, exact);
  call.backend = Backend::reference;
  forward(call);
  if (backward) headrace::backward(call);
  return exact;
}

std::vector<Comparison> compare_with_reference(const Attention& options, const Tensors& tensors, bool backward) {
  const Tensors expected = reference(options, tensors, backward);
  const DType dtype = tensors.at("q").dtype;
  const Contract promised = contract(dtype);
  const double largest = largest_lse(expected.at("lse"));
  const double score_error = 2.0 * (dtype == DType::float64 ? 0x1p-53 : float32_unit) * largest;
  const RandomSize size(options, tensors, backward);

  std::vector<Comparison> result;
  for (const char* name : {"out", "lse", "dq", "dk", "dv", "dbias", "dsinks"}) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) continue;
    const Array& computed = found->second;
    if (found->first == "lse") {
      result.push_back(compare_lse(computed, expected.at(name), dtype, largest));
    } else {
      // What is stored in float32, as gradients of a float32 bias are, is no more exact than that.
      const double tolerance =
          found->first == "out" ? promised.output : std::max(promised.gradient, contract(computed.dtype).gradient);
      result.push_back(
          compare_vectors(name, computed, expected.at(name), tolerance, score_error, size.of(name, computed.size())));
    }
  }
  return result;
}

}  // namespace headrace::tool
