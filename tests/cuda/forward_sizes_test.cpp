// Sizes that overflow what is too narrow: grids beyond 65535, lists of tiles, offsets beyond 2^31 elements.
#include <array>
#include <cstring>

#include "describe/problem.hpp"
#include "on_gpu.hpp"

namespace headrace::test {
namespace {

class ForwardSizes : public OnGpu {};

TEST_F(ForwardSizes, MoreThan65535Heads) {
  struct Size {
    std::int64_t batch, heads, seqlen_q, seqlen_k, dim;
  };
  for (const Size& size : {Size{70000, 1, 1, 1, 16}, Size{8300, 16, 1, 1, 16}, Size{2, 40000, 1, 1, 16},
                           Size{70000, 1, 3, 5, 8}, Size{1, 66000, 5, 3, 8}}) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      Spec spec{.seed = test_rng().bits(), .dtype = DType::bfloat16, .batch = size.batch, .heads_kv = size.heads};
      spec.seqlen_q = size.seqlen_q;
      spec.seqlen_k = size.seqlen_k;
      spec.head_dim = spec.value_dim = size.dim;
      spec.causal = causal;
      Call call = make_call(spec);
      const Outcome outcome = run_on_gpu(call);
      EXPECT_EQ(judge_forward(call, outcome, exact_forward(call, 0)), "") << spec.describe();
      if (size.seqlen_q == 1) {
        EXPECT_EQ(outcome.results.out, call.v.values()) << spec.describe();
      }
    }
  }
}

// Many tiles for every block of threads, some of them done again: a tenth of the heads has rows with a score that only
// the second pass can take. All batch entries are one in memory, but for out, so that one of them need be known.
class ManyTiles : public ForwardSizes {
 protected:
  static void expect_copies(Spec spec, std::int64_t copies) {
    spec.scale = 1.0;
    Call call = make_call(spec);
    std::vector<double> q = call.q.values(), k = call.k.values();
    for (std::vector<double>* values : {&q, &k})
      for (double& x : *values) x *= 0.3;
    const auto d = static_cast<std::size_t>(spec.head_dim), heads = static_cast<std::size_t>(spec.heads_q());
    for (std::size_t n = 0; n < q.size() / d; ++n) q[n * d] = n % heads % 10 == 1 && n / heads % 20 == 0 ? 1.0 : 0.0;
    for (std::size_t j = 0; j < k.size() / d; ++j) k[j * d] = j == 5 ? 500.0 : 0.0;
    call.q.fill(q);
    call.k.fill(k);
    const Results exact = exact_forward(call, 0);
    const Results bounds = error_bounds(DenseCall(call), exact, spec.dtype, DType::float32, DType::float32);

    const ContextScope scope(0);
    const GpuStream stream;
    const GpuCall small(call, stream.get());
    small.upload();
    const std::size_t elements = exact.out.size(), entry = 2 * elements;
    const auto count = static_cast<std::size_t>(copies);
    const GpuMemory out(count * entry);
    check(driver().cuMemsetD8Async(out.address(), 0xFF, count * entry, stream.get()), "cuMemsetD8Async");
    Attention attention = small.attention();
    attention.lse = Tensor();
    for (Tensor* tensor : {&attention.q, &attention.k, &attention.v}) {
      tensor->shape[0] = copies;
      tensor->stride[0] = 0;
    }
    attention.out = Tensor(reinterpret_cast<void*>(out.address()), spec.dtype,
                           {copies, spec.seqlen_q, spec.heads_q(), spec.value_dim});
    forward(attention);
    std::vector<std::byte> bits(count * entry);
    check(driver().cuMemcpyDtoHAsync(bits.data(), out.address(), bits.size(), stream.get()), "cuMemcpyDtoHAsync");
    stream.synchronize(spec.describe());
    int failures = 0;
    Results got = exact;
    for (std::size_t b = 0; b < count && failures < 3; ++b) {
      for (std::size_t n = 0; n < elements; ++n) got.out[n] = decode(spec.dtype, bits.data() + b * entry + 2 * n);
      const std::string wrong = differences(call, got, exact, bounds);
      if (wrong.empty()) continue;
      ++failures;
      ADD_FAILURE() << "entry " << b << " of " << copies << " that are all this: " << spec.describe() << '\n' << wrong;
    }
  }
};

TEST_F(ManyTiles, SomeAreDoneAgain) {
  for (const auto& [head_dim, value_dim] : {std::pair(64, 64), {96, 96}, {128, 128}, {192, 128}, {256, 256}}) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      Spec spec{.seed = test_rng().bits(), .dtype = causal == Causal::none ? DType::bfloat16 : DType::float16};
      spec.group = 3;
      spec.seqlen_q = 330;
      spec.seqlen_k = 500;
      spec.head_dim = head_dim;
      spec.value_dim = value_dim;
      spec.causal = causal;
      expect_copies(spec, 150);
    }
  }
}

// So many that one bit of the kernel's list of tiles to be done again stands for several.
TEST_F(ManyTiles, MoreThanTheListHasBits) {
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      Spec spec{.seed = test_rng().bits(), .dtype = dtype, .group = 100};
      spec.seqlen_q = 1;
      spec.seqlen_k = 700;
      spec.head_dim = spec.value_dim = 64;
      spec.causal = causal;
      expect_copies(spec, 3000);
    }
  }
}

// An Array on the device with its elements more than 2^31 apart: one dimension has a very large stride, the others are
// packed. The memory between them is NaN.
class SpreadTensor {
 public:
  // The large stride is a multiple of 8 elements, and `remainder` more.
  SpreadTensor(Array& array, int spread, int remainder = 0)
      : array_(array), view_(array.view()), bytes_(place(spread, remainder)), memory_(bytes_) {
    view_.data = reinterpret_cast<void*>(memory_.address());
    check(driver().cuMemsetD8Async(memory_.address(), 0xFF, bytes_, nullptr), "cuMemsetD8Async");
    check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  }

  [[nodiscard]] Tensor view() const { return view_; }

  void scatter() const {
    const std::vector<std::byte> bits = array_.bytes();
    std::size_t at = 0;
    for_each_run([&](CUdeviceptr address, std::size_t size) {
      check(driver().cuMemcpyHtoD(address, bits.data() + at, size), "cuMemcpyHtoD");
      at += size;
    });
    check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  }

  void gather() {
    std::vector<std::byte> bits;
    for_each_run([&](CUdeviceptr address, std::size_t size) {
      bits.resize(bits.size() + size);
      check(driver().cuMemcpyDtoH(bits.data() + bits.size() - size, address, size), "cuMemcpyDtoH");
    });
    std::vector<double> values;
    const auto size = static_cast<std::size_t>(size_of(array_.dtype()));
    for (std::size_t n = 0; n < bits.size(); n += size) values.push_back(decode(array_.dtype(), bits.data() + n));
    array_.fill(values);
  }

 private:
  // Sets the strides and returns the size of the memory.
  std::size_t place(int spread, int remainder) {
    std::int64_t next = 1, last = 0;
    for (int i = view_.ndim - 1; i >= 0; --i) {
      if (i == spread) continue;
      view_.stride[i] = next;
      last += (view_.shape[i] - 1) * next;
      next *= view_.shape[i];
    }
    constexpr std::int64_t beyond = (std::int64_t{1} << 31) + 1;
    view_.stride[spread] = (beyond / (view_.shape[spread] - 1) + 8) / 8 * 8 + remainder;
    last += (view_.shape[spread] - 1) * view_.stride[spread];
    return static_cast<std::size_t>((last + 1) * size_of(array_.dtype()));
  }

  // The contiguous pieces, row-major.
  template <typename F>
  void for_each_run(F&& visit) const {
    const int n = view_.ndim;
    const bool whole_rows = view_.stride[n - 1] == 1;
    std::array<std::int64_t, 4> shape{1, 1, 1, 1}, stride{};
    for (int i = 0; i < n; ++i) {
      shape[static_cast<std::size_t>(4 - n + i)] = view_.shape[i];
      stride[static_cast<std::size_t>(4 - n + i)] = view_.stride[i];
    }
    const std::int64_t run = whole_rows ? shape[3] : 1, size = size_of(array_.dtype());
    for (std::int64_t a = 0; a < shape[0]; ++a)
      for (std::int64_t b = 0; b < shape[1]; ++b)
        for (std::int64_t c = 0; c < shape[2]; ++c)
          for (std::int64_t d = 0; d < shape[3]; d += run) {
            const std::int64_t at = a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3];
            visit(memory_.address() + static_cast<CUdeviceptr>(at * size), static_cast<std::size_t>(run * size));
          }
  }

  Array& array_;
  Tensor view_;
  std::size_t bytes_;
  GpuMemory memory_;
};

Spec spec_of_spread(std::uint64_t seed) {
  Spec spec{.seed = seed, .dtype = DType::bfloat16, .batch = 2, .heads_kv = 2};
  spec.seqlen_q = 70;
  spec.seqlen_k = 150;
  spec.head_dim = spec.value_dim = 64;
  return spec;
}

std::string judge_spread(Call& call, Attention& attention, const GpuStream& stream, SpreadTensor* out,
                         SpreadTensor* lse, GpuCall& on_gpu) {
  attention.stream = stream.get();
  forward(attention);
  stream.synchronize(call.spec.describe());
  Outcome outcome;
  if (out != nullptr) {
    out->gather();
    lse->gather();
  } else {
    outcome.failure = on_gpu.download();
  }
  outcome.results.out = call.out.values();
  outcome.results.lse = call.lse.values();
  return judge_forward(call, outcome, exact_forward(call, 0));
}

bool out_of_memory(const std::exception& error) {
  return std::strstr(error.what(), "cuMemAlloc failed: CUDA error 2 ") != nullptr;
}

// q, k, v, out and lse, 4 to 8 GiB each.
TEST_F(ForwardSizes, OffsetsBeyondTwoToThe31) {
  const ContextScope scope(0);
  const GpuStream stream;
  // batch, row, head; and strides that TMA cannot walk
  for (const auto& [dimension, remainder] : {std::pair{0, 0}, {1, 0}, {2, 0}, {0, 3}, {1, 3}, {2, 3}}) {
    Spec spec = spec_of_spread(test_rng().bits());
    spec.causal = Causal::bottom_right;
    Call call = make_call(spec);
    try {
      GpuCall on_gpu(call, stream.get());
      SpreadTensor q(call.q, dimension, remainder), k(call.k, dimension, remainder), v(call.v, dimension, remainder);
      SpreadTensor out(call.out, dimension);
      SpreadTensor lse(call.lse, dimension);
      for (const SpreadTensor* input : {&q, &k, &v}) input->scatter();
      Attention attention = on_gpu.attention();
      attention.q = q.view(), attention.k = k.view(), attention.v = v.view();
      attention.out = out.view(), attention.lse = lse.view();
      EXPECT_EQ(judge_spread(call, attention, stream, &out, &lse, on_gpu), "")
          << "dimension " << dimension << " has the large stride, odd by " << remainder << ": " << spec.describe();
    } catch (const Failure& error) {
      if (!out_of_memory(error)) throw;
      GTEST_SKIP() << error.what();
    }
  }
}

// bias and mask, each dimension in turn.
TEST_F(ForwardSizes, OffsetsBeyondTwoToThe31_OfBiasAndMask) {
  const ContextScope scope(0);
  const GpuStream stream;
  for (const int dimension : {0, 1, 2, 3}) {
    Spec spec = spec_of_spread(test_rng().bits());
    spec.bias.present = spec.mask.present = true;
    spec.bias.full = spec.mask.full = {true, true, true, true};
    spec.bias.of_input_dtype = true;
    spec.bias.hidden = spec.mask.hidden = 0.3;
    Call call = make_call(spec);
    try {
      GpuCall on_gpu(call, stream.get());
      on_gpu.upload();
      const SpreadTensor bias(call.bias, dimension), mask(call.mask, dimension);
      bias.scatter();
      mask.scatter();
      Attention attention = on_gpu.attention();
      attention.bias = bias.view(), attention.mask = mask.view();
      EXPECT_EQ(judge_spread(call, attention, stream, nullptr, nullptr, on_gpu), "")
          << "dimension " << dimension << " has the large stride: " << spec.describe();
    } catch (const Failure& error) {
      if (!out_of_memory(error)) throw;
      GTEST_SKIP() << error.what();
    }
  }
}

// A boolean mask of more than 2^32 bytes: every row sees one key, whose value is the result.
TEST_F(ForwardSizes, AMaskOfMoreThanTwoToThe32Bytes) {
  constexpr std::int64_t seqlen = 66000, dim = 8;
  Spec spec{.seed = test_rng().bits(), .dtype = DType::bfloat16};
  spec.seqlen_q = spec.seqlen_k = seqlen;
  spec.head_dim = spec.value_dim = dim;
  Call call = make_call(spec);
  const ContextScope scope(0);
  const GpuStream stream;
  try {
    constexpr auto bytes = static_cast<std::size_t>(seqlen * seqlen);
    const GpuMemory mask(bytes);
    check(driver().cuMemsetD8Async(mask.address(), 0, bytes, stream.get()), "cuMemsetD8Async");
    Rng rng(spec.seed);
    std::vector<std::int64_t> keys;
    for (std::int64_t i = 0; i < seqlen; ++i) {
      keys.push_back(i % 1000 == 0 ? seqlen - 1 : rng.integer(0, seqlen - 1));
      check(driver().cuMemsetD8Async(mask.address() + static_cast<CUdeviceptr>(i * seqlen + keys.back()), 1, 1,
                                     stream.get()),
            "cuMemsetD8Async");
    }
    GpuCall on_gpu(call, stream.get());
    on_gpu.upload();
    Attention attention = on_gpu.attention();
    attention.mask = Tensor(reinterpret_cast<void*>(mask.address()), DType::boolean, {1, 1, seqlen, seqlen});
    forward(attention);
    stream.synchronize(spec.describe());
    EXPECT_EQ(on_gpu.download(), "");
    const std::vector<double> out = call.out.values(), v = call.v.values();
    std::size_t wrong = 0;
    for (std::size_t n = 0; n < out.size(); ++n) {
      const auto row = n / dim, key = static_cast<std::size_t>(keys[row]);
      if (out[n] == v[key * dim + n % dim]) continue;
      if (wrong++ == 0) ADD_FAILURE() << "row " << row << " sees key " << key << " and is " << out[n];
    }
    EXPECT_EQ(wrong, 0u);
  } catch (const Failure& error) {
    if (!out_of_memory(error)) throw;
    GTEST_SKIP() << error.what();
  }
}

// Dimensions without entries launch nothing and leave no error behind.
TEST_F(ForwardSizes, NothingToDo) {
  std::vector<Spec> variants(2, spec_of_spread(1));
  variants[1].dtype = DType::float16;
  variants[0].sinks = variants[1].sinks = Sinks::normal;
  load_variants(variants);
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    for (const bool sinks : {false, true}) {
      for (int empty = 0; empty < 4; ++empty) {
        Spec spec = spec_of_spread(test_rng().bits());
        spec.dtype = dtype;
        if (sinks) spec.sinks = Sinks::normal;
        if (empty == 0) spec.batch = 0;
        if (empty == 1) spec.heads_kv = 0;
        if (empty == 2) spec.seqlen_q = 0;
        if (empty == 3) spec.seqlen_k = 0;  // out 0, lse -inf or the sink
        EXPECT_EQ(check_on_gpu(spec), "") << spec.describe();
      }
      EXPECT_EQ(check_on_gpu(spec_of_spread(test_rng().bits())), "");
    }
  }
}

}  // namespace
}  // namespace headrace::test
