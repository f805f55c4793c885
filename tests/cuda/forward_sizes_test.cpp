// Sizes that overflow what is too narrow: grids beyond 65535, lists of tiles, offsets beyond 2^31 elements.
#include "on_gpu.hpp"
#include "spread_tensor.hpp"

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
      EXPECT_EQ(judge(call, outcome, exact_on_cpu(call, 0)), "") << spec.describe();
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
    const Results exact = exact_on_cpu(call, 0);
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
  return judge(call, outcome, exact_on_cpu(call, 0));
}

// q, k, v, out and lse, 4 to 8 GiB each.
TEST_F(ForwardSizes, OffsetsBeyondTwoToThe31) {
  const ContextScope scope(0);
  const GpuStream stream;
  // batch, row, head; and strides that TMA cannot walk
  for (const auto& [large, odd] : {std::pair{0, 0}, {1, 0}, {2, 0}, {0, 3}, {1, 3}, {2, 3}}) {
    const int dimension = large, remainder = odd;
    Spec spec = spec_of_spread(test_rng().bits());
    spec.causal = Causal::bottom_right;
    Call call = make_call(spec);
    const std::string lacking = lack_of_memory([&] {
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
    });
    if (!lacking.empty()) GTEST_SKIP() << lacking;
  }
}

// bias and mask, each dimension in turn.
TEST_F(ForwardSizes, OffsetsBeyondTwoToThe31_OfBiasAndMask) {
  const ContextScope scope(0);
  const GpuStream stream;
  for (const int dimension : {0, 1, 2, 3}) {
    Spec spec = spec_of_spread_with_bias_and_mask(test_rng().bits());
    spec.bias.of_input_dtype = true;
    Call call = make_call(spec);
    const std::string lacking = lack_of_memory([&] {
      GpuCall on_gpu(call, stream.get());
      on_gpu.upload();
      const SpreadTensor bias(call.bias, dimension), mask(call.mask, dimension);
      bias.scatter();
      mask.scatter();
      Attention attention = on_gpu.attention();
      attention.bias = bias.view(), attention.mask = mask.view();
      EXPECT_EQ(judge_spread(call, attention, stream, nullptr, nullptr, on_gpu), "")
          << "dimension " << dimension << " has the large stride: " << spec.describe();
    });
    if (!lacking.empty()) GTEST_SKIP() << lacking;
  }
}

// A boolean mask of more than 2^32 bytes: every row sees one key, whose value is the result.
TEST_F(ForwardSizes, AMaskOfMoreThanTwoToThe32Bytes) {
  constexpr std::int64_t seqlen = 66000, dim = 8;
  Call call = make_call(dense_spec(DType::bfloat16, seqlen, seqlen, dim));
  const ContextScope scope(0);
  const GpuStream stream;
  const std::string lacking = lack_of_memory([&] {
    const OneKeyMask mask(seqlen, call.spec.seed);
    GpuCall on_gpu(call, stream.get());
    on_gpu.upload();
    Attention attention = on_gpu.attention();
    attention.mask = mask.view();
    forward(attention);
    stream.synchronize(call.spec.describe());
    EXPECT_EQ(on_gpu.download(), "");
    const std::vector<double> out = call.out.values(), v = call.v.values();
    std::size_t wrong = 0;
    for (std::size_t n = 0; n < out.size(); ++n) {
      const std::size_t row = n / dim, key = mask.keys()[row];
      if (out[n] == v[key * dim + n % dim]) continue;
      if (wrong++ == 0) ADD_FAILURE() << "row " << row << " sees key " << key << " and is " << out[n];
    }
    EXPECT_EQ(wrong, 0u);
  });
  if (!lacking.empty()) GTEST_SKIP() << lacking;
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
