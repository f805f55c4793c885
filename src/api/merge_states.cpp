// hr_merge_states: two partial attentions over disjoint keys become one: the merge of the streaming
// state in its finalized form (FlashAttention's rescaling, Dao et al. 2022, section 3.1).
#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "api/guard.hpp"
#include "describe/element.hpp"
#include "describe/tensor_view.hpp"
#include "headrace/headrace.h"
#include "headrace/streaming.hpp"

namespace headrace {
namespace {

// One partial attention, or the merged one.
struct Side {
  const hr_tensor &out, &lse;
};

template <typename T>
struct Vectors {  // [batch, seqlen_q, heads, value_dim]
  explicit Vectors(const hr_tensor& t)
      : data(static_cast<T*>(t.data)), stride{stride_of(t, 0), stride_of(t, 1), stride_of(t, 2), stride_of(t, 3)} {}
  [[nodiscard]] T& at(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t x) const {
    return data[b * stride[0] + i * stride[1] + h * stride[2] + x * stride[3]];
  }
  T* data;
  std::int64_t stride[4];
};

template <typename T>
struct Statistics {  // [batch, heads, seqlen_q]
  explicit Statistics(const hr_tensor& t)
      : data(static_cast<T*>(t.data)), stride{stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)} {}
  [[nodiscard]] T& at(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return data[b * stride[0] + h * stride[1] + i * stride[2]];
  }
  T* data;
  std::int64_t stride[3];
};

template <typename T, typename Lse>
void merge(const Side& side_a, const Side& side_b, const Side& result) {
  const Vectors<T> out_a(side_a.out), out_b(side_b.out), out(result.out);
  const Statistics<Lse> lse_a(side_a.lse), lse_b(side_b.lse), lse(result.lse);
  const std::int64_t seqlen = result.out.shape[1], heads = result.out.shape[2], dim = result.out.shape[3];
  const std::int64_t rows = result.out.shape[0] * seqlen * heads;
  constexpr Lse nothing = -std::numeric_limits<Lse>::infinity();

#pragma omp parallel for schedule(static) if (rows * dim > 65536)
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t b = row / heads / seqlen, i = row / heads % seqlen, h = row % heads;
    const Lse a_lse = lse_a.at(b, h, i), b_lse = lse_b.at(b, h, i);
    if (a_lse == nothing && b_lse == nothing) {
      lse.at(b, h, i) = nothing;
      for (std::int64_t x = 0; x < dim; ++x) out.at(b, i, h, x) = static_cast<T>(0.0);
    } else if (a_lse == nothing || b_lse == nothing) {  // bit for bit, whatever the empty side's out holds
      const Vectors<T>& from = b_lse == nothing ? out_a : out_b;
      lse.at(b, h, i) = b_lse == nothing ? a_lse : b_lse;
      for (std::int64_t x = 0; x < dim; ++x) out.at(b, i, h, x) = from.at(b, i, h, x);
    } else {
      // The larger side comes first, so that swapping the sides changes no bit.
      const bool swap = b_lse > a_lse;
      const Vectors<T>&first = swap ? out_b : out_a, &second = swap ? out_a : out_b;
      auto state = SoftmaxState<double>::of_lse(static_cast<double>(swap ? b_lse : a_lse));
      const auto weights = state.merge(SoftmaxState<double>::of_lse(static_cast<double>(swap ? a_lse : b_lse)));
      const auto merged = state.finalize();
      lse.at(b, h, i) = static_cast<Lse>(merged.lse);
      for (std::int64_t x = 0; x < dim; ++x)
        out.at(b, i, h, x) =
            static_cast<T>(merged.scale * (weights.kept * static_cast<double>(first.at(b, i, h, x)) +
                                           weights.added * static_cast<double>(second.at(b, i, h, x))));
    }
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
      check_present(argument.name, *argument.tensor);
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
  with_element_type(static_cast<hr_dtype>(result.out.dtype), [&]<typename T>(T) {
    if constexpr (std::is_same_v<T, double>) {
      if (result.lse.dtype == HR_FLOAT64) return merge<T, double>(a, b, result);
    }
    merge<T, float>(a, b, result);
  });
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
