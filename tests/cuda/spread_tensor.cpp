#include "spread_tensor.hpp"

#include <array>
#include <cstring>

#include "describe/problem.hpp"

namespace headrace::test {

Spec spec_of_spread(std::uint64_t seed) {
  Spec spec{.seed = seed, .dtype = DType::bfloat16, .batch = 2, .heads_kv = 2};
  spec.seqlen_q = 70;
  spec.seqlen_k = 150;
  spec.head_dim = spec.value_dim = 64;
  return spec;
}

Spec spec_of_spread_with_bias_and_mask(std::uint64_t seed) {
  Spec spec = spec_of_spread(seed);
  spec.bias.present = spec.mask.present = true;
  spec.bias.full = spec.mask.full = {true, true, true, true};
  spec.bias.hidden = spec.mask.hidden = 0.3;
  return spec;
}

std::string lack_of_memory(const std::function<void()>& work) {
  try {
    work();
  } catch (const Failure& error) {
    if (std::strstr(error.what(), "cuMemAlloc failed: CUDA error 2 ") == nullptr) throw;
    return error.what();
  }
  return "";
}

SpreadTensor::SpreadTensor(Array& array, int spread, int remainder)
    : array_(array), view_(array.view()), bytes_(place(spread, remainder)), memory_(bytes_) {
  view_.data = reinterpret_cast<void*>(memory_.address());
  check(driver().cuMemsetD8Async(memory_.address(), 0xFF, bytes_, nullptr), "cuMemsetD8Async");
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

template <typename F>
void SpreadTensor::for_each_run(F&& visit) const {
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

void SpreadTensor::scatter() const {
  const std::vector<std::byte> bits = array_.bytes();
  std::size_t at = 0;
  for_each_run([&](CUdeviceptr address, std::size_t size) {
    check(driver().cuMemcpyHtoD(address, bits.data() + at, size), "cuMemcpyHtoD");
    at += size;
  });
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

void SpreadTensor::gather() {
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

std::size_t SpreadTensor::place(int spread, int remainder) {
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

OneKeyMask::OneKeyMask(std::int64_t seqlen, std::uint64_t seed)
    : seqlen_(seqlen), memory_(static_cast<std::size_t>(seqlen * seqlen)) {
  check(driver().cuMemsetD8Async(memory_.address(), 0, static_cast<std::size_t>(seqlen * seqlen), nullptr),
        "cuMemsetD8Async");
  Rng rng(seed);
  for (std::int64_t i = 0; i < seqlen; ++i) {
    const std::int64_t key = i % 1000 == 0 ? seqlen - 1 : rng.integer(0, seqlen - 1);
    keys_.push_back(static_cast<std::size_t>(key));
    check(driver().cuMemsetD8Async(memory_.address() + static_cast<CUdeviceptr>(i * seqlen + key), 1, 1, nullptr),
          "cuMemsetD8Async");
  }
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
}

Tensor OneKeyMask::view() const {
  return {reinterpret_cast<void*>(memory_.address()), DType::boolean, {1, 1, seqlen_, seqlen_}};
}

}  // namespace headrace::test
