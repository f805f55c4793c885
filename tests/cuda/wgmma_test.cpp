// The instructions under the kernels, one by one: a plain product through every shape of wgmma, with both operands'
// ways into it, and the arithmetic of ptx/math.cuh.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <set>

#include "cuda/driver/module_cache.hpp"
#include "cuda/launch/tensor_map.hpp"
#include "describe/element.hpp"
#include "describe/problem.hpp"
#include "on_gpu.hpp"
#include "test_kernels.hpp"

namespace headrace::test {
namespace {

using cuda::KernelSource;
using cuda::RowsOfHeads;

struct Product {
  bool float16;
  int n;
  bool left_in_registers, trans_b;

  [[nodiscard]] KernelSource source() const {
    return {"gemm",
            "test/gemm.cuh",
            {{"FLOAT16", float16}, {"WIDTH", n}, {"LEFT_IN_REGISTERS", left_in_registers}, {"TRANS_B", trans_b}}};
  }
  [[nodiscard]] hr_dtype dtype() const { return float16 ? HR_FLOAT16 : HR_BFLOAT16; }
};

// The widths that scripts/generate_wgmma.py has written.
std::set<int> widths() {
  std::set<int> found;
  const KernelSource any = Product{false, 64, false, false}.source();
  for (const cuda::SourceFile& file : cuda::sources_of(any)) {
    constexpr std::string_view declaration = "struct Wgmma<";
    if (file.name != "ptx/wgmma_shapes.cuh") continue;
    for (std::size_t at = 0; (at = file.text.find(declaration, at)) != std::string_view::npos;) {
      at += declaration.size();
      found.insert(std::atoi(std::string(file.text.substr(at, 3)).c_str()));
    }
  }
  return found;
}

std::vector<Product> products() {
  std::vector<Product> all;
  for (const int n : widths())
    for (const bool float16 : {false, true})
      for (const bool left_in_registers : {false, true})
        for (const bool trans_b : {false, true}) all.push_back({float16, n, left_in_registers, trans_b});
  return all;
}

// One compilation shows what several would, but for the type: of each width all four forms.
TEST(Wgmma, EveryShapeCompiles) {
  HEADRACE_NEEDS_NVRTC();
  EXPECT_THAT(widths(), testing::IsSupersetOf({64, 80, 96, 128, 256})) << "what hopper_forward uses";
  const std::vector<Product> all = products();
  std::vector<std::string> errors(all.size());
  in_parallel(all.size(), [&](std::size_t n) {
    if (all[n].float16 && all[n].n != 128) return;
    try {
      const cuda::Compiled compiled = cuda::compile(all[n].source(), "sm_90a", true);
      // "Potential Performance Loss: wgmma.mma_async instructions are serialized due to..."
      if (compiled.log.find("serialized") != std::string::npos) errors[n] = compiled.log;
    } catch (const std::exception& error) {
      errors[n] = error.what();
    }
  });
  for (std::size_t n = 0; n < all.size(); ++n) EXPECT_EQ(errors[n], "") << name_of(all[n].source());
}

// A row-major matrix of small integers: all sums are exact in every type.
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t columns, hr_dtype dtype, Rng& rng)
      : rows_(rows), columns_(columns), dtype_(dtype), memory_(static_cast<std::size_t>(rows * columns) * 2) {
    std::vector<std::uint16_t> elements;
    for (std::int64_t n = 0; n < rows * columns; ++n) {
      values_.push_back(static_cast<double>(rng.integer(-4, 4)));
      store_element(&elements.emplace_back(), dtype, 0, values_.back());
    }
    check(driver().cuMemcpyHtoD(memory_.address(), elements.data(), 2 * elements.size()), "cuMemcpyHtoD");
  }
  [[nodiscard]] double at(std::int64_t row, std::int64_t column) const {
    return row < rows_ && column < columns_ ? values_[static_cast<std::size_t>(row * columns_ + column)] : 0.0;
  }
  [[nodiscard]] cuda::CUtensorMap map(int box_rows) const {
    const RowsOfHeads whole{1, rows_, 1, columns_, {rows_ * columns_, columns_, columns_}};
    EXPECT_EQ(cuda::tma_obstacle(whole, dtype_), "");
    return cuda::make_tensor_map(whole, dtype_, reinterpret_cast<void*>(memory_.address()), box_rows);
  }

 private:
  std::int64_t rows_, columns_;
  hr_dtype dtype_;
  std::vector<double> values_;
  GpuMemory memory_;
};

void launch(const KernelSource& source, const GpuStream& stream, unsigned blocks, unsigned threads, void** arguments) {
  const cuda::LoadedKernel& kernel = cuda::load_kernel(source);
  const cuda::CUlaunchConfig config{.gridDimX = blocks,
                                    .gridDimY = 1,
                                    .gridDimZ = 1,
                                    .blockDimX = threads,
                                    .blockDimY = 1,
                                    .blockDimZ = 1,
                                    .sharedMemBytes = static_cast<unsigned>(kernel.dynamic_shared),
                                    .hStream = stream.get(),
                                    .attrs = nullptr,
                                    .numAttrs = 0};
  check(driver().cuLaunchKernelEx(&config, kernel.function, arguments, nullptr), "cuLaunchKernelEx");
  stream.synchronize(name_of(source));
}

template <typename T>
std::vector<T> read(const GpuMemory& memory, std::size_t count) {
  std::vector<T> values(count);
  check(driver().cuMemcpyDtoH(values.data(), memory.address(), count * sizeof(T)), "cuMemcpyDtoH");
  return values;
}

// What is wrong with the product, or "". K is no multiple of a chunk and A has fewer rows than the tile: TMA fills up
// with zeros.
std::string judge(const Product& p, Rng& rng) {
  constexpr std::int64_t rows = 125, k = 600, tile_rows = 128;
  const std::int64_t n = p.n;
  const GpuStream stream;
  const Matrix left(rows, k, p.dtype(), rng);
  const Matrix right(p.trans_b ? k : n, p.trans_b ? n : k, p.dtype(), rng);
  int chunks = (k + 127) / 128;
  const auto results = static_cast<std::size_t>(tile_rows * n), turns = static_cast<std::size_t>(2 * chunks);
  const GpuMemory out(4 * results), rounded(2 * results), order(4 * turns);
  check(driver().cuMemsetD8Async(out.address(), 0xFF, 4 * results, stream.get()), "cuMemsetD8Async");
  check(driver().cuMemsetD8Async(rounded.address(), 0xFF, 2 * results, stream.get()), "cuMemsetD8Async");
  check(driver().cuMemsetD8Async(order.address(), 0xFF, 4 * turns, stream.get()), "cuMemsetD8Async");
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  cuda::CUtensorMap left_map = left.map(64), right_map = right.map(p.trans_b ? 128 : p.n);
  cuda::CUtensorMap rounded_map = cuda::make_tensor_map({1, rows, 1, n, {rows * n, n, n}}, p.dtype(),
                                                        reinterpret_cast<void*>(rounded.address()), 16);
  CUdeviceptr out_address = out.address(), order_address = order.address();
  void* arguments[] = {&left_map, &right_map, &rounded_map, &out_address, &order_address, &chunks};
  launch(p.source(), stream, 1, 384, arguments);
  const std::vector<int> taken = read<int>(order, turns);
  for (std::size_t turn = 0; turn < turns; ++turn)
    if (taken[turn] != static_cast<int>(turn % 2))
      return "turn " + std::to_string(turn) + " was warpgroup " + std::to_string(taken[turn]) + "'s";
  const auto got = read<float>(out, results);
  const auto got_rounded = read<std::uint16_t>(rounded, results);
  for (std::int64_t row = 0; row < tile_rows; ++row)
    for (std::int64_t column = 0; column < n; ++column) {
      double exact = 0.0;
      for (std::int64_t i = 0; i < k; ++i)
        exact += left.at(row, i) * (p.trans_b ? right.at(i, column) : right.at(column, i));
      const auto value = static_cast<double>(got[static_cast<std::size_t>(row * n + column)]);
      if (value != exact)
        return "element (" + std::to_string(row) + ", " + std::to_string(column) + ") is " + std::to_string(value) +
               ", not " + std::to_string(exact);
      std::uint16_t bits = 0xFFFF;  // behind the last row nothing is written
      if (row < rows) store_element(&bits, p.dtype(), 0, exact);
      if (got_rounded[static_cast<std::size_t>(row * n + column)] != bits)
        return "element (" + std::to_string(row) + ", " + std::to_string(column) + "), " + std::to_string(exact) +
               ", is stored as other bits";
    }
  return "";
}

class WgmmaOnGpu : public OnGpu {};

TEST_F(WgmmaOnGpu, EveryShapeMultiplies) {
  HEADRACE_NEEDS_NVRTC();
  const std::vector<Product> all = products();
  in_parallel(all.size(), [&](std::size_t n) {
    try {
      const ContextScope scope(0);
      load_kernel(all[n].source());
    } catch (const std::exception&) {
      return;  // reported below
    }
  });
  const ContextScope scope(0);
  Rng rng = test_rng();
  for (const Product& product : all) EXPECT_EQ(judge(product, rng), "") << name_of(product.source());
}

class ArithmeticOnGpu : public OnGpu {};

std::uint16_t half_of(unsigned pair, int which) { return static_cast<std::uint16_t>(pair >> (16 * which)); }

TEST_F(ArithmeticOnGpu, IsRoundedAsTheKernelsRelyOn) {
  HEADRACE_NEEDS_NVRTC();
  const ContextScope scope(0);
  const GpuStream stream;
  Rng rng = test_rng();
  constexpr float inf = std::numeric_limits<float>::infinity();
  std::vector<float> x = {0.0f, -0.0f, 1.0f, -1.0f, inf, -inf, 200.0f, -200.0f, 65519.0f, 65520.0f};
  std::vector<float> y = {1.0f, 2.0f, 0.0f, inf, 0.5f, 1e30f, 1e-30f, 3.0f, 1.0f, 1.0f};
  for (int n = 0; n < 20000; ++n) {
    const double scale = std::exp2(static_cast<double>(rng.integer(-16, 6)));
    x.push_back(static_cast<float>(scale * rng.normal()));
    y.push_back(static_cast<float>(std::abs(scale * rng.normal())) + 1e-30f);
  }
  const std::size_t count = x.size(), bytes = 4 * count;
  const GpuMemory from_x(bytes), from_y(bytes), to_exp2(bytes), to_log2(bytes), to_reciprocal(bytes);
  const GpuMemory to_packed(bytes), to_products(bytes);
  check(driver().cuMemcpyHtoD(from_x.address(), x.data(), bytes), "cuMemcpyHtoD");
  check(driver().cuMemcpyHtoD(from_y.address(), y.data(), bytes), "cuMemcpyHtoD");
  check(driver().cuCtxSynchronize(), "cuCtxSynchronize");
  for (const bool float16 : {false, true}) {
    SCOPED_TRACE(float16 ? "float16" : "bfloat16");
    const hr_dtype dtype = float16 ? HR_FLOAT16 : HR_BFLOAT16;
    CUdeviceptr addresses[] = {from_x.address(),        from_y.address(),    to_exp2.address(),    to_log2.address(),
                               to_reciprocal.address(), to_packed.address(), to_products.address()};
    int elements = static_cast<int>(count);
    void* arguments[] = {&addresses[0], &addresses[1], &addresses[2], &addresses[3],
                         &addresses[4], &addresses[5], &addresses[6], &elements};
    launch({"arithmetic", "test/arithmetic.cuh", {{"FLOAT16", float16}}}, stream,
           static_cast<unsigned>((count + 127) / 128), 128, arguments);
    const auto exp2 = read<float>(to_exp2, count), log2 = read<float>(to_log2, count);
    const auto reciprocal = read<float>(to_reciprocal, count);
    const auto packed = read<unsigned>(to_packed, count), squares = read<unsigned>(to_products, count);
    const auto encoded = [&](double value) {
      std::uint16_t bits = 0;
      store_element(&bits, dtype, 0, value);
      return bits;
    };
    const auto decoded = [&](std::uint16_t bits) { return load_element(&bits, dtype, 0); };
    for (std::size_t i = 0; i < count; ++i) {
      SCOPED_TRACE(testing::Message() << "x " << x[i] << ", y " << y[i]);
      const double power = std::exp2(static_cast<double>(x[i])), logarithm = std::log2(static_cast<double>(y[i]));
      if (power >= 0x1p128)
        ASSERT_EQ(exp2[i], inf);
      else if (power < 0x1p-126)
        ASSERT_EQ(exp2[i], 0.0f);
      else
        ASSERT_NEAR(exp2[i], power, 0x1p-21 * power);
      if (std::isinf(logarithm))
        ASSERT_EQ(log2[i], static_cast<float>(logarithm));
      else
        ASSERT_NEAR(log2[i], logarithm, 0x1p-21 * std::max(1.0, std::abs(logarithm)));
      if (x[i] == 0.0f)
        ASSERT_TRUE(std::isinf(reciprocal[i]));
      else if (std::isinf(x[i]))
        ASSERT_EQ(reciprocal[i], 0.0f);
      else
        ASSERT_NEAR(reciprocal[i] * static_cast<double>(x[i]), 1.0, 0x1p-22);
      const std::uint16_t low = half_of(packed[i], 0), high = half_of(packed[i], 1);
      ASSERT_EQ(low, encoded(static_cast<double>(x[i])));
      ASSERT_EQ(high, encoded(static_cast<double>(y[i])));
      const double factor = decoded(high);
      for (int half = 0; half < 2; ++half) {
        const double product = decoded(half_of(packed[i], half)) * factor;
        if (std::isnan(product)) continue;
        ASSERT_EQ(decoded(half_of(squares[i], half)), decoded(encoded(product)));
      }
    }
  }
}

}  // namespace
}  // namespace headrace::test
