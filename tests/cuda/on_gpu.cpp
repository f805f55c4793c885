#include "on_gpu.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <mutex>
#include <thread>

#include "cuda/driver/devices.hpp"
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
                              {"block_mask", &Call::block_mask, &Attention::block_mask},
                              {"dout", &Call::dout, &Attention::dout},
                              {"dlse", &Call::dlse, &Attention::dlse},
                              {"dq", &Call::dq, &Attention::dq},
                              {"dk", &Call::dk, &Attention::dk},
                              {"dv", &Call::dv, &Attention::dv},
                              {"dbias", &Call::dbias, &Attention::dbias},
                              {"dsinks", &Call::dsinks, &Attention::dsinks}};

bool is_one_of(const Member& member, std::initializer_list<Array Call::*> arrays) {
  return std::find(arrays.begin(), arrays.end(), member.array) != arrays.end();
}
bool is_written(const Member& member, Pass pass) {
  if (pass == Pass::forward) return is_one_of(member, {&Call::out, &Call::lse});
  return is_one_of(member, {&Call::dq, &Call::dk, &Call::dv, &Call::dbias, &Call::dsinks});
}

// What rounding explains. In float32 an element of out is as exact as the largest one of its row allows: v comes in
// parts that have a common unit.
Results bounds_on_gpu(const Call& call, const Results& exact) {
  Results bounds = error_bounds(DenseCall(call), exact, call.spec.dtype, call.lse.dtype(), call.bias.dtype());
  if (call.spec.dtype != DType::float32) return bounds;
  const auto columns = static_cast<std::size_t>(call.spec.value_dim);
  for (std::size_t row = 0; row < exact.out.size(); row += columns) {
    double largest = 0.0;
    for (std::size_t n = row; n < row + columns; ++n) largest = std::max(largest, std::abs(exact.out[n]));
    for (std::size_t n = row; n < row + columns; ++n) bounds.out[n] += 0x1p-24 * largest;
  }
  return bounds;
}

const char* name_of(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

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
std::string GpuWorkspace::judge(Pass pass) const {
  std::vector<std::byte> bytes(bytes_ + 2 * band);
  check(driver().cuMemcpyDtoH(bytes.data(), memory_.address(), bytes.size()), "cuMemcpyDtoH");
  const auto written = [](std::byte byte) { return byte != std::byte{0xFF}; };
  const auto end = bytes.end() - static_cast<std::ptrdiff_t>(band);
  return std::any_of(bytes.begin(), bytes.begin() + band, written) || std::any_of(end, bytes.end(), written)
             ? std::string("  ") + name_of(pass) + " writes beside the workspace\n"
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
    const bool always =
        alignment_of_inputs == Alignment::full && is_one_of(member, {&Call::q, &Call::k, &Call::v, &Call::dout});
    const bool aligned = always || (drawn && is_one_of(member, {&Call::q, &Call::k, &Call::v, &Call::dout, &Call::out,
                                                                &Call::dq, &Call::dk, &Call::dv}));
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
    if (!array.present()) continue;
    const std::ptrdiff_t offset = static_cast<std::byte*>(array.view().data) - array.storage().data();
    (attention_.*member.tensor).data = reinterpret_cast<void*>(address_of(array) + static_cast<CUdeviceptr>(offset));
  }
  attention_.device = Device::cuda;
  attention_.stream = stream;
}

CUdeviceptr GpuCall::address_of(const Array& array) const {
  const auto block = std::find_if(blocks_.begin(), blocks_.end(),
                                  [&](const Block& b) { return b.host.data() == array.storage().data(); });
  return memory_.address() + block->at;
}

void GpuCall::upload() const {
  std::vector<std::byte> image(bytes_, band_byte);
  for (const Block& block : blocks_)
    std::copy(block.host.begin(), block.host.end(), image.begin() + static_cast<std::ptrdiff_t>(block.at));
  const auto stream = static_cast<cuda::CUstream>(attention_.stream);
  check(driver().cuMemcpyHtoDAsync(memory_.address(), image.data(), bytes_, stream), "cuMemcpyHtoDAsync");
  check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");  // the image ends here
}

std::string GpuCall::download(Pass pass) {
  const auto stream = static_cast<cuda::CUstream>(attention_.stream);
  check(driver().cuMemcpyDtoHAsync(image_.data(), memory_.address(), bytes_, stream), "cuMemcpyDtoHAsync");
  check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  std::string wrong;
  std::size_t free = 0;
  const auto expect_untouched = [&](std::size_t end, const std::string& where) {
    for (std::size_t n = free; n < end; ++n) {
      if (image_[n] == band_byte) continue;
      wrong += std::string("  ") + name_of(pass) + " writes outside the tensors, byte " + std::to_string(n - free) +
               " of " + std::to_string(end - free) + " between " + where + "\n";
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

std::string run_pass(const Spec& spec, const Attention& attention, const GpuStream& stream, Pass pass) {
  const std::string what = std::string(name_of(pass)) + " of " + spec.describe();
  if (spec.through_plan) {
    const Plan plan(attention, pass);
    const GpuWorkspace workspace(plan.workspace_bytes());
    plan.execute(attention, workspace.span());
    stream.synchronize(what);
    return workspace.judge(pass);
  }
  if (pass == Pass::forward)
    forward(attention);
  else
    backward(attention);
  stream.synchronize(what);
  return "";
}

Outcome run_on_gpu(Call& call, Passes passes) {
  Outcome outcome;
  const auto fail = [&](const std::string& what) { outcome.failure += "  " + what + "\n"; };
  try {
    cuda::pretended_multiprocessors = call.spec.multiprocessors;
    const ContextScope scope(0);
    const GpuStream stream;
    GpuCall on_gpu(call, stream.get(), GpuCall::Alignment::drawn);
    const auto run = [&](Pass pass) {
      for (const Member& member : members) (call.*member.array).remember();
      on_gpu.upload();
      outcome.failure += run_pass(call.spec, on_gpu.attention(), stream, pass);
      outcome.failure += on_gpu.download(pass);
      for (const Member& member : members) {
        const Array& array = call.*member.array;
        const bool written = is_written(member, pass);
        if (written ? !array.gaps_unchanged() : !array.unchanged())
          fail(std::string(name_of(pass)) + " writes " + (written ? "between the elements of " : "to ") + member.name);
      }
    };
    if (!call.spec.want_lse) {
      const Tensor lse = on_gpu.attention().lse;
      on_gpu.attention().lse = Tensor();
      run(Pass::forward);
      const std::vector<std::byte> out = call.out.bytes();
      call.out.poison(0xCB);
      on_gpu.attention().lse = lse;
      run(Pass::forward);
      if (out != call.out.bytes()) fail("out has other bits when lse is asked for");
    } else {
      run(Pass::forward);
    }
    if (passes == Passes::both) run(Pass::backward);
    outcome.results = results_in(call, passes);
  } catch (const std::exception& error) {
    outcome.failure += error_of(error);
  }
  return outcome;
}

Results results_in(const Call& call, Passes passes) {
  Results results;
  results.out = call.out.values();
  results.lse = call.lse.values();
  if (passes == Passes::forward) return results;
  results.dq = call.dq.values();
  results.dk = call.dk.values();
  results.dv = call.dv.values();
  results.dbias = call.dbias.values();
  results.dsinks = call.dsinks.values();
  return results;
}

Results exact_on_cpu(const Call& call, int threads, Passes passes) {
  Call wide = in_float64(call);
  wide.spec.threads = threads;
  const Attention attention = wide.attention(Backend::reference);
  forward(attention);
  if (passes == Passes::both) {
    backward(attention);
    return results_in(wide, passes);
  }
  Results results = DenseCall(call).empty_results();
  results.out = wide.out.values();
  results.lse = wide.lse.values();
  return results;
}

std::string judge(const Call& call, const Outcome& outcome, const Results& exact, Passes passes) {
  Results got = outcome.results;
  if (got.out.size() != exact.out.size() || got.lse.size() != exact.lse.size() ||
      (passes == Passes::both && (got.dq.size() != exact.dq.size() || got.dk.size() != exact.dk.size())))
    return outcome.failure;  // it threw
  if (passes == Passes::forward) {
    got = exact;  // no gradients are judged
    got.out = outcome.results.out;
    got.lse = outcome.results.lse;
  }
  return outcome.failure + differences(call, got, exact, bounds_on_gpu(call, exact));
}

std::string check_on_gpu(const Spec& spec, Passes passes) {
  Call call = make_call(spec);
  const Outcome outcome = run_on_gpu(call, passes);
  return judge(call, outcome, exact_on_cpu(call, 1, passes), passes);
}

Results run_and_expect_exact_on_gpu(Call& call, Passes passes) {
  Outcome outcome = run_on_gpu(call, passes);
  Results exact = exact_on_cpu(call, 0, passes);
  EXPECT_EQ(judge(call, outcome, exact, passes), "") << call.spec.describe();
  return std::move(outcome.results.lse.size() == exact.lse.size() ? outcome.results : exact);
}

cuda::KernelSource variant_of(const Spec& spec) {
  if (spec.batch == 0 || spec.heads_q() == 0 || spec.seqlen_q == 0) return {};
  const Call call = make_call(spec);
  Attention attention = call.attention(Backend::automatic);
  attention.device = Device::cuda;
  cuda::pretended_multiprocessors = spec.multiprocessors;
  const Problem problem = validate(attention.c(), Pass::forward);
  const int multiprocessors = cuda::list_devices().devices.at(0).multiprocessors;
  if (problem.dtype == HR_FLOAT32)
    return cuda::hopper_split_forward_source(problem, cuda::hopper_split_variant(problem, multiprocessors));
  return cuda::hopper_forward_source(problem, cuda::hopper_forward_variant(problem, multiprocessors));
}

void load_kernels(const Spec& spec, Passes passes) {
  const Call call = make_call(spec);
  Attention attention = call.attention(Backend::automatic);
  for (const Member& member : members) (attention.*member.tensor).data = nullptr;  // what lies where does not matter
  attention.device = Device::cuda;
  cuda::pretended_multiprocessors = spec.multiprocessors;
  static_cast<void>(Plan(attention, Pass::forward));
  if (passes == Passes::both) static_cast<void>(Plan(attention, Pass::backward));
}

void load_variants(const std::vector<Spec>& specs, Passes passes) {
  in_parallel(specs.size(), [&](std::size_t n) {
    try {
      load_kernels(specs[n], passes);
    } catch (const std::exception&) {
      return;
    }
  });
}

void in_parallel(std::size_t count, const std::function<void(std::size_t)>& job) {
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t index; (index = next++) < count;) {
      try {
        job(index);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "job " << index << error_of(error);
      }
    }
  };
  std::vector<std::thread> workers;
  const std::size_t processors = std::max(1u, std::thread::hardware_concurrency());
  for (std::size_t n = 0; n < std::min(processors, count); ++n) workers.emplace_back(work);
  for (std::thread& worker : workers) worker.join();
}

Spec dense_spec(DType dtype, std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t dim) {
  Spec spec{.seed = test_rng().bits(), .dtype = dtype};
  spec.seqlen_q = seqlen_q;
  spec.seqlen_k = seqlen_k;
  spec.head_dim = spec.value_dim = dim;
  return spec;
}

void OnGpu::SetUp() {
  const cuda::DeviceList& list = cuda::list_devices();
  if (list.devices.empty()) GTEST_SKIP() << "no GPU: " << list.error;
  const cuda::Device& device = list.devices[0];
  if (device.compute_major != 9) GTEST_SKIP() << device.name << " is no Hopper GPU";
}

}  // namespace headrace::test
