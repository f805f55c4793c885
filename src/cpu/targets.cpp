#include "cpu/targets.hpp"

#include "cpu/kernels.hpp"
#include "cpu/simd/target.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/targets.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target:
#include "hwy/highway.h"

namespace headrace::cpu::HWY_NAMESPACE {

void add_forward(KernelTable& table);   // forward.cpp
void add_backward(KernelTable& table);  // backward.cpp

const KernelTable& table() {
  static const KernelTable table = [] {
    KernelTable t;
    add_forward(t);
    add_backward(t);
    return t;
  }();
  return table;
}

#if HWY_TARGET == HWY_AVX3_DL
const KernelTable& amx_table() {
  static const KernelTable with_amx = [] {
    KernelTable t = table();
    t.bfloat16 = ProductKind::amx;
    return t;
  }();
  return with_amx;
}
#endif

}  // namespace headrace::cpu::HWY_NAMESPACE

#if HWY_ONCE

#include <algorithm>
#include <cstdlib>
#include <iterator>

#if HWY_ARCH_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif HWY_ARCH_ARM
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "describe/problem.hpp"

namespace headrace::cpu {
namespace {

#if HWY_TARGETS & HWY_AVX3_DL
bool has_avx512_bf16() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg") &&
         __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("gfni");
}

// AMX with bfloat16, and Linux lets this process use its registers, which it must ask for.
bool has_amx() {
  static const bool granted = [] {
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & amx_bf16) == 0 || (d & amx_tile) == 0) return false;
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return granted;
}
#endif

// Best first. A sanitized build has one of them, see CMakeLists.txt.
constexpr Target targets[] = {
#if HWY_TARGETS & HWY_AVX3_DL
    {"amx", [] { return has_avx512_bf16() && has_amx(); }, N_AVX3_DL::amx_table},
    {"avx512_bf16", has_avx512_bf16, N_AVX3_DL::table},
#endif
#if HWY_TARGETS & HWY_AVX3
    {"avx512",
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     },
     N_AVX3::table},
#endif
#if HWY_TARGETS & HWY_AVX2
    {"avx2",
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"); },
     N_AVX2::table},
#endif
#if HWY_TARGETS & HWY_SSE4
    {"sse4", [] { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }, N_SSE4::table},
#endif
#if HWY_TARGETS & HWY_NEON
    {"neon", [] { return (getauxval(AT_HWCAP) & HWCAP_AES) != 0; }, N_NEON::table},  // Highway's NEON has AES
#endif
};

// Whether to prefer a target to the one below it. Intel's processors do less with the instruction that multiplies pairs
// of bfloat16 than with two float32 multiply-adds (Emerald Rapids, a core: 81 and 166 GFLOP/s).
bool pays([[maybe_unused]] const Target& target) {
#if HWY_TARGETS & HWY_AVX3  // what would be preferred
  if (target.name == "avx512_bf16") return !__builtin_cpu_is("intel");
#endif
  return true;
}

const Target* choose() {
  const char* wanted = std::getenv("HEADRACE_SIMD");
  const bool free = wanted == nullptr || *wanted == '\0';
  const auto* const found = std::find_if(std::begin(targets), std::end(targets), [&](const Target& t) {
    return (free ? pays(t) : t.name == wanted) && t.supported();
  });
  return found == std::end(targets) ? nullptr : found;
}

}  // namespace

const Target& chosen() {
  static const Target* const target = choose();
  if (target == nullptr) {
    std::string names;
    for (const std::string& name : available_targets()) names += (names.empty() ? "" : ", ") + name;
    if (names.empty()) throw Failure(HR_ERROR_UNSUPPORTED, "cpu: this processor lacks SSE4.2, or on ARM NEON with AES");
    throw Failure(HR_ERROR_VALUE, std::string("HEADRACE_SIMD: is \"") + std::getenv("HEADRACE_SIMD") +
                                      "\"; this machine offers " + names);
  }
  return *target;
}

std::string_view chosen_target() { return chosen().name; }

std::vector<std::string> available_targets() {
  std::vector<std::string> names;
  for (const Target& t : targets) {
    if (t.supported()) names.emplace_back(t.name);
  }
  return names;
}

}  // namespace headrace::cpu

#endif  // HWY_ONCE
