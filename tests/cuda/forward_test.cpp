// Random calls on the GPU against the float64 reference, element by element.
//
//   HEADRACE_TEST_SEED, HEADRACE_TEST_SCALE: see support/random.hpp
//   HEADRACE_TEST_PROBLEM=v:p  runs only this problem of a test; a failure prints its numbers
#include <array>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <sstream>

#include "on_gpu.hpp"
#include "support/standard_attention.hpp"
#include "tiling/tiling.hpp"

namespace headrace::test {
namespace {

constexpr double max_cost = 2.5e7;              // multiply-adds of a problem,
constexpr double max_cost_of_many_tiles = 1e8;  // and of one with more tiles than a GPU has multiprocessors
constexpr std::int64_t tile_dims[5][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};

// What a kernel is compiled for.
struct Variant {
  std::uint64_t number = 0;  // of the generator that drew it
  DType dtype = DType::bfloat16;
  int tile = 0;
  int multiprocessors = 0;  // that the tiles are chosen for: few get large tiles in pairs, many get small ones
  bool banded = false;      // causal or window
  bool positive_scale = true, softcap = false, alibi = false, mask = false, blocks = false, sinks = false,
       dropout = false;
  int bias = 0;  // 1: of the dtype of q, 2: float32
};

constexpr int few = 1, many = 1 << 20;  // multiprocessors

Variant plain_variant(std::uint64_t number, int tile, int multiprocessors, DType dtype, bool banded) {
  Variant v{.number = number, .dtype = dtype, .tile = tile, .multiprocessors = multiprocessors};
  v.banded = banded;
  return v;
}

// The first variants have one option each, the others any.
Variant random_variant(std::uint64_t number, int index) {
  Rng rng(number);
  Variant v{.number = number};
  v.dtype = rng.pick({DType::bfloat16, DType::float16, DType::float32});
  v.tile = static_cast<int>(rng.integer(0, 4));
  v.multiprocessors = rng.pick({few, many});
  v.banded = rng.chance(0.5);
  constexpr int options = 9;
  const auto has = [&](int option) { return index < options ? index == option : rng.chance(0.35); };
  v.positive_scale = !has(0);
  v.softcap = has(1);
  v.alibi = has(2);
  v.mask = has(3);
  v.blocks = has(4);
  v.sinks = has(5);
  v.dropout = has(6);
  if (has(7)) v.bias = 1;
  if (has(8)) v.bias = 2;
  return v;
}

std::int64_t random_dim(Rng& rng, std::int64_t largest) {
  if (rng.chance(0.4)) return largest;
  return rng.chance(0.8) ? 8 * rng.integer(1, largest / 8) : rng.integer(1, largest);
}

std::int64_t random_length(Rng& rng) {
  if (rng.chance(0.04)) return 0;
  if (rng.chance(0.06)) return 1;
  if (rng.chance(0.2)) return rng.integer(2, 60);
  if (rng.chance(0.4))  // around the borders of tiles
    return rng.pick<std::int64_t>({64, 80, 128, 160, 192, 240, 256, 320, 384, 512}) + rng.integer(-2, 2);
  return rng.integer(61, 700);
}

std::optional<std::int64_t> random_bound(Rng& rng) {
  if (rng.chance(0.35)) return std::nullopt;
  if (rng.chance(0.4)) return rng.integer(-6, 20);
  if (rng.chance(0.7)) return rng.integer(-200, 400);
  return rng.pick<std::int64_t>({std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::min() + 1,
                                 std::numeric_limits<std::int64_t>::max() - 1, -(std::int64_t{1} << 40),
                                 std::int64_t{1} << 40, std::int64_t{1} << 31, -(std::int64_t{1} << 31), 0});
}

// Mostly what TMA can read in place.
Layout random_rows_layout(Rng& rng) {
  if (rng.chance(0.3)) return rng.pick({Layout::padded, Layout::reversed, Layout::expanded});
  return rng.pick({Layout::contiguous, Layout::transposed, Layout::permuted, Layout::aligned});
}

Layout random_any_layout(Rng& rng) {
  return rng.pick(
      {Layout::contiguous, Layout::transposed, Layout::permuted, Layout::padded, Layout::reversed, Layout::expanded});
}

PairSpec random_pairs(Rng& rng) {
  PairSpec pairs;
  pairs.present = true;
  for (bool& full : pairs.full) full = rng.chance(0.6);
  pairs.layout = random_any_layout(rng);
  pairs.hidden = rng.pick({0.0, 0.2, 0.6, 0.95});
  pairs.hide_rows = rng.chance(0.3);
  pairs.hide_batch = rng.chance(0.15);
  return pairs;
}

bool is_banded(const Spec& s) {
  constexpr std::int64_t unbounded = HR_UNBOUNDED;
  return s.batch > 0 && !Band::make(s.seqlen_q, s.seqlen_k, s.causal != Causal::none, s.causal == Causal::top_left,
                                    s.window_left.value_or(unbounded), s.window_right.value_or(unbounded))
                             .everything();
}

void draw_band(Rng& rng, const Variant& v, Spec& spec) {
  if (!v.banded || spec.batch == 0) return;
  do {
    spec.causal = rng.pick({Causal::none, Causal::bottom_right, Causal::bottom_right, Causal::top_left});
    spec.window_left.reset(), spec.window_right.reset();
    if (rng.chance(0.5)) spec.window_left = random_bound(rng), spec.window_right = random_bound(rng);
  } while (!is_banded(spec));
}

void draw_options(Rng& rng, const Variant& v, Spec& spec) {
  if (!v.positive_scale)
    spec.scale = rng.pick({0.0, -0.25, -1.0});
  else if (rng.chance(0.3))
    spec.scale = rng.pick({1.0, 0.5, 1e-3});
  if (v.softcap) spec.softcap = rng.pick({0.5, 1.0, 15.0, 50.0});
  if (v.dropout) spec.dropout_p = rng.pick({0.001, 0.1, 0.5, 0.9});
  spec.dropout_seed = rng.bits();
  if (v.bias != 0) {
    spec.bias = random_pairs(rng);
    spec.bias.of_input_dtype = v.bias == 1;
  }
  if (v.mask) spec.mask = random_pairs(rng);
  if (v.blocks) {
    spec.blocks.present = true;
    spec.blocks.full = {rng.chance(0.5), rng.chance(0.5)};
    spec.blocks.layout = random_any_layout(rng);
    spec.blocks.block_q = rng.pick<std::int64_t>({1, 3, 16, 17, 64, 128, 1000});
    spec.blocks.block_k = rng.pick<std::int64_t>({1, 5, 16, 31, 64, 128, 1000});
    spec.blocks.hidden = rng.pick({0.3, 0.7, 1.0});
  }
  if (v.alibi) spec.alibi = rng.pick({Alibi::heads, Alibi::batch_heads});
  if (v.sinks) spec.sinks = rng.pick({Sinks::normal, Sinks::large, Sinks::some_absent});
}

Spec draw(const Variant& v, std::uint64_t number) {
  Rng rng(number);
  Spec spec{.seed = rng.bits(), .dtype = v.dtype};
  spec.multiprocessors = v.multiprocessors;
  spec.batch = rng.chance(0.02) ? 0 : rng.integer(1, 3);
  spec.heads_kv = rng.chance(0.02) ? 0 : rng.integer(1, 3);
  spec.group = rng.chance(0.5) ? 1 : rng.integer(2, 8);
  const auto [largest_d, largest_dv] = tile_dims[v.tile];
  do {
    spec.head_dim = random_dim(rng, largest_d);
    spec.value_dim = rng.chance(0.5) ? std::min(spec.head_dim, largest_dv) : random_dim(rng, largest_dv);
  } while (v.tile > 0 && spec.head_dim <= tile_dims[v.tile - 1][0] && spec.value_dim <= tile_dims[v.tile - 1][1]);
  if (rng.chance(0.1)) {
    // Every block of threads has several tiles, some of them without keys.
    spec.batch = rng.integer(2, 6);
    spec.heads_kv = rng.integer(5, 16);
    spec.group = rng.integer(3, 8);
    spec.seqlen_q = rng.integer(1, 400);
    spec.seqlen_k = rng.integer(1, 300);
    while (spec.cost() > max_cost_of_many_tiles) {
      std::int64_t& largest = spec.seqlen_k > 40 ? spec.seqlen_k : spec.seqlen_q > 10 ? spec.seqlen_q : spec.group;
      largest = (largest + 1) / 2;
    }
  } else {
    spec.seqlen_q = random_length(rng);
    spec.seqlen_k = rng.chance(0.4) ? spec.seqlen_q : random_length(rng);
    while (spec.cost() > max_cost) {
      std::int64_t& largest = spec.batch > 1       ? spec.batch
                              : spec.heads_kv > 1  ? spec.heads_kv
                              : spec.group > 1     ? spec.group
                              : spec.seqlen_q > 64 ? spec.seqlen_q
                                                   : spec.seqlen_k;
      largest = (largest + 1) / 2;
    }
  }
  draw_band(rng, v, spec);
  draw_options(rng, v, spec);
  spec.want_lse = rng.chance(0.7);
  spec.through_plan = rng.chance(0.5);
  if (rng.chance(0.4))
    spec.inputs = rng.pick({Inputs::large_logits, Inputs::one_key, Inputs::offset, Inputs::equal, Inputs::tiny});
  spec.q_layout = random_rows_layout(rng);
  spec.k_layout = random_rows_layout(rng);
  spec.v_layout = random_rows_layout(rng);
  spec.out_layout =
      rng.pick({Layout::contiguous, Layout::transposed, Layout::permuted, Layout::padded, Layout::aligned});
  spec.lse_layout = rng.pick({Layout::contiguous, Layout::transposed, Layout::permuted, Layout::padded});
  spec.packed_qkv = rng.chance(0.15);
  return spec;
}

// The simplest problem of the same kernel that fails as well. Not where the device failed: nothing works after that.
std::string simplest(const Spec& spec, const std::string& failure) {
  if (failure.find("CUDA error") != std::string::npos || failure.find("throws") != std::string::npos) return "";
  const cuda::KernelSource source = variant_of(spec);
  const Spec simple = minimized(
      spec, [&](const Spec& s) { return variant_of(s) == source && !check_on_gpu(s).empty(); }, 4.0);
  return "simplest: " + simple.describe() + "\n" + check_on_gpu(simple);
}

// Runs `problems` problems of every variant. The kernels are compiled first, on all processors.
void cross_check(const std::vector<Variant>& variants, std::size_t problems) {
  std::uint64_t only_variant = 0, only_problem = 0;
  const char* only = std::getenv("HEADRACE_TEST_PROBLEM");
  if (only != nullptr) {
    char* colon = nullptr;
    only_variant = std::strtoull(only, &colon, 0);
    only_problem = std::strtoull(*colon == ':' ? colon + 1 : "0", nullptr, 0);
  }
  const std::size_t count = variants.size() * (problems + 1);
  std::mutex mutex;
  int failures = 0;
  double got_squares = 0.0, standard_squares = 0.0;
  int judged = 0;
  in_parallel(count, [&](std::size_t n) {
    const Variant& v = variants[n % variants.size()];
    if (only != nullptr && v.number != only_variant) return;
    if (n < variants.size()) {  // compile; what fails is reported by the problems
      try {
        cuda::KernelSource source;
        for (std::uint64_t k = 0; source.entry.empty(); ++k) source = variant_of(draw(v, mix(v.number, k)));
        load_variant(source);
      } catch (const std::exception&) {
      }
      return;
    }
    if (only != nullptr && n >= 2 * variants.size()) return;
    const std::uint64_t number = only != nullptr ? only_problem : mix(v.number, n);
    {
      const std::lock_guard lock(mutex);
      if (failures >= 4) return;
    }
    const Spec spec = draw(v, number);
    Call call = make_call(spec);
    const Outcome outcome = run_on_gpu(call);
    const Results exact = exact_forward(call, 1);
    const std::string failure = judge_forward(call, outcome, exact);
    // Where all inputs are equal all elements share one rounding error: no ratio means anything.
    if (failure.empty() && spec.inputs != Inputs::equal) {
      const Results bounds = error_bounds(DenseCall(call), exact, spec.dtype, DType::float32, call.bias.dtype());
      Results got = exact, standard = standard_attention(call);
      got.out = outcome.results.out;
      const double error = relative_errors(got, exact, bounds).out,
                   of_standard = relative_errors(standard, exact, bounds).out;
      if (std::isfinite(error) && std::isfinite(of_standard)) {
        const std::lock_guard lock(mutex);
        got_squares += error * error;
        standard_squares += of_standard * of_standard;
        ++judged;
      }
    }
    if (failure.empty()) return;
    const std::lock_guard lock(mutex);
    if (++failures > 4) return;
    std::ostringstream name;
    name << "HEADRACE_TEST_PROBLEM=" << v.number << ':' << number;
    // Printed before simpler ones are tried, which may hang.
    std::printf("%s: %s\n%s", name.str().c_str(), spec.describe().c_str(), failure.c_str());
    std::fflush(stdout);
    ADD_FAILURE() << name.str() << " (above)\n" << simplest(spec, failure);
  });
  if (judged < 20) return;
  const double got = std::sqrt(got_squares / judged), standard = std::sqrt(standard_squares / judged);
  std::printf("error of out in units of the bounds: %.4f, standard attention %.4f (%d problems)\n", got, standard,
              judged);
  EXPECT_LE(got, 2.0 * standard + 0.01);
}

class ForwardRandom : public OnGpu {};

TEST_F(ForwardRandom, EveryOptionAgreesWithReference) {
  Rng numbers = test_rng();
  std::vector<Variant> variants;
  for (int index = 0; index < scaled(24); ++index) variants.push_back(random_variant(numbers.bits(), index));
  cross_check(variants, 20);
}

TEST_F(ForwardRandom, PlainKernelsAgreeWithReference) {
  Rng numbers = test_rng();
  std::vector<Variant> variants;
  for (int tile = 0; tile < 5; ++tile)
    for (const int multiprocessors : {few, many})
      for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32})
        for (const bool banded : {false, true})
          variants.push_back(plain_variant(numbers.bits(), tile, multiprocessors, dtype, banded));
  cross_check(variants, static_cast<std::size_t>(scaled(25)));
}

}  // namespace
}  // namespace headrace::test
