// Attention on a CPU beside what the machine can do: multiply-adds of float32, pair products of bfloat16, sgemm, reads
// from memory. Other libraries are measured by attention_cpu_peers.py.
//
// Each cell takes turns with its ceiling, so that both see the same clock and the same neighbours; medians are kept,
// with the spread between the quartiles. Workspaces are allocated before the clock starts. GFLOP/s count visible pairs:
// 4 head_dim for each in the forward pass, 10 in the backward pass. Results are checked against the float64 reference
// on the last row of each sequence.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "array.hpp"
#include "blas.hpp"
#include "ceilings.hpp"
#include "contract.hpp"
#include "fmt/format.h"
#include "measure.hpp"
#include "nlohmann/json.hpp"

namespace {

using namespace headrace;
using namespace headrace::tool;
using Json = nlohmann::ordered_json;

struct Problem {
  DType dtype = DType::float32;
  std::int64_t batch = 1, seqlen_q = 1, seqlen_k = 1, heads_q = 8, heads_kv = 8, dim = 64;
  bool causal = false, backward = false;
  int threads = 1;

  // Products of a query with a key that count.
  [[nodiscard]] double flops() const {
    const auto n = static_cast<double>(seqlen_q), keys = static_cast<double>(seqlen_k);
    const double pairs = causal ? n * keys - n * (n - 1) / 2 : n * keys;
    return (backward ? 10.0 : 4.0) * static_cast<double>(batch * heads_q * dim) * pairs;
  }
};

// Reserves and touches a plan's workspace, and runs it.
class Prepared {
 public:
  Prepared(const Attention& call, Pass pass) : plan_(call, pass), bytes_(plan_.workspace_bytes() + alignment) {}
  void run(const Attention& call) {
    const std::size_t offset = -reinterpret_cast<std::uintptr_t>(bytes_.data()) % alignment;
    plan_.execute(call, std::span(bytes_).subspan(offset, plan_.workspace_bytes()));
  }
  [[nodiscard]] Json explained() const { return Json::parse(plan_.explain_json()); }

 private:
  static constexpr std::size_t alignment = 64;
  Plan plan_;
  std::vector<std::byte> bytes_;
};

class Contestant {
 public:
  explicit Contestant(const Problem& problem) : problem_(problem) {
    NormalSource source(20261130);
    const auto add = [&](const char* name, std::int64_t seqlen, std::int64_t heads) {
      tensors_[name] = normal_array(problem.dtype, {problem.batch, seqlen, heads, problem.dim}, source);
    };
    add("q", problem.seqlen_q, problem.heads_q);
    add("k", problem.seqlen_k, problem.heads_kv);
    add("v", problem.seqlen_k, problem.heads_kv);
    tensors_["out"] = Array(problem.dtype, tensors_["q"].shape);
    tensors_["lse"] = Array(DType::float32, {problem.batch, problem.heads_q, problem.seqlen_q});
    if (problem.backward) {
      add("dout", problem.seqlen_q, problem.heads_q);
      for (const char* name : {"q", "k", "v"})
        tensors_[fmt::format("d{}", name)] = Array(problem.dtype, tensors_[name].shape);
    }
    call_ = options();
    bind_tensors(call_, tensors_);
    forward_ = std::make_unique<Prepared>(call_, Pass::forward);
    forward_->run(call_);
    if (problem.backward) backward_ = std::make_unique<Prepared>(call_, Pass::backward);
    run();
    error_ = check();
  }

  void run() { problem_.backward ? backward_->run(call_) : forward_->run(call_); }

  [[nodiscard]] double error() const { return error_; }
  [[nodiscard]] Json explained() const { return (problem_.backward ? backward_ : forward_)->explained(); }
  // What the pass must read at least: with few queries, that is keys and values.
  [[nodiscard]] double key_bytes() const {
    return static_cast<double>(tensors_.at("k").bytes.size() + tensors_.at("v").bytes.size());
  }

 private:
  [[nodiscard]] Attention options() const {
    Attention call;
    call.causal = problem_.causal ? Causal::bottom_right : Causal::none;
    call.threads = problem_.threads;
    return call;
  }

  // The relative error of out, or of dq, in the last row, which sees all keys.
  [[nodiscard]] double check() const {
    const std::int64_t row = problem_.heads_q * problem_.dim;
    Tensors exact = {{"k", tensors_.at("k")}, {"v", tensors_.at("v")}};
    for (const auto& [name, array] : tensors_) {
      if (name == "k" || name == "v" || name == "lse" || name == "dk" || name == "dv") continue;
      Array& last = exact[name] = Array(array.dtype, {problem_.batch, 1, problem_.heads_q, problem_.dim});
      for (std::int64_t b = 0; b < problem_.batch; ++b)
        for (std::int64_t n = 0; n < row; ++n)
          last.set(b * row + n, array.at(((b + 1) * problem_.seqlen_q - 1) * row + n));
    }
    const Array computed = exact.at(problem_.backward ? "dq" : "out");
    exact["lse"] = Array(DType::float64, {problem_.batch, problem_.heads_q, 1});
    for (const char* name : {"q", "k", "v", "out", "dout", "dq"})
      if (exact.contains(name)) exact[name] = convert(exact[name], DType::float64);
    if (problem_.backward)
      for (const char* name : {"k", "v"}) exact[fmt::format("d{}", name)] = Array(DType::float64, exact[name].shape);
    Attention call = options();
    call.backend = Backend::reference;
    bind_tensors(call, exact);
    forward(call);
    if (problem_.backward) backward(call);
    const Array& expected = exact.at(problem_.backward ? "dq" : "out");
    double error = 0.0, size = 0.0;
    for (std::int64_t n = 0; n < expected.size(); ++n) {
      error += std::pow(computed.at(n) - expected.at(n), 2);
      size += std::pow(expected.at(n), 2);
    }
    const double relative = std::sqrt(error / size);
    const double allowed = contract(problem_.dtype).output * (problem_.backward ? 3 : 1);
    if (!(relative <= allowed))
      throw std::logic_error(
          fmt::format("wrong result: relative error {} of {}", relative, dtype_name(problem_.dtype)));
    return relative;
  }

  Problem problem_;
  Tensors tensors_;
  Attention call_;
  std::unique_ptr<Prepared> forward_, backward_;
  double error_ = 0.0;
};

double spread(std::vector<double> values) {
  const double middle = median(values);
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return (values[n - 1 - n / 4] - values[n / 4]) / middle;
}

double load() {
  double average = 0.0;
  std::ifstream("/proc/loadavg") >> average;
  return average;
}

std::string cpu_model() {
  std::ifstream lines("/proc/cpuinfo");
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

class Bench {
 public:
  Bench(int rounds, double budget_seconds) : rounds_(rounds), budget_(budget_seconds) {}

  // A grid's cell: the pass and its ceiling in turn. 16-bit floats are held to the pair products where there are any.
  Json compute(const Problem& p) {
    Contestant contestant(p);
    double peak_flops = 0.0;
    const bool pairs = p.dtype == DType::bfloat16 && bench::has_pairs();
    const auto times = race({[&] { contestant.run(); },
                             [&] { peak_flops = pairs ? bench::run_pairs(p.threads) : bench::run_fma(p.threads); }},
                            rounds_, budget_);
    const double gflops = 1e-9 * p.flops() / median(times[0]), peak = 1e-9 * peak_flops / median(times[1]);
    Json cell = describe(p, contestant);
    cell.update(Json{{"seconds", median(times[0])},
                     {"spread", spread(times[0])},
                     {"gflops", gflops},
                     {"ceiling", pairs ? "bf16_pairs" : "fma"},
                     {"ceiling_gflops", peak},
                     {"fraction", gflops / peak}});
    fmt::print("{:8} {:8} {} n {:5} d {:3} threads {}: {:7.1f} GFLOP/s, {:.3f} of {} (spread {:.1f} %)\n",
               p.backward ? "backward" : "forward", dtype_name(p.dtype), p.causal ? "causal" : "full  ", p.seqlen_k,
               p.dim, p.threads, gflops, gflops / peak, pairs ? "pairs" : "FMA", 100 * spread(times[0]));
    std::fflush(stdout);
    return cell;
  }

  // Few queries against long keys: bytes of keys and values a second, beside a plain read of as many.
  Json memory(const Problem& p) {
    Contestant contestant(p);
    const std::vector<std::byte> plain(static_cast<std::size_t>(contestant.key_bytes()), std::byte{1});
    const auto times = race({[&] { contestant.run(); }, [&] { bench::read_all(plain, p.threads); }}, rounds_, budget_);
    const double rate = 1e-9 * contestant.key_bytes() / median(times[0]);
    const double ceiling = 1e-9 * contestant.key_bytes() / median(times[1]);
    Json cell = describe(p, contestant);
    cell.update(Json{{"seconds", median(times[0])},
                     {"spread", spread(times[0])},
                     {"gbytes", rate},
                     {"ceiling", "read"},
                     {"ceiling_gbytes", ceiling},
                     {"fraction", rate / ceiling}});
    fmt::print("{:8} q {} heads {}/{} keys {:6} d {:3} threads {}: {:6.2f} GB/s, {:.3f} of reading (spread {:.1f} %)\n",
               dtype_name(p.dtype), p.seqlen_q, p.heads_q, p.heads_kv, p.seqlen_k, p.dim, p.threads, rate,
               rate / ceiling, 100 * spread(times[0]));
    std::fflush(stdout);
    return cell;
  }

  // All ceilings by themselves.
  Json ceilings(int threads) {
    double flops = 0.0;
    Json result = {{"threads", threads}, {"load", load()}};
    const auto rate = [&](const std::function<void()>& work) { return median(race({work}, rounds_, budget_)[0]); };
    const double fma = rate([&] { flops = bench::run_fma(threads); });
    result["fma_gflops"] = 1e-9 * flops / fma;
    if (bench::has_pairs()) {
      const double pairs = rate([&] { flops = bench::run_pairs(threads); });
      result["bf16_pairs_gflops"] = 1e-9 * flops / pairs;
    }
    try {
      constexpr std::int64_t n = 2048;
      const Blas blas("");
      blas.set_threads(threads);
      NormalSource source(1);
      const Array a = normal_array(DType::float32, {n, n}, source), b = normal_array(DType::float32, {n, n}, source);
      Array c(DType::float32, {n, n});
      const auto data = [](const Array& array) { return reinterpret_cast<const float*>(array.bytes.data()); };
      const double seconds = rate([&] {
        blas.sgemm(n, n, n, 1.0f, {data(a), n}, {data(b), n}, reinterpret_cast<float*>(c.bytes.data()), n);
      });
      result["sgemm_2048_gflops"] = 2e-9 * static_cast<double>(n * n * n) / seconds;
      result["blas"] = blas.description();
    } catch (const std::runtime_error& error) {
      result["blas"] = error.what();
    }
    const std::vector<std::byte> memory(std::size_t{512} << 20, std::byte{1});
    result["read_gbytes"] = 1e-9 * static_cast<double>(memory.size()) / rate([&] { bench::read_all(memory, threads); });
    fmt::print("ceilings: {}\n", result.dump());
    return result;
  }

 private:
  static Json describe(const Problem& p, const Contestant& contestant) {
    const Json plan = contestant.explained();
    return {{"pass", p.backward ? "backward" : "forward"},
            {"dtype", dtype_name(p.dtype)},
            {"batch", p.batch},
            {"seqlen_q", p.seqlen_q},
            {"seqlen_k", p.seqlen_k},
            {"heads_q", p.heads_q},
            {"heads_kv", p.heads_kv},
            {"head_dim", p.dim},
            {"causal", p.causal},
            {"threads", p.threads},
            {"kernel", plan["kernel"]},
            {"workspace_bytes", plan["workspace_bytes"]},
            {"error", contestant.error()},
            {"load", load()}};
  }

  int rounds_;
  double budget_;
};

struct Flags {
  std::string output, commit = "unknown";
  bool append = false;
  std::vector<std::string> tables = {"ceilings", "forward", "backward", "decode"};
  std::vector<std::string> dtypes = {"float32", "bfloat16", "float16"};
  std::int64_t heads = 8;
  std::vector<std::int64_t> dims = {64, 128}, lengths = {512, 2048, 8192}, contexts = {16384, 65536};
  std::vector<int> threads = {1, 2};
  std::vector<std::string> masks = {"full", "causal"};
  int rounds = 7;
  double budget_seconds = 2.0;
};

void run(const Flags& flags) {
  Json result = {{"version", version()},  {"commit", flags.commit},
                 {"cpu", cpu_model()},    {"cores", std::thread::hardware_concurrency()},
                 {"load_before", load()}, {"ceilings", Json::array()},
                 {"cells", Json::array()}};
  if (std::ifstream file(flags.output); flags.append && file.good()) result = Json::parse(file);
  Bench bench(flags.rounds, flags.budget_seconds);
  const auto wanted = [&](const char* table) { return std::ranges::find(flags.tables, table) != flags.tables.end(); };
  if (wanted("ceilings"))
    for (const int threads : flags.threads) result["ceilings"].push_back(bench.ceilings(threads));
  for (const bool backward : {false, true}) {
    if (!wanted(backward ? "backward" : "forward")) continue;
    for (const std::string& dtype : flags.dtypes)
      for (const std::int64_t dim : flags.dims)
        for (const std::string& mask : flags.masks)
          for (const std::int64_t seqlen : flags.lengths)
            for (const int threads : flags.threads)
              result["cells"].push_back(bench.compute({.dtype = parse_dtype(dtype),
                                                       .seqlen_q = seqlen,
                                                       .seqlen_k = seqlen,
                                                       .heads_q = flags.heads,
                                                       .heads_kv = flags.heads,
                                                       .dim = dim,
                                                       .causal = mask == "causal",
                                                       .backward = backward,
                                                       .threads = threads}));
  }
  if (wanted("decode"))
    for (const std::string& dtype : flags.dtypes)
      for (const std::int64_t dim : flags.dims)
        for (const std::int64_t heads_q : {8, 32})
          for (const std::int64_t context : flags.contexts)
            for (const int threads : flags.threads)
              result["cells"].push_back(bench.memory({.dtype = parse_dtype(dtype),
                                                      .seqlen_q = 1,
                                                      .seqlen_k = context,
                                                      .heads_q = heads_q,
                                                      .heads_kv = 8,
                                                      .dim = dim,
                                                      .threads = threads}));
  std::ofstream file(flags.output);
  file << result.dump(1) << '\n';
  if (!file.flush()) throw std::runtime_error(flags.output + ": cannot be written");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Measure attention on a CPU beside the ceilings of the machine.", "attention_cpu");
  Flags flags;
  app.add_option("OUTPUT", flags.output, "The JSON file to write")->required();
  app.add_option("--commit", flags.commit, "Of the library, for the record");
  app.add_flag("--append", flags.append, "Add to what the file holds, so that a long grid can be measured in parts");
  app.add_option("--tables", flags.tables, "Which tables: ceilings, forward, backward, decode")
      ->delimiter(',')
      ->check(CLI::IsMember({"ceilings", "forward", "backward", "decode"}));
  app.add_option("--dtypes", flags.dtypes, "Which types: float32, bfloat16, float16")->delimiter(',');
  app.add_option("--dims", flags.dims, "Head dimensions")->delimiter(',')->check(CLI::Range(1, 512));
  app.add_option("--heads", flags.heads, "Heads of the grids")->check(CLI::PositiveNumber);
  app.add_option("--lengths", flags.lengths, "Tokens of a sequence")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--contexts", flags.contexts, "Keys of the decode table")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--masks", flags.masks, "full, causal")->delimiter(',')->check(CLI::IsMember({"full", "causal"}));
  app.add_option("--threads", flags.threads, "Numbers of threads")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--rounds", flags.rounds, "Turns of each contestant")->check(CLI::PositiveNumber);
  app.add_option("--budget", flags.budget_seconds, "Seconds after which no new turn of a cell begins")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    run(flags);
  } catch (const std::exception& error) {
    fmt::print(stderr, "attention_cpu: error: {}\n", error.what());
    return 1;
  }
}
