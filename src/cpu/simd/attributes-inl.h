// Opens the region that is compiled for the current target, and marks the lambdas in it: Clang's region does not reach
// them. No include guard: the macros are defined anew for each target.
#include "hwy/highway.h"

// Before a loop over a few registers.
#ifndef HEADRACE_UNROLL
#if defined(__clang__)
#define HEADRACE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define HEADRACE_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

#undef HEADRACE_BEFORE_NAMESPACE
#undef HEADRACE_ATTR
#if HWY_TARGET == HWY_AVX3_DL  // avx512_bf16, see target.hpp
#define HEADRACE_BEFORE_NAMESPACE()                                   \
  HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16,amx-tile,amx-bf16") \
  static_assert(true, "For requiring trailing semicolon")
#define HEADRACE_ATTR __attribute__((target(HWY_TARGET_STR ",avx512bf16,amx-tile,amx-bf16")))
#else
#define HEADRACE_BEFORE_NAMESPACE() HWY_BEFORE_NAMESPACE()
#define HEADRACE_ATTR HWY_ATTR
#endif
