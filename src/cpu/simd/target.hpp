// To be included before hwy/foreach_target.h: which targets Highway compiles a file for. Every file
// of kernels is compiled once a target, each in a namespace of its own (N_AVX2, ...).
#pragma once

// avx512_bf16 is Highway's AVX3_DL (Ice Lake, Zen 4) with the bf16 instructions, which Zen 4, Cooper
// Lake and Sapphire Rapids have; see attributes-inl.h. SSSE3 and SVE would add nothing here.
#define HWY_WANT_AVX3_DL 1

// On x86 nothing older than SSE4.2 (2008) is served: were the compiler's own baseline (SSE2) Highway's too, it would
// have everything compiled for its emulation of vectors as well.
#ifdef HEADRACE_ONLY_TARGET  // see CMakeLists.txt
#define HWY_COMPILE_ONLY_STATIC
#define HWY_BASELINE_TARGETS HEADRACE_ONLY_TARGET
#elif defined(__x86_64__)
#define HWY_WANT_SSE4 1
#define HWY_BASELINE_TARGETS HWY_SSE4
#endif

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
