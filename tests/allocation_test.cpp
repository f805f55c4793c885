// Executing a plan allocates nothing. Counts what the library asks of operator new; the OpenMP runtime, which
// starts its threads in the first parallel region of a process, has an allocator of its own.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "headrace/headrace.hpp"

namespace {

std::atomic<long> allocations{0};

void* allocate_or_null(std::size_t size) noexcept {
  ++allocations;
  return std::malloc(size);
}

void* allocate(std::size_t size) {
  if (void* memory = allocate_or_null(size)) return memory;
  throw std::bad_alloc();
}

}  // namespace

// The nothrow forms too: AddressSanitizer has ones of its own, whose memory std::free may not take.
void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate_or_null(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return allocate_or_null(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace headrace {
namespace {

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

// Executions that follow a plan; the sizes are large enough for several tasks and for splits of the keys.
class Allocation : public testing::TestWithParam<Backend> {
 protected:
  static constexpr std::int64_t seqlen_q = 100, seqlen_k = 2048, heads = 12, dim = 16;

  static long allocations_of(const Attention& call, Pass pass) {
    const Plan plan(call, pass);
    const std::size_t bytes = plan.workspace_bytes();
    const std::unique_ptr<std::byte, Free> workspace(
        static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
    const long before = allocations;
    plan.execute(call, {workspace.get(), bytes});
    return allocations - before;
  }
};

TEST_P(Allocation, ExecuteDoesNone) {
  std::vector<float> q(seqlen_q * heads * dim, 0.5f), k(seqlen_k * heads * dim, 0.25f), v(k), out(q), dout(q), dq(q);
  std::vector<float> dk(k), dv(v), lse(seqlen_q * heads), bias(seqlen_q * seqlen_k, 0.125f), dbias(bias);
  std::vector<float> sinks(heads, 1.0f), dsinks(sinks);
  Attention call{.q = {q.data(), {1, seqlen_q, heads, dim}},
                 .k = {k.data(), {1, seqlen_k, heads, dim}},
                 .v = {v.data(), {1, seqlen_k, heads, dim}},
                 .out = {out.data(), {1, seqlen_q, heads, dim}},
                 .lse = {lse.data(), {1, heads, seqlen_q}},
                 .bias = {bias.data(), {1, 1, seqlen_q, seqlen_k}},
                 .sinks = {sinks.data(), {heads}},
                 .dout = {dout.data(), {1, seqlen_q, heads, dim}},
                 .dq = {dq.data(), {1, seqlen_q, heads, dim}},
                 .dk = {dk.data(), {1, seqlen_k, heads, dim}},
                 .dv = {dv.data(), {1, seqlen_k, heads, dim}},
                 .dbias = {dbias.data(), {1, 1, seqlen_q, seqlen_k}},
                 .dsinks = {dsinks.data(), {heads}},
                 .softcap = 10.0,
                 .dropout_p = 0.25,
                 .threads = 2,
                 .backend = GetParam()};

  const long before = allocations;
  const Plan plan(call, Pass::forward);
  EXPECT_GT(allocations, before) << "planning allocates: if that is not seen, nothing is";

  EXPECT_EQ(allocations_of(call, Pass::forward), 0);
  EXPECT_EQ(allocations_of(call, Pass::backward), 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, Allocation, testing::Values(Backend::cpu, Backend::reference));

}  // namespace
}  // namespace headrace
