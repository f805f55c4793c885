// hr_merge_states: two partial attentions over disjoint keys become one (the merge of DESIGN section 2's
// streaming state, in its finalized form: FlashAttention's rescaling, Dao et al. 2022, section 3.1).
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "api/guard.hpp"
#include "describe/scalar.hpp"
#include "describe/tensor_view.hpp"
#include "headrace/headrace.h"

namespace headrace {
namespace {

// How an element is stored, and its value in float64.
template <typename T>
struct Native {
  using Stored = T;
  static double load(T value) { return static_cast<double>(value); }
  static T store(double value) { return static_cast<T>(value); }
};

template <typename Format>
struct Packed {
  using Stored = std::uint16_t;
  static double load(std::uint16_t value) { return Format::to_double(value); }
  static std::uint16_t store(double value) { return Format::from_double(value); }
};

struct Side {
  const hr_tensor &out, &lse;
};

template <typename Element>
typename Element::Stored* row_of(const hr_tensor& out, std::int64_t b, std::int64_t i, std::int64_t h) {
  return static_cast<typename Element::Stored*>(out.data) + b * stride_of(out, 0) + i * stride_of(out, 1) +
         h * stride_of(out, 2);
}

template <typename Lse>
Lse& lse_of(const hr_tensor& lse, std::int64_t b, std::int64_t h, std::int64_t i) {
  return static_cast<Lse*>(lse.data)[b * stride_of(lse, 0) + h * stride_of(lse, 1) + i * stride_of(lse, 2)];
}

template <typename Element, typename Lse>
void merge_row(const Side& a, const Side& b, const Side& result, std::int64_t n, std::int64_t i, std::int64_t h) {
  using Stored = typename Element::Stored;
  constexpr Lse nothing = -std::numeric_limits<Lse>::infinity();
  const Lse lse_a = lse_of<Lse>(a.lse, n, h, i), lse_b = lse_of<Lse>(b.lse, n, h, i);
  Lse& lse = lse_of<Lse>(result.lse, n, h, i);
  const Stored* out_a = row_of<Element>(a.out, n, i, h);
  const Stored* out_b = row_of<Element>(b.out, n, i, h);
  Stored* out = row_of<Element>(result.out, n, i, h);
  const std::int64_t dim = result.out.shape[3];
  const std::int64_t step_a = stride_of(a.out, 3), step_b = stride_of(b.out, 3), step = stride_of(result.out, 3);

  if (lse_a == nothing && lse_b == nothing) {
    lse = nothing;
    for (std::int64_t x = 0; x < dim; ++x) out[x * step] = Element::store(0.0);
  } else if (lse_b == nothing) {
    lse = lse_a;
    for (std::int64_t x = 0; x < dim; ++x) out[x * step] = out_a[x * step_a];
  } else if (lse_a == nothing) {
    lse = lse_b;
    for (std::int64_t x = 0; x < dim; ++x) out[x * step] = out_b[x * step_b];
  } else {
    // Weights relative to the larger one: no exponential exceeds 1. A NaN on either side stays one.
    const double max = std::fmax(static_cast<double>(lse_a), static_cast<double>(lse_b));
    const double exp_a = std::exp(static_cast<double>(lse_a) - max), exp_b = std::exp(static_cast<double>(lse_b) - max);
    const double sum = exp_a + exp_b;
    const double weight_a = exp_a / sum, weight_b = exp_b / sum;
    lse = static_cast<Lse>(max + std::log(sum));
    for (std::int64_t x = 0; x < dim; ++x)
      out[x * step] =
          Element::store(weight_a * Element::load(out_a[x * step_a]) + weight_b * Element::load(out_b[x * step_b]));
  }
}

template <typename Element, typename Lse>
void merge(const Side& a, const Side& b, const Side& result) {
  const std::int64_t batch = result.out.shape[0], seqlen = result.out.shape[1], heads = result.out.shape[2];
  const std::int64_t rows = batch * seqlen * heads;
#pragma omp parallel for schedule(static) if (rows * result.out.shape[3] > 65536)
  for (std::int64_t row = 0; row < rows; ++row)
    merge_row<Element, Lse>(a, b, result, row / heads / seqlen, row / heads % seqlen, row % heads);
}

template <typename Lse>
void merge(const Side& a, const Side& b, const Side& result) {
  switch (result.out.dtype) {
    case HR_FLOAT16:
      return merge<Packed<Half>, Lse>(a, b, result);
    case HR_BFLOAT16:
      return merge<Packed<BFloat16>, Lse>(a, b, result);
    case HR_FLOAT64:
      return merge<Native<double>, Lse>(a, b, result);
    default:
      return merge<Native<float>, Lse>(a, b, result);
  }
}

struct Argument {
  const char* name;
  const hr_tensor* tensor;
};

void same_as(const Argument& argument, const Argument& first) {
  const hr_tensor &t = *argument.tensor, &expected = *first.tensor;
  if (t.dtype != expected.dtype)
    throw Failure(HR_ERROR_TYPE, fmt::format("{}: dtype is {}, but {} has {}; they must be equal", argument.name,
                                             dtype_name(t.dtype), first.name, dtype_name(expected.dtype)));
}

void same_shape(const Argument& argument, const hr_tensor& expected, const char* first) {
  if (shape_text(*argument.tensor) != shape_text(expected))
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: shape is {}; {} makes it {}", argument.name,
                                              shape_text(*argument.tensor), first, shape_text(expected)));
}

bool same_view(const hr_tensor& a, const hr_tensor& b) {
  for (int i = 0; i < a.ndim; ++i) {
    if (stride_of(a, i) != stride_of(b, i)) return false;
  }
  return a.data == b.data;
}

void checked_merge(const Argument (&outs)[3], const Argument (&lses)[3]) {
  for (const auto* arguments : {&outs, &lses}) {
    for (const Argument& argument : *arguments) {
      if (argument.tensor == nullptr) throw Failure(HR_ERROR_VALUE, fmt::format("{}: is NULL", argument.name));
    }
  }
  const hr_tensor& out_a = *outs[0].tensor;
  check_dtype(outs[0].name, out_a, {HR_FLOAT32, HR_FLOAT16, HR_BFLOAT16, HR_FLOAT64});
  check_view(outs[0].name, out_a, 4, "[batch, seqlen_q, heads, value_dim]");
  for (const Argument& argument : outs) {
    same_as(argument, outs[0]);
    check_view(argument.name, *argument.tensor, 4, "[batch, seqlen_q, heads, value_dim]");
    same_shape(argument, out_a, outs[0].name);
  }
  hr_tensor lse_shape{};
  lse_shape.ndim = 3;
  lse_shape.shape[0] = out_a.shape[0], lse_shape.shape[1] = out_a.shape[2], lse_shape.shape[2] = out_a.shape[1];
  for (const Argument& argument : lses) {
    if (out_a.dtype == HR_FLOAT64)
      check_dtype(argument.name, *argument.tensor, {HR_FLOAT32, HR_FLOAT64});
    else
      check_dtype(argument.name, *argument.tensor, {HR_FLOAT32});
    same_as(argument, lses[0]);
    check_view(argument.name, *argument.tensor, 3, "[batch, heads, seqlen_q]");
    same_shape(argument, lse_shape, outs[0].name);
  }
  check_output(outs[2].name, *outs[2].tensor);
  check_output(lses[2].name, *lses[2].tensor);
  for (const auto* arguments : {&outs, &lses}) {
    for (const Argument& argument : *arguments) check_data(argument.name, *argument.tensor);
  }
  // Every row is read before it is written: the tensor of side a, element for element, may be the result.
  for (const auto* results : {&outs, &lses}) {
    const Argument& result = (*results)[2];
    for (const auto* inputs : {&outs, &lses}) {
      for (int side = 0; side < 2; ++side) {
        const Argument& input = (*inputs)[side];
        if (inputs == results && side == 0 && same_view(*result.tensor, *input.tensor)) continue;
        if (share_memory(*result.tensor, *input.tensor))
          throw Failure(HR_ERROR_VALUE, fmt::format("{}: shares memory with {}; it may only be {} itself", result.name,
                                                    input.name, (*results)[0].name));
      }
    }
  }
  if (share_memory(*outs[2].tensor, *lses[2].tensor))
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: shares memory with {}; an output must have memory of its own",
                                              lses[2].name, outs[2].name));

  const Side a{*outs[0].tensor, *lses[0].tensor}, b{*outs[1].tensor, *lses[1].tensor};
  const Side result{*outs[2].tensor, *lses[2].tensor};
  if (result.lse.dtype == HR_FLOAT64)
    merge<double>(a, b, result);
  else
    merge<float>(a, b, result);
}

}  // namespace
}  // namespace headrace

hr_status hr_merge_states(const hr_tensor* out_a, const hr_tensor* lse_a, const hr_tensor* out_b,
                          const hr_tensor* lse_b, const hr_tensor* out, const hr_tensor* lse) {
  return headrace::guarded([&] {
    headrace::checked_merge({{"out_a", out_a}, {"out_b", out_b}, {"out", out}},
                            {{"lse_a", lse_a}, {"lse_b", lse_b}, {"lse", lse}});
  });
}
