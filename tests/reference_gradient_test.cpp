// Every gradient of the float64 reference against finite differences of its forward pass, over random
// combinations of the options. What the forward pass itself should give is worked out by hand in
// reference_test.cpp.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "support/problem.hpp"
#include "support/random.hpp"

namespace headrace::test {
namespace {

// The scalar whose gradients are checked: sum(dout * out) + sum(dlse * lse), and the sum of its terms'
// magnitudes, which bounds its rounding. A row with lse = -inf has no gradient from its lse.
struct Loss {
  double value = 0.0, magnitude = 0.0;
  void add(double term) {
    value += term;
    magnitude += std::abs(term);
  }
};

Loss loss(Call& call) {
  call.out.poison(0xFF);
  call.lse.poison(0xFF);
  forward(call.attention(Backend::reference));
  Loss sum;
  const std::vector<double> out = call.out.values(), dout = call.dout.values();
  for (std::size_t n = 0; n < out.size(); ++n) sum.add(out[n] * dout[n]);
  const std::vector<double> lse = call.lse.values(), dlse = call.dlse.values();
  for (std::size_t n = 0; n < dlse.size(); ++n) {
    if (lse[n] != -infinity) sum.add(lse[n] * dlse[n]);
  }
  return sum;
}

// The derivative of the loss along `direction`, from five points: the error is of order step^4.
double numeric_derivative(Call& call, Array& input, const std::vector<double>& direction, double step) {
  const std::vector<double> values = input.values();
  const auto loss_at = [&](double steps) {
    std::vector<double> moved = values;
    for (std::size_t n = 0; n < moved.size(); ++n) moved[n] += steps * step * direction[n];
    input.fill(moved);
    return loss(call).value;
  };
  const double derivative = (8.0 * (loss_at(1) - loss_at(-1)) - (loss_at(2) - loss_at(-2))) / (12.0 * step);
  input.fill(values);
  return derivative;
}

void check_gradient(Call& call, Array& input, const Array& gradient, const char* name, Rng& rng) {
  std::vector<double> values = input.values();
  const std::vector<double> analytic = gradient.values();
  ASSERT_EQ(values.size(), analytic.size()) << name;
  if (values.empty()) return;

  // -inf hides a key or leaves out a sink: nothing depends on such an element.
  std::vector<std::size_t> finite;
  for (std::size_t n = 0; n < values.size(); ++n) {
    if (values[n] == -infinity) {
      EXPECT_EQ(analytic[n], 0.0) << name << " element " << n;
    } else {
      finite.push_back(n);
    }
  }
  if (finite.empty()) return;

  const double step = input.dtype() == DType::float64 ? 0x1p-12 : 0x1p-10;
  const double rounding = gradient.dtype() == DType::float64 ? 1e-14 : 1e-7;
  const double loss_rounding = 4e-16 * loss(call).magnitude;
  const auto check = [&](const std::vector<double>& direction, const std::string& what) {
    double expected = 0.0, magnitude = 0.0;
    for (const std::size_t n : finite) {
      expected += analytic[n] * direction[n];
      magnitude += std::abs(analytic[n] * direction[n]);
    }
    const double numeric = numeric_derivative(call, input, direction, step);
    const double tolerance = 1e-9 * (1.0 + magnitude) + rounding * magnitude + loss_rounding / step;
    EXPECT_NEAR(expected, numeric, tolerance) << name << ' ' << what << " of " << finite.size();
  };

  for (int repeat = 0; repeat < 4; ++repeat) {
    const std::size_t n = finite[static_cast<std::size_t>(rng.integer(0, std::ssize(finite) - 1))];
    std::vector<double> direction(values.size(), 0.0);
    direction[n] = 1.0;
    check(direction, "element " + std::to_string(n));
  }
  std::vector<double> direction(values.size(), 0.0);
  for (const std::size_t n : finite) direction[n] = rng.pick({-1.0, 1.0});
  check(direction, "along all elements");
}

// float32 inputs are put on a grid on which a step is exact.
void round_to_grid(Array& input) {
  if (!input.present() || input.dtype() == DType::float64) return;
  std::vector<double> values = input.values();
  for (double& x : values) {
    if (x != -infinity) x = std::round(x * 0x1p10) * 0x1p-10;
  }
  input.fill(values);
}

void check_all_gradients(const Spec& spec, Rng& rng) {
  SCOPED_TRACE(spec.describe());
  Call call = make_call(spec);
  round_to_grid(call.bias);
  round_to_grid(call.sinks);
  ASSERT_FALSE(std::isnan(loss(call).value));
  for (Array* gradient : {&call.dq, &call.dk, &call.dv, &call.dbias, &call.dsinks}) {
    if (gradient->present()) gradient->poison(0xFF);
  }
  backward(call.attention(Backend::reference));
  check_gradient(call, call.q, call.dq, "dq", rng);
  check_gradient(call, call.k, call.dk, "dk", rng);
  check_gradient(call, call.v, call.dv, "dv", rng);
  if (call.dbias.present()) check_gradient(call, call.bias, call.dbias, "dbias", rng);
  if (call.dsinks.present()) check_gradient(call, call.sinks, call.dsinks, "dsinks", rng);
}

// A random combination of options, with what finite differences need: float64, and one element of memory for
// each element of an input.
Spec differentiable_spec(Rng& rng) {
  Spec spec = random_spec(rng, 3000.0);
  spec.dtype = DType::float64;
  spec.lse_float64 = true;
  spec.inputs = Inputs::normal;
  spec.packed_qkv = false;
  spec.q_layout = spec.k_layout = spec.v_layout = spec.dout_layout = Layout::contiguous;
  spec.lse_layout = spec.bias.layout = Layout::contiguous;
  spec.dlse = rng.chance(0.7);
  spec.dbias = spec.bias.present;
  spec.dsinks = spec.sinks != Sinks::none;
  return spec;
}

TEST(ReferenceGradient, RandomOptions) {
  Rng rng = test_rng();
  for (int repeat = scaled(200); repeat > 0 && !HasFailure(); --repeat)
    check_all_gradients(differentiable_spec(rng), rng);
}

TEST(ReferenceGradient, BiasOfEveryBroadcastShape) {
  Rng rng = test_rng();
  for (unsigned kind = 0; kind < 16; ++kind) {
    for (const bool of_input_dtype : {false, true}) {
      Spec spec = differentiable_spec(rng);
      spec.bias.present = spec.dbias = true;
      spec.bias.full = {(kind & 1) != 0, (kind & 2) != 0, (kind & 4) != 0, (kind & 8) != 0};
      spec.bias.of_input_dtype = of_input_dtype;
      spec.bias.hide_rows = spec.bias.hide_batch = false;
      spec.bias.hidden = 0.1;
      check_all_gradients(spec, rng);
      if (HasFailure()) return;
    }
  }
}

// Options that a random draw may miss or that a later option may hide, each alone and long enough to matter.
TEST(ReferenceGradient, EachOptionAlone) {
  Rng rng = test_rng();
  Spec plain;
  plain.dtype = DType::float64;
  plain.lse_float64 = plain.dlse = true;
  plain.batch = 2, plain.heads_kv = 2;
  plain.seqlen_q = 7, plain.seqlen_k = 9;
  plain.head_dim = 3, plain.value_dim = 5;

  std::vector<Spec> specs(12, plain);
  specs[1].group = 3;
  specs[2].causal = Causal::bottom_right;
  specs[3].causal = Causal::top_left;
  specs[4].window_left = 2, specs[4].window_right = 1;
  specs[5].softcap = 1.0;
  specs[6].alibi = Alibi::batch_heads;
  specs[7].sinks = Sinks::normal, specs[7].dsinks = true;
  specs[8].dropout_p = 0.4;
  specs[9].blocks.present = true, specs[9].blocks.block_q = 2, specs[9].blocks.block_k = 3;
  specs[10].mask.present = true, specs[10].mask.full = {true, true, true, true}, specs[10].mask.hidden = 0.4;
  specs[11].ragged = true, specs[11].lengths_q = {3, 5}, specs[11].lengths_k = {6, 2};
  specs[11].slack_q = 2, specs[11].slack_k = 1, specs[11].used_k = {4, 2};
  for (Spec& spec : specs) {
    spec.seed = rng.bits();
    spec.dropout_seed = rng.bits();
    check_all_gradients(spec, rng);
    // All of them work through the lse alone, too.
    Call call = make_call(spec);
    call.dout.fill(std::vector<double>(static_cast<std::size_t>(call.dout.size()), 0.0));
    loss(call);
    backward(call.attention(Backend::reference));
    for (const double gradient : call.dv.values()) EXPECT_EQ(gradient, 0.0);
    check_gradient(call, call.q, call.dq, "dq through lse", rng);
    check_gradient(call, call.k, call.dk, "dk through lse", rng);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace headrace::test
