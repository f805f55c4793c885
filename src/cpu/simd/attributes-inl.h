// Opens the region that is compiled for the current target. No include guard: the macro is defined anew
// for each target.
#include "hwy/highway.h"

#undef HEADRACE_BEFORE_NAMESPACE
#if HWY_TARGET == HWY_AVX3_DL  // avx512_bf16, see target.hpp
#define HEADRACE_BEFORE_NAMESPACE()                 \
  HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512bf16") \
  static_assert(true, "For requiring trailing semicolon")
#else
#define HEADRACE_BEFORE_NAMESPACE() HWY_BEFORE_NAMESPACE()
#endif
