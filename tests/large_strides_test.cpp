// Offsets beyond 2^31 elements, by mappings that reserve addresses and no memory; and how little memory
// long sequences need.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include "support/compare.hpp"

namespace headrace::test {
namespace {

// Zeros that take memory only where they are touched.
class SparseMapping {
 public:
  explicit SparseMapping(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)),
        memory_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    // Tables of huge pages would fill the memory that sparse use is to spare.
    if (valid()) madvise(memory_, bytes_, MADV_NOHUGEPAGE);
  }
  ~SparseMapping() {
    if (valid()) munmap(memory_, bytes_);
  }
  SparseMapping(const SparseMapping&) = delete;
  SparseMapping& operator=(const SparseMapping&) = delete;

  [[nodiscard]] bool valid() const { return memory_ != MAP_FAILED; }
  [[nodiscard]] void* data() const { return memory_; }

 private:
  std::size_t bytes_;
  void* memory_;
};

// A tensor of the values of an Array with strides of our choice in a mapping.
class SparseTensor {
 public:
  SparseTensor(const Array& from, const std::vector<std::int64_t>& strides)
      : dtype_(from.dtype()), shape_(from.shape()), strides_(strides), mapping_(bytes()) {
    if (!mapping_.valid()) return;
    std::copy_n(strides.begin(), strides.size(), view_.stride);
    std::copy(shape_.begin(), shape_.end(), view_.shape);
    view_.ndim = static_cast<std::int32_t>(shape_.size());
    view_.dtype = static_cast<std::int32_t>(dtype_);
    view_.data = mapping_.data();
    const std::vector<std::byte> bits = from.bytes();
    std::size_t at = 0;
    const auto size = static_cast<std::size_t>(size_of(dtype_));
    for_each([&](std::byte* element) {
      std::memcpy(element, bits.data() + at, size);
      at += size;
    });
  }

  [[nodiscard]] bool valid() const { return mapping_.valid(); }
  [[nodiscard]] Tensor view() const { return view_; }
  [[nodiscard]] std::vector<std::byte> bits() const {
    std::vector<std::byte> result;
    for_each([&](std::byte* element) { result.insert(result.end(), element, element + size_of(dtype_)); });
    return result;
  }

 private:
  [[nodiscard]] std::int64_t bytes() const {
    std::int64_t last = 0;
    for (std::size_t i = 0; i < shape_.size(); ++i) last += (shape_[i] - 1) * strides_[i];
    return (last + 1) * size_of(dtype_);
  }

  template <typename F>
  void for_each(F&& visit) const {
    Shape shape = shape_, stride = strides_;
    shape.insert(shape.begin(), 4 - shape.size(), 1);
    stride.insert(stride.begin(), 4 - stride.size(), 0);
    for (std::int64_t a = 0; a < shape[0]; ++a)
      for (std::int64_t b = 0; b < shape[1]; ++b)
        for (std::int64_t c = 0; c < shape[2]; ++c)
          for (std::int64_t d = 0; d < shape[3]; ++d)
            visit(static_cast<std::byte*>(mapping_.data()) +
                  (a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]) * size_of(dtype_));
  }

  DType dtype_;
  Shape shape_;
  std::vector<std::int64_t> strides_;
  SparseMapping mapping_;
  Tensor view_;
};

struct Place {
  const char* name;
  Array Call::*array;
  Tensor Attention::*tensor;
};
constexpr Place places[] = {
    {"q", &Call::q, &Attention::q},          {"k", &Call::k, &Attention::k},
    {"v", &Call::v, &Attention::v},          {"out", &Call::out, &Attention::out},
    {"lse", &Call::lse, &Attention::lse},    {"bias", &Call::bias, &Attention::bias},
    {"mask", &Call::mask, &Attention::mask}, {"block_mask", &Call::block_mask, &Attention::block_mask},
    {"dout", &Call::dout, &Attention::dout}, {"dlse", &Call::dlse, &Attention::dlse},
    {"dq", &Call::dq, &Attention::dq},       {"dk", &Call::dk, &Attention::dk},
    {"dv", &Call::dv, &Attention::dv},       {"dbias", &Call::dbias, &Attention::dbias}};
constexpr std::array<Array Call::*, 7> results{&Call::out, &Call::lse,   &Call::dq,    &Call::dk,
                                               &Call::dv,  &Call::dbias, &Call::dsinks};

Spec spec_with_everything(DType dtype) {
  Spec spec{.seed = test_rng().bits(), .dtype = dtype, .batch = 2, .heads_kv = 2, .group = 2};
  spec.seqlen_q = 3;
  spec.seqlen_k = 20;
  spec.causal = Causal::bottom_right;
  spec.bias.present = spec.mask.present = spec.blocks.present = true;
  spec.bias.full = spec.mask.full = {true, true, true, true};
  spec.bias.of_input_dtype = true;
  spec.mask.hidden = 0.2;
  spec.blocks.full = {true, true};
  spec.blocks.block_q = 2;
  spec.blocks.block_k = 7;
  spec.blocks.hidden = 0.2;
  spec.dbias = spec.dlse = true;
  return spec;
}

// Each dimension of each tensor in turn steps by more than 2^31 elements; the bits stay.
class LargeStrides : public ::testing::TestWithParam<DType> {};

TEST_P(LargeStrides, OfEveryTensorAndDimension) {
  const Spec spec = spec_with_everything(GetParam());
  Call call = make_call(spec);
  const Outcome outcome = run(call, Backend::cpu);
  ASSERT_EQ(outcome.failure, "");
  std::vector<std::vector<std::byte>> expected;
  for (Array Call::*result : results) expected.push_back((call.*result).bytes());

  constexpr std::int64_t far = (std::int64_t{1} << 31) + 12345;
  for (const Place& place : places) {
    const Array& array = call.*place.array;
    const Shape shape = array.shape();
    const bool vectors = place.array != &Call::lse && place.array != &Call::dlse && place.array != &Call::bias &&
                         place.array != &Call::mask && place.array != &Call::block_mask && place.array != &Call::dbias;
    for (std::size_t dim = 0; dim < shape.size() - (vectors ? 1 : 0); ++dim) {
      SCOPED_TRACE(testing::Message() << place.name << " dimension " << dim);
      std::vector<std::int64_t> strides(shape.size());
      std::int64_t next = 1;
      for (std::size_t i = shape.size(); i-- > 0;) {
        strides[i] = i == dim ? far : next;
        if (i != dim) next *= shape[i];
      }
      ASSERT_LT(next, far);
      const SparseTensor sparse(array, strides);
      if (!sparse.valid()) GTEST_SKIP() << "the system does not map " << far * shape[dim] * 8 << " bytes";
      Attention attention = call.attention(Backend::cpu);
      attention.*place.tensor = sparse.view();
      for (Array Call::*result : results)
        if ((call.*result).present()) (call.*result).poison(0xFF);
      forward(attention);
      backward(attention);
      for (std::size_t n = 0; n < results.size(); ++n) {
        const bool moved = place.array == results[n];
        EXPECT_TRUE((moved ? sparse.bits() : (call.*results[n]).bytes()) == expected[n]) << "result " << n;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Inputs, LargeStrides, ::testing::Values(DType::float32, DType::bfloat16, DType::float64),
                         [](const auto& test) { return name_of(test.param); });

TEST(LargeCache, BatchStrideOf2To30_LeavesOtherEntriesAlone) {
  // One buffer of float16 for five batch entries, each 2^30 elements behind the one before.
  Spec spec{.seed = test_rng().bits(), .dtype = DType::float16, .batch = 5, .heads_kv = 2};
  spec.seqlen_q = 3;
  spec.seqlen_k = 40;
  Call call = make_call(spec);
  const Outcome outcome = run(call, Backend::cpu);
  ASSERT_EQ(outcome.failure, "");
  const std::int64_t stride = std::int64_t{1} << 30;
  const std::vector<std::int64_t> strides{stride, 2 * 16, 16, 1};
  const SparseTensor k(call.k, strides), v(call.v, strides), dk(call.dk, strides), dv(call.dv, strides);
  if (!k.valid() || !v.valid() || !dk.valid() || !dv.valid()) GTEST_SKIP() << "the system does not map 10 GiB";
  Attention attention = call.attention(Backend::cpu);
  attention.k = k.view(), attention.v = v.view(), attention.dk = dk.view(), attention.dv = dv.view();
  forward(attention);
  backward(attention);
  EXPECT_EQ(call.out.values(), outcome.results.out);
  EXPECT_EQ(call.dq.values(), outcome.results.dq);
  EXPECT_TRUE(dk.bits() == call.dk.bytes());
  EXPECT_TRUE(dv.bits() == call.dv.bytes());
  // The row behind the last token of each entry is still zero.
  for (const SparseTensor* tensor : {&dk, &dv})
    for (std::int64_t b = 0; b < 5; ++b) {
      if (b == 4) continue;  // the mapping ends with its tokens
      const auto* row = static_cast<const std::uint16_t*>(tensor->view().data) + b * stride + 40 * 2 * 16;
      for (int n = 0; n < 16; ++n) EXPECT_EQ(row[n], 0);
    }
}

// A mask of more than 2^32 bytes shows one key to some rows and none to the others.
TEST(LargeMask, HeavyMoreThan2To32Pairs) {
  if (!run_is_full()) GTEST_SKIP() << "HEADRACE_TEST_SCALE asks for less";
  const std::int64_t seqlen = 65600, dim = 8;
  SparseMapping mapping(seqlen * seqlen);
  if (!mapping.valid()) GTEST_SKIP() << "the system does not map 4 GiB";
  auto* mask = static_cast<std::uint8_t*>(mapping.data());
  Rng rng = test_rng();
  std::vector<std::int64_t> key(static_cast<std::size_t>(seqlen), -1);
  for (std::int64_t i = seqlen % 97; i < seqlen; i += 97) {
    key[static_cast<std::size_t>(i)] = rng.integer(0, seqlen - 1);
    mask[i * seqlen + key[static_cast<std::size_t>(i)]] = 1;
  }
  const auto elements = static_cast<std::size_t>(seqlen * dim);
  std::vector<float> q(elements, 0.0f), k(elements, 0.0f), v(elements), out(elements, 7.0f);
  for (float& x : v) x = static_cast<float>(rng.normal());
  const Shape shape{1, seqlen, 1, dim};
  forward({.q = {q.data(), DType::float32, shape},
           .k = {k.data(), DType::float32, shape},
           .v = {v.data(), DType::float32, shape},
           .out = {out.data(), DType::float32, shape},
           .mask = {mask, DType::boolean, {1, 1, seqlen, seqlen}},
           .backend = Backend::cpu});
  for (std::int64_t i = 0; i < seqlen; ++i) {
    const std::int64_t j = key[static_cast<std::size_t>(i)];
    for (std::int64_t c = 0; c < dim; ++c)
      ASSERT_EQ(out[static_cast<std::size_t>(i * dim + c)], j < 0 ? 0.0f : v[static_cast<std::size_t>(j * dim + c)])
          << "row " << i << " sees key " << j;
  }
}

// ---- memory of long sequences ----

// One head of float32 with head_dim 64 and its gradients, on two threads; no memory is touched.
Attention long_call(std::int64_t seqlen) {
  const auto tensor = [](std::initializer_list<std::int64_t> shape) {
    return Tensor(static_cast<const void*>(nullptr), DType::float32, shape);
  };
  Attention attention;
  for (Tensor Attention::*member : {&Attention::q, &Attention::k, &Attention::v, &Attention::out, &Attention::dout,
                                    &Attention::dq, &Attention::dk, &Attention::dv})
    attention.*member = tensor({1, seqlen, 1, 64});
  attention.lse = tensor({1, 1, seqlen});
  attention.threads = 2;
  attention.backend = Backend::cpu;
  return attention;
}

constexpr std::size_t mebibyte = std::size_t{1} << 20;

TEST(Memory, WorkspaceOf64kTokensIsSmall) {
  for (const bool causal : {false, true}) {
    Attention attention = long_call(65536);
    attention.causal = causal ? Causal::bottom_right : Causal::none;
    EXPECT_LE(Plan(attention, Pass::forward).workspace_bytes(), 32 * mebibyte);
    EXPECT_LE(Plan(attention, Pass::backward).workspace_bytes(), 64 * mebibyte);
  }
}

TEST(Memory, WorkspaceGrowsAtMostLinearly) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::size_t at_64k = Plan(long_call(65536), pass).workspace_bytes();
    const std::size_t at_1m = Plan(long_call(1 << 20), pass).workspace_bytes();
    EXPECT_LE(at_1m, 16 * at_64k + mebibyte);
  }
}

// Bytes of a line such as "VmHWM:  123 kB" of /proc/self/status; 0 if there is none.
std::size_t status_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind(name + ":", 0) == 0) return std::stoul(line.substr(name.size() + 1)) * 1024;
  return 0;
}

// The growth of the peak of resident memory while `work` runs; false if the system does not tell.
template <typename Work>
bool measure_peak(Work&& work, std::size_t& growth) {
  std::ofstream reset("/proc/self/clear_refs");
  if (!(reset << 5 << std::flush)) return false;
  const std::size_t before = status_bytes("VmHWM");
  if (before == 0) return false;
  work();
  growth = status_bytes("VmHWM") - before;
  return true;
}

void expect_peak(std::int64_t seqlen, bool with_backward, std::size_t forward_limit, std::size_t backward_limit) {
  // A small scale may mean a sanitizer, and those use memory of their own.
  if (!run_is_full()) GTEST_SKIP() << "HEADRACE_TEST_SCALE asks for less";
  Attention attention = long_call(seqlen);
  std::vector<std::vector<float>> memory;
  Rng rng = test_rng();
  const auto allocate = [&](Tensor& tensor, std::int64_t size) {
    memory.emplace_back(static_cast<std::size_t>(size));
    for (float& x : memory.back()) x = static_cast<float>(rng.uniform() - 0.5);
    tensor.data = memory.back().data();
  };
  for (Tensor Attention::*member : {&Attention::q, &Attention::k, &Attention::v, &Attention::out, &Attention::dout,
                                    &Attention::dq, &Attention::dk, &Attention::dv})
    allocate(attention.*member, seqlen * 64);
  allocate(attention.lse, seqlen);

  std::size_t growth = 0;
  if (!measure_peak([&] { forward(attention); }, growth)) GTEST_SKIP() << "/proc does not tell the peak";
  std::printf("forward at %lld: peak memory grows by %.1f MiB\n", static_cast<long long>(seqlen),
              static_cast<double>(growth) / static_cast<double>(mebibyte));
  EXPECT_LE(growth, forward_limit);
  // Row 0 against the definition.
  const auto& q = memory[0];
  const auto& k = memory[1];
  const auto& v = memory[2];
  double sum = 0.0, first = 0.0;
  for (std::int64_t j = 0; j < seqlen; ++j) {
    double s = 0.0;
    for (std::size_t c = 0; c < 64; ++c)
      s += static_cast<double>(q[c]) * static_cast<double>(k[static_cast<std::size_t>(j) * 64 + c]);
    const double p = std::exp(s / 8.0);
    sum += p;
    first += p * static_cast<double>(v[static_cast<std::size_t>(j) * 64]);
  }
  EXPECT_NEAR(static_cast<double>(memory[8][0]), std::log(sum), 1e-5);
  EXPECT_NEAR(static_cast<double>(memory[3][0]), first / sum, 1e-6);

  if (!with_backward) return;
  ASSERT_TRUE(measure_peak([&] { backward(attention); }, growth));
  std::printf("backward at %lld: peak memory grows by %.1f MiB\n", static_cast<long long>(seqlen),
              static_cast<double>(growth) / static_cast<double>(mebibyte));
  EXPECT_LE(growth, backward_limit);
}

TEST(Memory, PeakOfShortCallsIsSmall) { expect_peak(4096, true, 32 * mebibyte, 64 * mebibyte); }

TEST(Memory, HeavyPeakOf64kTokensForward) { expect_peak(65536, false, 32 * mebibyte, 0); }

TEST(Memory, HeavyPeakOf16kTokensBackward) { expect_peak(16384, true, 32 * mebibyte, 64 * mebibyte); }

}  // namespace
}  // namespace headrace::test
