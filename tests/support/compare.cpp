#include "support/compare.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <sstream>

namespace headrace::test {
namespace {

// A plan's workspace: garbage before the run, with a guard behind.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + guard) {
    std::fill(memory_.data(), memory_.data() + memory_.size(), std::byte{0xFF});
  }
  std::span<std::byte> span() { return {memory_.data(), bytes_}; }
  [[nodiscard]] bool guard_unchanged() const {
    return std::all_of(memory_.data() + bytes_, memory_.data() + memory_.size(),
                       [](std::byte b) { return b == std::byte{0xFF}; });
  }

 private:
  static constexpr std::size_t guard = 64;
  struct Aligned {
    explicit Aligned(std::size_t n)
        : bytes(n), start(static_cast<std::byte*>(::operator new (n, std::align_val_t{64}))) {}
    ~Aligned() { ::operator delete (start, std::align_val_t{64}); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    std::byte* data() { return start; }
    [[nodiscard]] const std::byte* data() const { return start; }
    [[nodiscard]] std::size_t size() const { return bytes; }

   private:
    std::size_t bytes;
    std::byte* start;
  };
  std::size_t bytes_;
  Aligned memory_;
};

struct Role {
  const char* name;
  Array Call::*array;
};
constexpr Role inputs[] = {{"q", &Call::q},
                           {"k", &Call::k},
                           {"v", &Call::v},
                           {"bias", &Call::bias},
                           {"mask", &Call::mask},
                           {"alibi_slopes", &Call::alibi_slopes},
                           {"sinks", &Call::sinks},
                           {"block_mask", &Call::block_mask},
                           {"cu_seqlens_q", &Call::cu_seqlens_q},
                           {"cu_seqlens_k", &Call::cu_seqlens_k},
                           {"seqused_q", &Call::seqused_q},
                           {"seqused_k", &Call::seqused_k},
                           {"dout", &Call::dout},
                           {"dlse", &Call::dlse}};
constexpr Role results_of_forward[] = {{"out", &Call::out}, {"lse", &Call::lse}};
constexpr Role gradients[] = {
    {"dq", &Call::dq}, {"dk", &Call::dk}, {"dv", &Call::dv}, {"dbias", &Call::dbias}, {"dsinks", &Call::dsinks}};

class Runner {
 public:
  Runner(Call& call, Backend backend) : call_(call), backend_(backend) {}

  Outcome run() {
    try {
      Attention attention = call_.attention(backend_);
      if (!call_.spec.want_lse) {
        const Tensor lse = attention.lse;
        attention.lse = Tensor();
        pass(attention, Pass::forward);
        const std::vector<std::byte> out = call_.out.bytes();
        call_.out.poison(0xCB);
        attention.lse = lse;
        pass(attention, Pass::forward);
        if (out != call_.out.bytes()) fail("out has other bits when lse is asked for");
      } else {
        pass(attention, Pass::forward);
      }
      outcome_.results.out = call_.out.values();
      outcome_.results.lse = call_.lse.values();
      pass(attention, Pass::backward);
      outcome_.results.dq = call_.dq.values();
      outcome_.results.dk = call_.dk.values();
      outcome_.results.dv = call_.dv.values();
      outcome_.results.dbias = call_.dbias.values();
      outcome_.results.dsinks = call_.dsinks.values();
    } catch (const Error& error) {
      fail(std::string("throws: ") + error.what());
    }
    return std::move(outcome_);
  }

 private:
  void fail(const std::string& what) { outcome_.failure += "  " + what + "\n"; }

  void pass(const Attention& attention, Pass which) {
    const bool is_forward = which == Pass::forward;
    const char* name = is_forward ? "forward" : "backward";
    for_each([](const char*, Array& array, bool) { array.remember(); });
    if (call_.spec.through_plan) {
      const Plan plan(attention, which);
      Workspace workspace(plan.workspace_bytes());
      plan.execute(attention, workspace.span());
      if (!workspace.guard_unchanged()) fail(std::string(name) + " writes behind its workspace");
    } else if (is_forward) {
      forward(attention);
    } else {
      backward(attention);
    }
    for_each([&](const char* tensor, Array& array, bool gradient) {
      const bool written = gradient ? !is_forward : is_forward && is_result(array);
      if (written ? !array.gaps_unchanged() : !array.unchanged())
        fail(std::string(name) + " writes " + (written ? "between the elements of " : "to ") + tensor);
    });
  }

  bool is_result(const Array& array) const { return &array == &call_.out || &array == &call_.lse; }

  template <typename F>
  void for_each(F&& visit) {
    for (const Role& role : inputs) visit(role.name, call_.*role.array, false);
    for (const Role& role : results_of_forward) visit(role.name, call_.*role.array, false);
    for (const Role& role : gradients) visit(role.name, call_.*role.array, true);
  }

  Call& call_;
  Backend backend_;
  Outcome outcome_;
};

// "[1, 0, 7]" of the n-th element, row-major.
std::string index_text(const Shape& shape, std::size_t n) {
  std::vector<std::size_t> index(shape.size());
  for (std::size_t i = shape.size(); i-- > 0;) {
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(shape[i], 1));
    index[i] = n % size;
    n /= size;
  }
  std::ostringstream text;
  text << '[';
  for (const std::size_t& i : index) text << (&i == index.data() ? "" : ", ") << i;
  text << ']';
  return text.str();
}

double largest(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return 65504.0;
    case DType::bfloat16:
      return 0x1.FEp127;
    case DType::float64:
      return std::numeric_limits<double>::max();
    default:
      return static_cast<double>(std::numeric_limits<float>::max());
  }
}

// How wrong an element is: at most 1 is right.
double badness(double got, double exact, double bound, double largest_of_dtype) {
  if (std::isnan(exact)) return std::isnan(got) ? 0.0 : infinity;
  if (std::isinf(exact)) return got == exact ? 0.0 : infinity;
  // Where the bound itself overflowed, the sign and finiteness of the result are open.
  if (!(std::abs(exact) + bound <= largest_of_dtype)) {
    if (std::isinf(got)) return bound >= largest_of_dtype || std::signbit(got) == std::signbit(exact) ? 0.0 : infinity;
  }
  if (!std::isfinite(got)) return infinity;
  if (got == exact) return 0.0;
  return bound > 0.0 ? std::abs(got - exact) / bound : infinity;
}

void describe_difference(std::ostringstream& text, const char* name, const Array& array, const std::vector<double>& got,
                         const std::vector<double>& exact, const std::vector<double>& bounds) {
  if (got.size() != exact.size() || bounds.size() != exact.size()) {
    text << "  " << name << " has " << got.size() << " elements instead of " << exact.size() << '\n';
    return;
  }
  const double limit = largest(array.dtype());
  std::size_t worst = 0, bad = 0;
  double worst_badness = 1.0;
  for (std::size_t n = 0; n < exact.size(); ++n) {
    const double b = badness(got[n], exact[n], bounds[n], limit);
    if (b <= 1.0) continue;
    if (bad++ == 0 || b > worst_badness) {
      worst = n;
      worst_badness = b;
    }
  }
  if (bad == 0) return;
  text.precision(9);
  text << "  " << name << ": " << bad << " of " << exact.size() << " elements are off, the worst is "
       << index_text(array.shape(), worst) << " = " << got[worst] << ", exact " << exact[worst] << ", off by "
       << std::abs(got[worst] - exact[worst]) << ", allowed " << bounds[worst] << '\n';
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Every single step that makes a problem simpler.
std::vector<Spec> simpler(const Spec& spec) {
  std::vector<Spec> steps;
  const auto step = [&](auto&& change) {
    Spec next = spec;
    change(next);
    if (next.describe() != spec.describe()) steps.push_back(next);
  };
  step([](Spec& s) {
    s.ragged = false;
    s.lengths_q.clear(), s.lengths_k.clear(), s.used_q.clear(), s.used_k.clear();
  });
  step([](Spec& s) { s.used_q.clear(); });
  step([](Spec& s) { s.used_k.clear(); });
  step([](Spec& s) { s.slack_q = s.slack_k = 0; });
  step([](Spec& s) { s.causal = Causal::none; });
  step([](Spec& s) { s.window_left.reset(), s.window_right.reset(); });
  step([](Spec& s) { s.window_left.reset(); });
  step([](Spec& s) { s.window_right.reset(); });
  step([](Spec& s) { s.scale.reset(); });
  step([](Spec& s) { s.softcap = 0.0; });
  step([](Spec& s) { s.dropout_p = 0.0; });
  step([](Spec& s) { s.bias = {}, s.dbias = false; });
  step([](Spec& s) { s.bias.hidden = 0.0, s.bias.hide_rows = s.bias.hide_batch = false; });
  step([](Spec& s) { s.bias.layout = Layout::contiguous; });
  step([](Spec& s) { s.mask = {}; });
  step([](Spec& s) { s.mask.hide_rows = s.mask.hide_batch = false; });
  step([](Spec& s) { s.mask.hidden = 0.0; });
  step([](Spec& s) { s.mask.layout = Layout::contiguous; });
  step([](Spec& s) { s.blocks = {}; });
  step([](Spec& s) { s.blocks.layout = Layout::contiguous, s.blocks.full = {}; });
  step([](Spec& s) { s.alibi = Alibi::none; });
  step([](Spec& s) { s.sinks = Sinks::none, s.dsinks = false; });
  step([](Spec& s) { s.want_lse = true; });
  step([](Spec& s) { s.dlse = false; });
  step([](Spec& s) { s.dbias = false; });
  step([](Spec& s) { s.dsinks = false; });
  step([](Spec& s) { s.deterministic = s.batch_invariant = false; });
  step([](Spec& s) { s.through_plan = false; });
  step([](Spec& s) { s.threads = 1; });
  step([](Spec& s) { s.inputs = Inputs::normal; });
  step([](Spec& s) { s.packed_qkv = false; });
  step([](Spec& s) {
    s.q_layout = s.k_layout = s.v_layout = s.out_layout = s.dout_layout = s.lse_layout = s.gradient_layout =
        Layout::contiguous;
  });
  for (Layout Spec::*layout : {&Spec::q_layout, &Spec::k_layout, &Spec::v_layout, &Spec::out_layout, &Spec::dout_layout,
                               &Spec::lse_layout, &Spec::gradient_layout})
    step([layout](Spec& s) { s.*layout = Layout::contiguous; });
  for (std::int64_t Spec::*size : {&Spec::batch, &Spec::heads_kv, &Spec::group, &Spec::head_dim, &Spec::value_dim,
                                   &Spec::seqlen_q, &Spec::seqlen_k}) {
    for (const int divisor : {0, 2, 1}) {  // to 1, half, one less
      step([size, divisor](Spec& s) {
        const std::int64_t old = s.*size;
        if (old <= 1) return;
        s.*size = divisor == 0 ? 1 : divisor == 2 ? old / 2 : old - 1;
        for (std::vector<std::int64_t>* list : {&s.lengths_q, &s.lengths_k, &s.used_q, &s.used_k})
          if (!list->empty()) list->resize(static_cast<std::size_t>(s.batch));
        if (s.ragged) return;
        for (std::int64_t& used : s.used_q) used = std::min(used, s.seqlen_q);
        for (std::int64_t& used : s.used_k) used = std::min(used, s.seqlen_k);
      });
    }
  }
  if (spec.ragged) {
    for (std::size_t b = 0; b < spec.lengths_q.size(); ++b)
      step([b](Spec& s) {
        s.lengths_q[b] /= 2;
        if (!s.used_q.empty()) s.used_q[b] = std::min(s.used_q[b], s.lengths_q[b]);
      });
    for (std::size_t b = 0; b < spec.lengths_k.size(); ++b)
      step([b](Spec& s) {
        s.lengths_k[b] /= 2;
        if (!s.used_k.empty()) s.used_k[b] = std::min(s.used_k[b], s.lengths_k[b]);
      });
  }
  return steps;
}

}  // namespace

Outcome run(Call& call, Backend backend) { return Runner(call, backend).run(); }

Results exact_results(const Call& call) {
  Call wide = in_float64(call);
  wide.spec.through_plan = false;
  wide.spec.want_lse = true;
  wide.spec.threads = 0;
  Outcome outcome = run(wide, Backend::reference);
  EXPECT_EQ(outcome.failure, "") << "the reference fails: " << call.spec.describe();
  return std::move(outcome.results);
}

std::string differences(const Call& call, const Results& got, const Results& exact, const Results& bounds) {
  std::ostringstream text;
  describe_difference(text, "out", call.out, got.out, exact.out, bounds.out);
  describe_difference(text, "lse", call.lse, got.lse, exact.lse, bounds.lse);
  describe_difference(text, "dq", call.dq, got.dq, exact.dq, bounds.dq);
  describe_difference(text, "dk", call.dk, got.dk, exact.dk, bounds.dk);
  describe_difference(text, "dv", call.dv, got.dv, exact.dv, bounds.dv);
  if (call.dbias.present()) describe_difference(text, "dbias", call.dbias, got.dbias, exact.dbias, bounds.dbias);
  if (call.dsinks.present()) describe_difference(text, "dsinks", call.dsinks, got.dsinks, exact.dsinks, bounds.dsinks);
  return text.str();
}

Errors relative_errors(const Results& got, const Results& exact, const Results& bounds) {
  const auto rms = [](const std::vector<double>& a, const std::vector<double>& b, const std::vector<double>& unit) {
    double sum = 0.0;
    std::size_t count = 0;
    for (std::size_t n = 0; n < a.size(); ++n) {
      if (!(unit[n] > 0.0) || !std::isfinite(a[n]) || !std::isfinite(b[n])) continue;
      const double x = (a[n] - b[n]) / unit[n];
      sum += x * x;
      ++count;
    }
    return count == 0 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(sum / static_cast<double>(count));
  };
  return {rms(got.out, exact.out, bounds.out),
          rms(got.lse, exact.lse, bounds.lse),
          rms(got.dq, exact.dq, bounds.dq),
          rms(got.dk, exact.dk, bounds.dk),
          rms(got.dv, exact.dv, bounds.dv),
          rms(got.dbias, exact.dbias, bounds.dbias),
          rms(got.dsinks, exact.dsinks, bounds.dsinks)};
}

Results run_and_expect_exact(Call& call, Backend backend) {
  Outcome outcome = run(call, backend);
  EXPECT_EQ(outcome.failure, "") << call.spec.describe();
  const Results exact = exact_results(call);
  const Results bounds = error_bounds(DenseCall(call), exact, call.spec.dtype, call.lse.dtype(), call.bias.dtype());
  EXPECT_EQ(differences(call, outcome.results, exact, bounds), "") << call.spec.describe();
  return std::move(outcome.results);
}

std::string check(const Spec& spec) {
  Call call = make_call(spec);
  const Outcome outcome = run(call, Backend::cpu);
  const Results exact = exact_results(call);
  if (outcome.results.dv.empty() && !exact.dv.empty()) return outcome.failure;  // it threw
  const Results bounds = error_bounds(DenseCall(call), exact, spec.dtype, call.lse.dtype(), call.bias.dtype());
  return outcome.failure + differences(call, outcome.results, exact, bounds);
}

Spec minimized(Spec spec, const std::function<bool(const Spec&)>& fails, double seconds) {
  const auto start = std::chrono::steady_clock::now();
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (const Spec& next : simpler(spec)) {
      if (seconds_since(start) > seconds) return spec;
      if (!fails(next)) continue;
      spec = next;
      smaller = true;
      break;
    }
  }
  return spec;
}

void expect_exact(const Spec& spec) {
  const std::string failure = check(spec);
  if (failure.empty()) return;
  const Spec simple = minimized(
      spec, [](const Spec& s) { return !check(s).empty(); }, 5.0);
  ADD_FAILURE() << spec.describe() << '\n' << failure << "simplest: " << simple.describe() << '\n' << check(simple);
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t n = 0; n < b.size(); ++n) {
    difference += (a[n] - b[n]) * (a[n] - b[n]);
    norm += b[n] * b[n];
  }
  return norm > 0.0 ? std::sqrt(difference / norm) : difference > 0.0 ? infinity : 0.0;
}

}  // namespace headrace::test
