#include <fmt/format.h>

#include "api/guard.hpp"
#include "describe/dropout.hpp"
#include "describe/tensor_view.hpp"
#include "headrace/headrace.h"

namespace headrace {
namespace {

void write_dropout_mask(const hr_tensor& keep, const Dropout& dropout) {
  const std::int64_t heads = keep.shape[1], seqlen_q = keep.shape[2], seqlen_k = keep.shape[3];
  const std::int64_t rows = keep.shape[0] * heads * seqlen_q;
  if (is_empty(keep)) return;
#pragma omp parallel for schedule(static) if (rows * seqlen_k > 65536)
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t b = row / seqlen_q / heads, h = row / seqlen_q % heads, i = row % seqlen_q;
    auto* out = static_cast<std::uint8_t*>(keep.data) + b * stride_of(keep, 0) + h * stride_of(keep, 1) +
                i * stride_of(keep, 2);
    for (std::int64_t j = 0; j < seqlen_k; ++j) out[j * stride_of(keep, 3)] = dropout.keep(b, h, i, j) ? 1 : 0;
  }
}

}  // namespace
}  // namespace headrace

hr_status hr_dropout_mask(const hr_tensor* keep, double dropout_p, uint64_t seed) {
  using headrace::Failure;
  return headrace::guarded([&] {
    if (keep == nullptr) throw Failure(HR_ERROR_VALUE, "keep: is NULL");
    headrace::check_present("keep", *keep);
    headrace::check_dtype("keep", *keep, {HR_BOOL});
    headrace::check_view("keep", *keep, 4, "[batch, heads_q, seqlen_q, seqlen_k]");
    headrace::check_output("keep", *keep);
    if (!(dropout_p >= 0 && dropout_p < 1))
      throw Failure(HR_ERROR_VALUE, fmt::format("dropout_p: is {}; it must be at least 0 and below 1", dropout_p));
    if (!headrace::Dropout::distinguishes(keep->shape[0], keep->shape[1], keep->shape[2], keep->shape[3]))
      throw Failure(HR_ERROR_VALUE,
                    fmt::format("keep: shape is {}; dropout works up to 2^32 sequences and heads and lengths of 2^33",
                                headrace::shape_text(*keep)));
    headrace::check_data("keep", *keep);
    headrace::write_dropout_mask(*keep, headrace::Dropout{dropout_p, seed});
  });
}
