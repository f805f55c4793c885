// Standard attention with the rounding of a number type, in plain loops: the yardstick of accuracy on inputs
// that are harder than N(0, 1). (standard_attention.hpp is the yardstick of speed.)
#pragma once

#include "array.hpp"

namespace headrace::tool {

// tensors: q, k, v, dout [batch, seqlen, heads, dim] of one dtype. Returns out, lse, dq, dk, dv: scores and
// sums in float32; P, dS and every result rounded to the dtype; D = dout . out, as in FlashAttention; and
// "peak" [batch, heads, seqlen] float32, the largest probability of each row.
Tensors rounded_attention(const Tensors& tensors, bool causal);

}  // namespace headrace::tool
