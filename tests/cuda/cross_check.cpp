#include "cross_check.hpp"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <sstream>

#include "support/standard_attention.hpp"
#include "tiling/tiling.hpp"

namespace headrace::test {
namespace {

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
    if (rng.chance(0.5)) spec.bias.layout = Layout::aligned;  // TMA can load it
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

// Drawn last, so that the forward pass of a number is the same with it and without.
void draw_backward(Rng& rng, const Variant& v, Spec& spec) {
  spec.deterministic = v.deterministic;
  spec.dbias = v.dbias;
  spec.dlse = rng.chance(0.4);
  spec.dsinks = v.sinks && rng.chance(0.7);
  spec.dout_layout = random_rows_layout(rng);
  spec.gradient_layout =
      rng.pick({Layout::contiguous, Layout::transposed, Layout::permuted, Layout::padded, Layout::aligned});
}

Spec draw(const Variant& v, std::uint64_t number, double max_cost) {
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
    while (spec.cost() > 4.0 * max_cost) {  // more tiles than a GPU has multiprocessors
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
  draw_backward(rng, v, spec);
  return spec;
}

struct Member {
  const char* name;
  double Errors::*error;
};
constexpr std::array<Member, 6> members{{{"out", &Errors::out},
                                         {"dq", &Errors::dq},
                                         {"dk", &Errors::dk},
                                         {"dv", &Errors::dv},
                                         {"dbias", &Errors::dbias},
                                         {"dsinks", &Errors::dsinks}}};

// Mean squares over many problems of the errors of the GPU and of standard attention.
class Ledger {
 public:
  void add(DType dtype, const Errors& gpu, const Errors& standard) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < members.size(); ++i) {
      const double a = gpu.*members[i].error, b = standard.*members[i].error;
      if (!std::isfinite(a) || !std::isfinite(b)) continue;
      sums_[dtype][i].add(a, b);
      all_[i].add(a, b);
    }
  }

  // "Never worse than twice the error of standard attention", over enough problems that luck evens out.
  void expect_at_most_twice_standard(Passes passes) const {
    const std::size_t count = passes == Passes::forward ? 1 : members.size();
    for (std::size_t i = 0; i < count; ++i) {
      for (const auto& [dtype, sums] : sums_) sums[i].print(members[i].name, name_of(dtype));
      const auto [gpu, standard] = all_[i].root_mean_squares();
      if (all_[i].count < 20) continue;
      EXPECT_LE(gpu, 2.0 * standard + 0.01) << members[i].name;
    }
  }

 private:
  struct Sums {
    double gpu = 0.0, standard = 0.0;
    int count = 0;

    void add(double a, double b) {
      gpu += a * a;
      standard += b * b;
      ++count;
    }
    [[nodiscard]] std::pair<double, double> root_mean_squares() const {
      const double n = std::max(count, 1);
      return {std::sqrt(gpu / n), std::sqrt(standard / n)};
    }
    void print(const char* member, const char* dtype) const {
      if (count == 0) return;
      const auto [a, b] = root_mean_squares();
      std::printf("%-8s %-6s error in units of the bounds: %.4f, standard attention %.4f (%d problems)\n", dtype,
                  member, a, b, count);
    }
  };
  std::mutex mutex_;
  std::map<DType, std::array<Sums, members.size()>> sums_;
  std::array<Sums, members.size()> all_{};
};

// The simplest problem of the same kernel that fails as well. Not where the device failed: nothing works after that.
std::string simplest(const Spec& spec, Passes passes, const std::string& failure) {
  if (failure.find("CUDA error") != std::string::npos || failure.find("throws") != std::string::npos) return "";
  const cuda::KernelSource source = variant_of(spec);
  const auto fails = [&](const Spec& s) {
    return s.deterministic == spec.deterministic && s.dbias == spec.dbias && variant_of(s) == source &&
           !check_on_gpu(s, passes).empty();
  };
  const Spec simple = minimized(spec, fails, 4.0);
  return "simplest: " + simple.describe() + "\n" + check_on_gpu(simple, passes);
}

// Runs a problem; "" or what is wrong.
std::string try_problem(const Spec& spec, Passes passes, Ledger& ledger) {
  Call call = make_call(spec);
  const Outcome outcome = run_on_gpu(call, passes);
  const Results exact = exact_on_cpu(call, 1, passes);
  std::string failure = judge(call, outcome, exact, passes);
  // Where all inputs are equal all elements share one rounding error: no ratio means anything.
  if (!failure.empty() || spec.inputs == Inputs::equal) return failure;
  const Results bounds = error_bounds(DenseCall(call), exact, spec.dtype, DType::float32, call.bias.dtype());
  const Results standard = standard_attention(call);
  Results got = exact;
  got.out = outcome.results.out;
  const Errors of_gpu = relative_errors(passes == Passes::both ? outcome.results : got, exact, bounds);
  const Errors of_standard = relative_errors(standard, exact, bounds);
  ledger.add(spec.dtype, of_gpu, of_standard);
  if (passes == Passes::forward) return failure;
  // The bounds are for single elements, and what is typical lies far inside; so must all of them together. The constant
  // is for problems of few independent roundings, where the standard may have none by luck.
  for (const Member& member : members) {
    const double gpu = of_gpu.*member.error, other = of_standard.*member.error;
    if (!(gpu > 2.0 * other + 0.5)) continue;
    std::ostringstream text;
    text << "  " << member.name << ": the error is " << gpu << " of the bounds, that of standard attention " << other
         << '\n';
    failure += text.str();
  }
  return failure;
}

}  // namespace

Variant plain_variant(std::uint64_t number, int tile, int multiprocessors, DType dtype, bool banded) {
  Variant v{.number = number, .dtype = dtype, .tile = tile, .multiprocessors = multiprocessors};
  v.banded = banded;
  return v;
}

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
  v.dbias = v.bias != 0 && (index < options || rng.chance(0.6));
  v.deterministic = rng.chance(0.5);
  return v;
}

void cross_check(const std::vector<Variant>& variants, std::size_t problems, Passes passes, double max_cost) {
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
  Ledger ledger;
  in_parallel(count, [&](std::size_t n) {
    const Variant& v = variants[n % variants.size()];
    if (only != nullptr && v.number != only_variant) return;
    if (n < variants.size()) {  // compile; what fails is reported by the problems
      try {
        std::uint64_t k = 0;
        while (variant_of(draw(v, mix(v.number, k), max_cost)).entry.empty()) ++k;
        load_kernels(draw(v, mix(v.number, k), max_cost), passes);
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
    const Spec spec = draw(v, number, max_cost);
    const std::string failure = try_problem(spec, passes, ledger);
    if (failure.empty()) return;
    const std::lock_guard lock(mutex);
    if (++failures > 4) return;
    std::ostringstream name;
    name << "HEADRACE_TEST_PROBLEM=" << v.number << ':' << number;
    // Printed before simpler ones are tried, which may hang.
    std::printf("%s: %s\n%s", name.str().c_str(), spec.describe().c_str(), failure.c_str());
    std::fflush(stdout);
    ADD_FAILURE() << name.str() << " (above)\n" << simplest(spec, passes, failure);
  });
  ledger.expect_at_most_twice_standard(passes);
}

}  // namespace headrace::test
