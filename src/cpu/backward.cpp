#include "cpu/simd/target.hpp"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include "cpu/kernels.hpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
namespace headrace::cpu::HWY_NAMESPACE {
void add_backward(KernelTable&) {}
}  // namespace headrace::cpu::HWY_NAMESPACE
