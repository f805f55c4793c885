#include "on_gpu.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <mutex>
#include <thread>

#include "cuda/driver/devices.hpp"
#include "cuda/driver/module_cache.hpp"
#include "cuda/launch/forward_constants.hpp"
#include "cuda/launch/hopper_forward_source.hpp"
#include "cuda/launch/hopper_split_forward_source.hpp"
#include "describe/problem.hpp"
#include "support/error_bounds.hpp"
#include "test_kernels.hpp"

namespace headrace::test {
namespace {

constexpr std::size_t band = 4096, alignment = 256;
constexpr std::byte band_byte{0xCB};

// Watches that what is running ends.
class Watchdog {
 public:
  using Entry = std::list<std::pair<std::string, std::chrono::steady_clock::time_point>>::iterator;

  static Watchdog& get() {
    static auto* const watchdog = new Watchdog;  // its thread never ends
    return *watchdog;
  }
  Entry begin(const std::string& what) {
    const std::lock_guard lock(mutex_);
    return running_.emplace(running_.end(), what, std::chrono::steady_clock::now());
  }
  void end(Entry entry) {
    const std::lock_guard lock(mutex_);
    running_.erase(entry);
  }

 private:
  Watchdog() {
    std::thread([this] { watch(); }).detach();
  }
  void watch() {
    constexpr std::chrono::seconds limit(40);
    for (;;) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      const std::lock_guard lock(mutex_);
      if (running_.empty() || std::chrono::steady_clock::now() - running_.front().second < limit) continue;
      for (const auto& [what, since] : running_) std::printf("still running on the GPU: %s\n", what.c_str());
      std::printf("[  FAILED  ] a kernel hangs; repeat with HEADRACE_TEST_SEED=%llu\n",
                  static_cast<unsigned long long>(run_seed()));
      std::fflush(stdout);
      std::_Exit(1);
    }
  }

  std::mutex mutex_;
  std::list<std::pair<std::string, std::chrono::steady_clock::time_point>> running_;
};

struct Member {
  const char* name;
  Array Call::*array;
  Tensor Attention::*tensor;
};
constexpr Member members[] = {{"q", &Call::q, &Attention::q},
                              {"k", &Call::k, &Attention::k},
                              {"v", &Call::v, &Attention::v},
                              {"out", &Call::out, &Attention::out},
                              {"lse", &Call::lse, &Attention::lse},
                              {"bias", &Call::bias, &Attention::bias},
                              {"mask", &Call::mask, &Attention::mask},
                              {"alibi_slopes", &Call::alibi_slopes, &Attention::alibi_slopes},
                              {"sinks", &Call::sinks, &Attention::sinks},
                              {"block_mask", &Call::block_mask, &Attention::block_mask}};

bool is_written(const Member& member) { return member.array == &Call::out || member.array == &Call::lse; }

void forget_gradients(Attention& a) { a.dout = a.dlse = a.dq = a.dk = a.dv = a.dbias = a.dsinks = Tensor(); }

std::string error_of(const std::exception& error) { return std::string("  throws: ") + error.what() + "\n"; }

}  // namespace

GpuStream::GpuStream() { check(driver().cuStreamCreate(&stream_, cuda::CU_STREAM_NON_BLOCKING), "cuStreamCreate"); }
GpuStream::~GpuStream() { driver().cuStreamDestroy(stream_); }
void GpuStream::synchronize(const std::string& what) const {
  const Watchdog::Entry entry = Watchdog::get().begin(what);
  const cuda::CUresult result = driver().cuStreamSynchronize(stream_);
  Watchdog::get().end(entry);
  check(result, "cuStreamSynchronize");
}

GpuMemory::GpuMemory(std::size_t bytes) {
  if (bytes > 0) check(driver().cuMemAlloc(&address_, bytes), "cuMemAlloc");
}
GpuMemory::~GpuMemory() {
  if (address_ != 0) driver().cuMemFree(address_);
}

GpuWorkspace::GpuWorkspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + 2 * band) {
  check(driver().cuMemsetD8Async(memory_.address(), 0xFF, bytes_ + 2 * band, nullptr), "cuMemsetD8Async");
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}
std::span<std::byte> GpuWorkspace::span() const {
  return {reinterpret_cast<std::byte*>(memory_.address() + band), bytes_};
}
std::string GpuWorkspace::judge() const {
  std::vector<std::byte> bytes(bytes_ + 2 * band);
  check(driver().cuMemcpyDtoH(bytes.data(), memory_.address(), bytes.size()), "cuMemcpyDtoH");
  const auto written = [](std::byte byte) { return byte != std::byte{0xFF}; };
  const auto end = bytes.end() - static_cast<std::ptrdiff_t>(band);
  return std::any_of(bytes.begin(), bytes.begin() + band, written) || std::any_of(end, bytes.end(), written)
             ? "  forward writes beside the workspace\n"
             : "";
}

// Places the blocks behind one another and returns the size of it all.
std::size_t GpuCall::layout(Call& call, Alignment alignment_of_inputs, std::vector<Block>& blocks) {
  std::size_t end = band;
  for (const Member& member : members) {
    const Array& array = call.*member.array;
    const std::span<std::byte> host = array.storage();
    const auto known = std::find_if(blocks.begin(), blocks.end(),
                                    [&](const Block& block) { return block.host.data() == host.data(); });
    if (host.empty() || known != blocks.end()) continue;
    // Shifted so that what is to be aligned on the device is, wherever it is on the host.
    const auto number = static_cast<std::uint64_t>(&member - members);
    const bool drawn = mix(call.spec.seed, number) % 3 != 0;
    const bool aligned =
        member.array == &Call::out ? drawn : number < 3 && (alignment_of_inputs == Alignment::full || drawn);
    const auto offset = static_cast<std::size_t>(static_cast<std::byte*>(array.view().data) - host.data());
    const std::size_t at = end + (aligned ? (16 - offset % 16) % 16 : 0);
    blocks.push_back({member.name, host, at});
    end = (at + host.size() + band + alignment - 1) / alignment * alignment;
  }
  return end;
}

GpuCall::GpuCall(Call& call, cuda::CUstream stream, Alignment alignment_of_inputs)
    : call_(call),
      bytes_(layout(call, alignment_of_inputs, blocks_)),
      image_(bytes_, band_byte),
      memory_(bytes_),
      attention_(call.attention(Backend::automatic)) {
  for (const Member& member : members) {
    const Array& array = call.*member.array;
    for (const Block& block : blocks_) {
      if (block.host.data() != array.storage().data()) continue;
      const std::ptrdiff_t offset = static_cast<std::byte*>(array.view().data) - block.host.data();
      (attention_.*member.tensor).data =
          reinterpret_cast<void*>(memory_.address() + block.at + static_cast<CUdeviceptr>(offset));
    }
  }
  forget_gradients(attention_);
  attention_.device = Device::cuda;
  attention_.stream = stream;
}

void GpuCall::upload() const {
  std::vector<std::byte> image(bytes_, band_byte);
  for (const Block& block : blocks_)
    std::copy(block.host.begin(), block.host.end(), image.begin() + static_cast<std::ptrdiff_t>(block.at));
  const auto stream = static_cast<cuda::CUstream>(attention_.stream);
  check(driver().cuMemcpyHtoDAsync(memory_.address(), image.data(), bytes_, stream), "cuMemcpyHtoDAsync");
  check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");  // the image ends here
}

std::string GpuCall::download() {
  const auto stream = static_cast<cuda::CUstream>(attention_.stream);
  check(driver().cuMemcpyDtoHAsync(image_.data(), memory_.address(), bytes_, stream), "cuMemcpyDtoHAsync");
  check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  std::string wrong;
  std::size_t free = 0;
  const auto expect_untouched = [&](std::size_t end, const std::string& where) {
    for (std::size_t n = free; n < end; ++n) {
      if (image_[n] == band_byte) continue;
      wrong += "  forward writes outside the tensors, byte " + std::to_string(n - free) + " of " +
               std::to_string(end - free) + " between " + where + "\n";
      return;
    }
  };
  std::string before = "the begin of the memory";
  for (const Block& block : blocks_) {
    expect_untouched(block.at, before + " and " + block.name);
    std::copy_n(image_.begin() + static_cast<std::ptrdiff_t>(block.at), block.host.size(), block.host.begin());
    free = block.at + block.host.size();
    before = block.name;
  }
  expect_untouched(bytes_, before + " and the end of the memory");
  return wrong;
}

Outcome run_on_gpu(Call& call) {
  Outcome outcome;
  const auto fail = [&](const std::string& what) { outcome.failure += "  " + what + "\n"; };
  try {
    cuda::pretended_multiprocessors = call.spec.multiprocessors;
    const ContextScope scope(0);
    const GpuStream stream;
    GpuCall on_gpu(call, stream.get(), GpuCall::Alignment::drawn);
    const std::string what = call.spec.describe();
    const auto pass = [&] {
      for (const Member& member : members) (call.*member.array).remember();
      on_gpu.upload();
      if (call.spec.through_plan) {
        const Plan plan(on_gpu.attention(), Pass::forward);
        const GpuWorkspace workspace(plan.workspace_bytes());
        plan.execute(on_gpu.attention(), workspace.span());
        stream.synchronize(what);
        outcome.failure += workspace.judge();
      } else {
        forward(on_gpu.attention());
        stream.synchronize(what);
      }
      outcome.failure += on_gpu.download();
      for (const Member& member : members) {
        const Array& array = call.*member.array;
        if (is_written(member) ? !array.gaps_unchanged() : !array.unchanged())
          fail(std::string("forward writes ") + (is_written(member) ? "between the elements of " : "to ") +
               member.name);
      }
    };
    if (!call.spec.want_lse) {
      const Tensor lse = on_gpu.attention().lse;
      on_gpu.attention().lse = Tensor();
      pass();
      const std::vector<std::byte> out = call.out.bytes();
      call.out.poison(0xCB);
      on_gpu.attention().lse = lse;
      pass();
      if (out != call.out.bytes()) fail("out has other bits when lse is asked for");
    } else {
      pass();
    }
    outcome.results.out = call.out.values();
    outcome.results.lse = call.lse.values();
  } catch (const std::exception& error) {
    outcome.failure += error_of(error);
  }
  return outcome;
}

Results exact_forward(const Call& call, int threads) {
  Results results = DenseCall(call).empty_results();
  Call wide = in_float64(call);
  wide.spec.threads = threads;
  Attention attention = wide.attention(Backend::reference);
  forget_gradients(attention);
  forward(attention);
  results.out = wide.out.values();
  results.lse = wide.lse.values();
  return results;
}

std::string judge_forward(const Call& call, const Outcome& outcome, const Results& exact) {
  if (outcome.results.out.size() != exact.out.size() || outcome.results.lse.size() != exact.lse.size())
    return outcome.failure;  // it threw
  const Results bounds = error_bounds(DenseCall(call), exact, call.spec.dtype, call.lse.dtype(), call.bias.dtype());
  Results got = exact;  // no gradients are judged
  got.out = outcome.results.out;
  got.lse = outcome.results.lse;
  return outcome.failure + differences(call, got, exact, bounds);
}

std::string check_on_gpu(const Spec& spec) {
  Call call = make_call(spec);
  const Outcome outcome = run_on_gpu(call);
  return judge_forward(call, outcome, exact_forward(call, 1));
}

cuda::KernelSource variant_of(const Spec& spec) {
  if (spec.batch == 0 || spec.heads_q() == 0 || spec.seqlen_q == 0) return {};
  const Call call = make_call(spec);
  Attention attention = call.attention(Backend::automatic);
  forget_gradients(attention);
  attention.device = Device::cuda;
  cuda::pretended_multiprocessors = spec.multiprocessors;
  const Problem problem = validate(attention.c(), Pass::forward);
  const int multiprocessors = cuda::list_devices().devices.at(0).multiprocessors;
  if (problem.dtype == HR_FLOAT32)
    return cuda::hopper_split_forward_source(problem, cuda::hopper_split_variant(problem, multiprocessors));
  return cuda::hopper_forward_source(problem, cuda::hopper_forward_variant(problem, multiprocessors));
}

void load_variant(const cuda::KernelSource& source) {
  const ContextScope scope(0);
  cuda::load_kernel(source);
}

void load_variants(const std::vector<Spec>& specs) {
  in_parallel(specs.size(), [&](std::size_t n) {
    try {
      load_variant(variant_of(specs[n]));
    } catch (const std::exception&) {
      return;
    }
  });
}

void in_parallel(std::size_t count, const std::function<void(std::size_t)>& job) {
  std::atomic<std::size_t> next = 0;
  std::vector<std::thread> workers;
  for (unsigned n = 0; n < std::max(1u, std::thread::hardware_concurrency()); ++n)
    workers.emplace_back([&] {
      for (std::size_t index; (index = next++) < count;) job(index);
    });
  for (std::thread& worker : workers) worker.join();
}

void OnGpu::SetUp() {
  const cuda::DeviceList& list = cuda::list_devices();
  if (list.devices.empty()) GTEST_SKIP() << "no GPU: " << list.error;
  const cuda::Device& device = list.devices[0];
  if (device.compute_major != 9) GTEST_SKIP() << device.name << " is no Hopper GPU";
}

}  // namespace headrace::test
