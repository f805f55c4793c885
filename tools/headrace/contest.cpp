#include "contest.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "fmt/format.h"

namespace headrace::tool {
namespace {

using Json = nlohmann::json;

Array like(const Array& array) { return {array.dtype, array.shape}; }

Tensors with_outputs(const Contest& contest) {
  Tensors tensors = contest.inputs(contest);
  tensors["out"] = like(tensors.at("q"));
  tensors["lse"] = Array(DType::float32, {1, contest.shape.heads, contest.shape.seqlen});
  if (contest.backward)
    for (const char* name : {"q", "k", "v"}) tensors[fmt::format("d{}", name)] = like(tensors.at(name));
  return tensors;
}

class Headrace {
 public:
  Headrace(const Contest& contest, const Tensors& tensors) {
    call_.causal = contest.shape.causal ? Causal::bottom_right : Causal::none;
    call_.threads = contest.threads;
    bind_tensors(call_, tensors);
    if (!contest.preallocate) return;
    forward_.emplace(call_, Pass::forward);
    if (contest.backward) backward_.emplace(call_, Pass::backward);
  }

  void forward() {
    if (forward_)
      forward_->run(call_);
    else
      headrace::forward(call_);
  }
  void backward() {
    if (backward_)
      backward_->run(call_);
    else
      headrace::backward(call_);
  }
  [[nodiscard]] double flops(bool of_backward) const {
    const Plan plan(call_, of_backward ? Pass::backward : Pass::forward);
    return Json::parse(plan.explain_json())["flops"].get<double>();
  }

 private:
  struct Prepared {
    Prepared(const Attention& call, Pass pass) : plan(call, pass), bytes(plan.workspace_bytes() + 64) {}
    void run(const Attention& call) {
      const std::size_t offset = -reinterpret_cast<std::uintptr_t>(bytes.data()) % 64;
      plan.execute(call, std::span(bytes).subspan(offset, plan.workspace_bytes()));
    }
    Plan plan;
    std::vector<std::byte> bytes;
  };

  Attention call_;
  std::optional<Prepared> forward_, backward_;
};

class Standard {
 public:
  Standard(const Contest& contest, Tensors& tensors, const Blas& blas, StandardAttention::Threading threading)
      : contest_(contest), tensors_(tensors), attention_(blas, contest.shape, contest.threads, threading) {
    if (contest.preallocate) {
      probabilities_ = make_scores();
      if (contest.backward) dscores_ = make_scores();
    }
  }

  void forward() {
    if (!contest_.preallocate) probabilities_ = make_scores();
    attention_.forward(at("q"), at("k"), at("v"), at("out"), *probabilities_);
    if (!contest_.preallocate && !contest_.backward) probabilities_.reset();
  }
  // Uses what forward kept, as automatic differentiation does.
  void backward() {
    if (!contest_.preallocate) dscores_ = make_scores();
    attention_.backward(at("dout"), at("q"), at("k"), at("v"), at("dq"), at("dk"), at("dv"), *probabilities_,
                        *dscores_);
    if (!contest_.preallocate) dscores_.reset();
  }

 private:
  [[nodiscard]] std::unique_ptr<Scores> make_scores() const {
    return std::make_unique<Scores>(contest_.shape.heads, contest_.shape.seqlen);
  }
  Array& at(const char* name) { return tensors_.at(name); }

  const Contest& contest_;
  Tensors& tensors_;
  StandardAttention attention_;
  std::unique_ptr<Scores> probabilities_, dscores_;
};

// Rows [begin, end) of head h of a [1, seqlen, heads, dim] tensor, in float64.
Array rows_of_head(const Array& array, std::int64_t h, std::int64_t begin, std::int64_t end) {
  const std::int64_t heads = array.shape[2], dim = array.shape[3];
  Array result(DType::float64, {1, end - begin, 1, dim});
  for (std::int64_t i = begin; i < end; ++i)
    for (std::int64_t c = 0; c < dim; ++c) result.set((i - begin) * dim + c, array.at((i * heads + h) * dim + c));
  return result;
}

// Relative Frobenius error of a sample of rows against the float64 reference, which sees all their keys.
class SampledError {
 public:
  explicit SampledError(const Contest& contest) : contest_(contest) {}

  double of(const Tensors& tensors) {
    const std::int64_t n = contest_.shape.seqlen;
    const std::int64_t count = std::min<std::int64_t>(n, 8);
    for (std::int64_t h = 0; h < contest_.shape.heads; ++h) {
      const Array keys = rows_of_head(tensors.at("k"), h, 0, n), values = rows_of_head(tensors.at("v"), h, 0, n);
      for (std::int64_t s = 0; s < count; ++s) add_row(tensors, keys, values, h, (s + 1) * n / count - 1);
    }
    return std::sqrt(std::max(out_.relative(), dq_.relative()));
  }

 private:
  struct Sum {
    double error = 0.0, size = 0.0;
    void add(const Array& computed, const Array& expected) {
      for (std::int64_t c = 0; c < expected.size(); ++c) {
        error += std::pow(computed.at(c) - expected.at(c), 2);
        size += std::pow(expected.at(c), 2);
      }
    }
    [[nodiscard]] double relative() const { return size > 0.0 ? error / size : 0.0; }
  };

  void add_row(const Tensors& tensors, Array keys, Array values, std::int64_t h, std::int64_t i) {
    const auto row = [&](const char* name) { return rows_of_head(tensors.at(name), h, i, i + 1); };
    Tensors exact = {{"q", row("q")}, {"k", std::move(keys)}, {"v", std::move(values)}};
    exact["out"] = like(exact["q"]);
    exact["lse"] = Array(DType::float64, {1, 1, 1});
    Attention call;
    call.backend = Backend::reference;
    if (contest_.shape.causal) {  // sees the first i + 1 keys
      for (const char* name : {"k", "v"}) {
        exact[name].shape[1] = i + 1;
        exact[name].bytes.resize(static_cast<std::size_t>(exact[name].size()) * sizeof(double));
      }
    }
    if (contest_.backward) {
      exact["dout"] = row("dout");
      for (const char* name : {"q", "k", "v"}) exact[fmt::format("d{}", name)] = like(exact[name]);
    }
    bind_tensors(call, exact);
    forward(call);
    out_.add(row("out"), exact["out"]);
    if (!contest_.backward) return;
    backward(call);
    dq_.add(row("dq"), exact["dq"]);
  }

  const Contest& contest_;
  Sum out_, dq_;
};

template <typename Contestant>
Json measure_memory(const Contest& contest, const Tensors& tensors, Contestant& contestant) {
  const PeakMemory peak;
  contestant.forward();
  if (contest.backward) contestant.backward();
  const std::int64_t growth = peak.growth_bytes();
  return {{"peak_bytes", growth}, {"error", SampledError(contest).of(tensors)}};
}

template <typename Contestant>
std::function<void()> timed_pass(const Contest& contest, Contestant& contestant) {
  if (!contest.backward) return [&] { contestant.forward(); };
  contestant.forward();  // leaves what the backward pass reads
  return [&] { contestant.backward(); };
}

Json times(const Contest& contest, bool with_standard) {
  Tensors tensors = with_outputs(contest), standard_tensors;
  Headrace headrace(contest, tensors);
  std::vector<std::function<void()>> contestants = {timed_pass(contest, headrace)};
  Json result;
  std::optional<Blas> blas;
  std::optional<Standard> standard;
  if (with_standard) {
    blas.emplace(contest.blas);
    standard_tensors = tensors;
    double best = 0.0;
    using Threading = StandardAttention::Threading;
    Threading chosen = Threading::tasks;
    for (const Threading threading : {Threading::tasks, Threading::products}) {
      if (contest.threads == 1 && threading == Threading::products) continue;
      standard.emplace(contest, standard_tensors, *blas, threading);
      const auto pass = timed_pass(contest, *standard);
      pass();
      const double seconds = seconds_of(pass);
      if (best == 0.0 || seconds < best) best = seconds, chosen = threading;
    }
    standard.emplace(contest, standard_tensors, *blas, chosen);
    contestants.push_back(timed_pass(contest, *standard));
    result["standard"]["threading"] = chosen == Threading::tasks ? "tasks" : "products";
    result["standard"]["blas"] = blas->description();
  }
  const std::vector<std::vector<double>> seconds = race(contestants, contest.rounds, contest.budget_seconds);
  const double flops = headrace.flops(contest.backward);
  for (std::size_t c = 0; c < contestants.size(); ++c) {
    Json& run = result[c == 0 ? "headrace" : "standard"];
    run["seconds"] = median(seconds[c]);
    run["seconds_all"] = seconds[c];
    run["gflops"] = flops / median(seconds[c]) * 1e-9;
  }
  return result;
}

}  // namespace

Json run_contest(const Contest& contest, Progress& progress) {
  const auto show = [&](const char* what) { progress.show(fmt::format("{} keys: {}", contest.shape.seqlen, what)); };
  Json row = {{"seqlen", contest.shape.seqlen}};
  Contest fresh = contest;
  fresh.preallocate = false;  // what is allocated is what is to be measured
  show("memory of Headrace");
  row["headrace"] = in_child([&]() -> Json {
    const Tensors tensors = with_outputs(fresh);
    Headrace headrace(fresh, tensors);
    return measure_memory(fresh, tensors, headrace);
  });

  const std::uint64_t needed = Scores::bytes(contest.shape) * (contest.backward ? 2 : 1);
  std::string skipped = contest.standard_problem;
  if (skipped.empty() && needed > contest.standard_max_bytes)
    skipped = fmt::format("needs {}", format_bytes(static_cast<double>(needed)));
  if (skipped.empty()) {
    show("memory of standard attention");
    row["standard"] = in_child([&]() -> Json {
      const Blas blas(contest.blas);
      Tensors tensors = with_outputs(fresh);
      Standard standard(fresh, tensors, blas, StandardAttention::Threading::tasks);
      return measure_memory(fresh, tensors, standard);
    });
  }
  if (!skipped.empty()) row["standard"] = {{"skipped", skipped}};
  row["standard"]["needs_bytes"] = needed;

  show("time");
  const Json timing = in_child([&] { return times(contest, skipped.empty()); });
  row["headrace"].update(timing["headrace"]);
  if (skipped.empty()) {
    row["standard"].update(timing["standard"]);
    row["speedup"] = row["standard"]["seconds"].get<double>() / row["headrace"]["seconds"].get<double>();
  }
  return row;
}

Json run_on_gpu(const Contest& contest, const Gpu& gpu) {
  Tensors tensors = with_outputs(contest);
  const GpuStream stream;
  const GpuTensors on_gpu(tensors);
  Attention call;
  call.causal = contest.shape.causal ? Causal::bottom_right : Causal::none;
  on_gpu.bind(call, gpu, stream);
  GpuPass(call, Pass::forward)();  // leaves what the backward pass reads
  const GpuPass pass(call, contest.backward ? Pass::backward : Pass::forward);
  const Json plan = Json::parse(pass.plan().explain_json());
  pass();
  constexpr double shortest_round = 0.02;
  const double once = stream.seconds_of([&] { pass(); });
  const int runs = std::clamp(static_cast<int>(shortest_round / std::max(once, 1e-7)), 1, 10'000);
  std::vector<double> seconds;
  double spent = 0.0;
  for (int round = 0; round < contest.rounds && (round == 0 || spent < contest.budget_seconds); ++round) {
    const double total = stream.seconds_of([&] {
      for (int run = 0; run < runs; ++run) pass();
    });
    seconds.push_back(total / runs);
    spent += total;
  }
  for (const char* name : {"out", "dq"})
    if (tensors.contains(name)) on_gpu.read(name, tensors.at(name));
  return {{"seqlen", contest.shape.seqlen},
          {"headrace",
           {{"seconds", median(seconds)},
            {"seconds_all", seconds},
            {"gflops", plan["flops"].get<double>() / median(seconds) * 1e-9},
            {"peak_bytes", plan["workspace_bytes"]},
            {"error", SampledError(contest).of(tensors)}}},
          {"standard", {{"skipped", "not on a GPU"}}}};
}

BlasProbe probe_blas(const std::string& path) {
  // In a child, since the library may start threads as soon as it is loaded.
  const Json answer = in_child([&]() -> Json {
    try {
      return {{"description", Blas(path).description()}, {"problem", ""}};
    } catch (const std::runtime_error& error) {
      return {{"description", ""}, {"problem", error.what()}};
    }
  });
  return {answer["description"], answer["problem"]};
}

double number_or_nan(const Json& value) {
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

int default_threads() { return Json::parse(info())["threads"].get<int>(); }

}  // namespace headrace::tool
