// The library on a GPU against itself: what a call of either pass costs the host, how long kernels of the forward pass
// take over a grid of shapes and at short sequences, and what each option costs. Other libraries are measured by
// attention_gpu_peers.py.
//
// Times are the device's. Contestants take turns of 60 ms, long enough for the clock to settle at what the contestant's
// own power allows; the median of the turns is kept, with the spread between the quartiles. Kernels shorter than 0.2 ms
// are launched 20 at a time by a CUDA graph, so that the host's speed does not count. Every result is checked: the last
// row of the last sequence, against the CPU.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "array.hpp"
#include "contract.hpp"
#include "cuda/driver/driver.hpp"
#include "fmt/format.h"
#include "gpu.hpp"
#include "measure.hpp"
#include "nlohmann/json.hpp"

namespace {

using namespace headrace;
using namespace headrace::tool;
using Json = nlohmann::ordered_json;

constexpr std::int64_t tokens = 16384, width = 2048;  // batch x seqlen and heads x head_dim of the grid
constexpr double turn_seconds = 0.06;

// What is measured. Dense, seqlen_q = seqlen_k.
struct Problem {
  std::string name = "plain";
  DType dtype = DType::bfloat16;
  std::int64_t batch = 1, seqlen = 1, heads_q = 1, heads_kv = 1, dim = 64;
  bool causal = false, alibi = false;
  bool unaligned_k = false;  // k begins at a 2nd element, where TMA cannot read it: it is copied first
  std::optional<std::int64_t> window_left{}, window_right{};
  double softcap = 0.0;
};

// Normal deviates without end, as far as the largest problem reaches: one run of them again and again. Its length is
// prime, so that no two rows are the same.
class Deviates {
 public:
  static constexpr std::int64_t largest = tokens * width + 1;

  Deviates(DType dtype, std::uint64_t seed) : period_(make(dtype, seed)), device_(bytes(largest)) {
    for (std::int64_t at = 0; at < largest; at += period) {
      const std::size_t count = bytes(std::min(period, largest - at));
      cuda::check(cuda::driver().cuMemcpyHtoD(address() + bytes(at), period_.bytes.data(), count), "cuMemcpyHtoD");
    }
    cuda::check(cuda::driver().cuCtxSynchronize(), "cuCtxSynchronize");
  }

  [[nodiscard]] Tensor on_device(const Shape& shape, std::int64_t begin = 0) const {
    return {device_.data() + bytes(begin), period_.dtype, shape};
  }
  // Elements from `begin` on, on the host.
  [[nodiscard]] Array on_host(std::int64_t begin, const Shape& shape) const {
    Array result(period_.dtype, shape);
    for (std::int64_t done = 0; done < result.size();) {
      const std::int64_t at = (begin + done) % period, count = std::min(period - at, result.size() - done);
      std::copy_n(period_.bytes.begin() + static_cast<std::ptrdiff_t>(bytes(at)), bytes(count),
                  result.bytes.begin() + static_cast<std::ptrdiff_t>(bytes(done)));
      done += count;
    }
    return result;
  }

 private:
  static constexpr std::int64_t period = 1048583;
  static Array make(DType dtype, std::uint64_t seed) {
    NormalSource source(seed);
    return normal_array(dtype, {period}, source);
  }
  [[nodiscard]] std::size_t bytes(std::int64_t elements) const {
    return static_cast<std::size_t>(elements) * element_size(period_.dtype);
  }
  [[nodiscard]] cuda::CUdeviceptr address() const { return reinterpret_cast<cuda::CUdeviceptr>(device_.data()); }

  Array period_;
  GpuMemory device_;
};

// The memory of all problems of one dtype.
struct Pool {
  explicit Pool(DType dtype)
      : q(dtype, 1), k(dtype, 2), v(dtype, 3), out(static_cast<std::size_t>(Deviates::largest) * element_size(dtype)) {}
  Deviates q, k, v;
  GpuMemory out;
};

// How a problem runs: its plan, and a graph of some launches.
class Contestant {
 public:
  Contestant(const Problem& problem, const Pool& pool, const Gpu& gpu, const GpuStream& stream)
      : problem_(problem),
        pool_(pool),
        stream_(stream),
        slopes_(slopes(problem).bytes),
        forward_(call(gpu), Pass::forward) {
    const Json report = Json::parse(forward_.plan().explain_json());
    flops_ = report["flops"].get<double>();
    tile_flops_ = report["tiles_visited"].get<double>() * report["tile_q"].get<double>() *
                  report["tile_k"].get<double>() * 4.0 * static_cast<double>(problem.dim);
    forward_();
    error_ = check();
    const double once = std::min(stream.seconds_of(std::ref(forward_)), stream.seconds_of(std::ref(forward_)));
    launches_ = once < 2e-4 ? 20 : 1;
    graph_ = std::make_unique<GpuGraph>(stream, [&] {
      for (int n = 0; n < launches_; ++n) forward_();
    });
    turns_of_graph_ = std::max(1, static_cast<int>(turn_seconds / (once * launches_)));
  }

  // Seconds of one launch, of as many as fill a turn.
  [[nodiscard]] double turn() const {
    const double all = stream_.seconds_of([&] {
      for (int n = 0; n < turns_of_graph_; ++n) graph_->launch(stream_);
    });
    return all / (turns_of_graph_ * launches_);
  }

  [[nodiscard]] Json report(std::vector<double> seconds) const {
    const double middle = median(seconds);
    std::sort(seconds.begin(), seconds.end());
    const std::size_t n = seconds.size();
    const Problem& p = problem_;
    return {{"name", p.name},
            {"dtype", dtype_name(p.dtype)},
            {"batch", p.batch},
            {"seqlen", p.seqlen},
            {"heads", p.heads_q},
            {"heads_kv", p.heads_kv},
            {"head_dim", p.dim},
            {"causal", p.causal},
            {"us", 1e6 * middle},
            {"spread", (seconds[n - 1 - n / 4] - seconds[n / 4]) / middle},
            {"tflops", 1e-12 * flops_ / middle},
            {"tile_tflops", 1e-12 * tile_flops_ / middle},
            {"launches_of_graph", launches_},
            {"error", error_}};
  }

 private:
  static Array slopes(const Problem& p) {
    Array slopes(DType::float32, {p.heads_q});
    for (std::int64_t h = 0; h < p.heads_q; ++h)
      slopes.set(h, std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(p.heads_q)));
    return slopes;
  }

  [[nodiscard]] Attention options() const {
    Attention a;
    a.causal = problem_.causal ? Causal::bottom_right : Causal::none;
    a.window_left = problem_.window_left, a.window_right = problem_.window_right;
    a.softcap = problem_.softcap;
    return a;
  }

  [[nodiscard]] Attention call(const Gpu& gpu) const {
    const Problem& p = problem_;
    Attention a = options();
    a.q = pool_.q.on_device({p.batch, p.seqlen, p.heads_q, p.dim});
    a.k = pool_.k.on_device({p.batch, p.seqlen, p.heads_kv, p.dim}, p.unaligned_k ? 1 : 0);
    a.v = pool_.v.on_device({p.batch, p.seqlen, p.heads_kv, p.dim});
    a.out = a.q;
    a.out.data = pool_.out.data();
    if (p.alibi) a.alibi_slopes = Tensor(slopes_.data(), DType::float32, {p.heads_q});
    a.device = Device::cuda;
    a.device_index = gpu.index();
    a.stream = stream_.get();
    return a;
  }

  // The relative error of the last row of the last sequence. With one query, the last one, every option means the same.
  [[nodiscard]] double check() const {
    const Problem& p = problem_;
    const std::int64_t row = p.heads_q * p.dim, last = (p.batch * p.seqlen - 1) * row;
    const std::int64_t keys = p.seqlen * p.heads_kv * p.dim;
    Tensors host;
    host["q"] = pool_.q.on_host(last, {1, 1, p.heads_q, p.dim});
    host["k"] = pool_.k.on_host((p.batch - 1) * keys + (p.unaligned_k ? 1 : 0), {1, p.seqlen, p.heads_kv, p.dim});
    host["v"] = pool_.v.on_host((p.batch - 1) * keys, {1, p.seqlen, p.heads_kv, p.dim});
    host["out"] = Array(p.dtype, {1, 1, p.heads_q, p.dim});
    if (p.alibi) host["alibi_slopes"] = slopes(p);
    Attention exact = options();
    bind_tensors(exact, host);
    forward(exact);
    Array got = host["out"];
    pool_.out.read(got.bytes, static_cast<std::size_t>(last) * element_size(p.dtype));
    double error = 0.0, size = 0.0;
    for (std::int64_t n = 0; n < row; ++n) {
      error += std::pow(got.at(n) - host["out"].at(n), 2);
      size += std::pow(host["out"].at(n), 2);
    }
    const double relative = std::sqrt(error / size);
    if (!(relative <= 2 * contract(p.dtype).output))
      throw std::logic_error(fmt::format("{} {}, seqlen {}, head_dim {}: wrong result, relative error {}", p.name,
                                         dtype_name(p.dtype), p.seqlen, p.dim, relative));
    return relative;
  }

  Problem problem_;
  const Pool& pool_;
  const GpuStream& stream_;
  GpuMemory slopes_;
  GpuPass forward_;
  std::unique_ptr<GpuGraph> graph_;
  double flops_ = 0.0, tile_flops_ = 0.0, error_ = 0.0;
  int launches_ = 1, turns_of_graph_ = 1;
};

// Clock and power as nvidia-smi tells them, while or just after something ran; empty where there is none.
std::string clock_and_power(const Gpu& gpu) {
  const std::string command =
      fmt::format("nvidia-smi --id={} --query-gpu=clocks.sm,power.draw --format=csv,noheader 2>/dev/null", gpu.index());
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  char line[128] = "";
  if (pipe == nullptr || std::fgets(line, sizeof line, pipe.get()) == nullptr) return "";
  const std::string text = line;
  return text.substr(0, text.find('\n'));
}

class Bench {
 public:
  Bench(const Gpu& gpu, int rounds) : gpu_(gpu), rounds_(rounds) {}

  // Problems that take turns; the others are compared with the first. One that the library refuses is skipped.
  std::vector<Json> race(const std::vector<Problem>& problems) {
    std::vector<std::unique_ptr<Contestant>> contestants;
    std::vector<Json> cells;
    for (const Problem& problem : problems) {
      try {
        contestants.push_back(std::make_unique<Contestant>(problem, pool(problem.dtype), gpu_, stream_));
        cells.emplace_back();
      } catch (const Error& error) {
        contestants.push_back(nullptr);
        cells.push_back({{"name", problem.name}, {"dtype", dtype_name(problem.dtype)}, {"skipped", error.what()}});
      }
    }
    warm_up(contestants, cells.size() == 1 ? 0.1 : 0.2);
    std::vector<std::vector<double>> times(cells.size());
    for (int round = 0; round < rounds_; ++round)
      for (std::size_t c = 0; c < cells.size(); ++c)
        if (contestants[c] != nullptr) times[c].push_back(contestants[c]->turn());
    const std::string state = clock_and_power(gpu_);
    for (std::size_t c = 0; c < cells.size(); ++c) {
      if (contestants[c] != nullptr) {
        cells[c] = contestants[c]->report(times[c]);
        cells[c]["clock_power"] = state;
        for (const char* rate : {"tflops", "tile_tflops"})
          if (c > 0 && contestants[0] != nullptr)
            cells[c][fmt::format("{}_ratio", rate)] = cells[c][rate].get<double>() / cells[0][rate].get<double>();
      }
      print(cells[c]);
    }
    return cells;
  }

  // Host time of asynchronous calls on tensors so small that the device keeps up.
  Json overhead() {
    Json result = Json::object();
    for (const std::int64_t dim : {64, 60}) {  // rows of 60 elements are copied to the workspace first
      NormalSource source(7);
      Tensors tensors;
      for (const char* name : {"q", "k", "v", "dout"})
        tensors[name] = normal_array(DType::bfloat16, {1, 64, 1, dim}, source);
      for (const char* name : {"out", "dq", "dk", "dv"}) tensors[name] = Array(DType::bfloat16, {1, 64, 1, dim});
      tensors["lse"] = Array(DType::float32, {1, 1, 64});
      const GpuTensors on_gpu(tensors);
      Attention call;
      on_gpu.bind(call, gpu_, stream_);
      for (const Pass pass : {Pass::forward, Pass::backward})
        add_overhead(call, pass, dim == 64 ? "" : "_with_copies", result);
    }
    for (const auto& [name, us] : result.items()) fmt::print("host: {:34} {:6.2f}\n", name, us.get<double>());
    return result;
  }

  // Until the card has reached its power limit.
  void warm_up() {
    const Contestant contestant({.batch = 4, .seqlen = 4096, .heads_q = 16, .heads_kv = 16, .dim = 128},
                                pool(DType::bfloat16), gpu_, stream_);
    keep_busy(contestant, 2.0);
  }

 private:
  // Microseconds of a call with a plan, with a plan whose tensors lie elsewhere each time, and without one.
  void add_overhead(const Attention& call, Pass pass, const std::string& suffix, Json& result) {
    const bool backward = pass == Pass::backward;
    const std::string name = backward ? "backward_" : "";
    const auto succeed = [](hr_status status) {
      if (status != HR_OK) throw std::runtime_error(hr_last_error());
    };
    const hr_attention c = call.c();
    hr_plan* created = nullptr;
    succeed(hr_plan_create(&c, backward ? HR_BACKWARD : HR_FORWARD, &created));
    const std::unique_ptr<hr_plan, decltype(&hr_plan_destroy)> plan(created, hr_plan_destroy);
    const std::size_t bytes = hr_plan_workspace_bytes(created);
    const GpuMemory workspace(bytes);
    const auto planned = [&](const hr_attention& a) { succeed(hr_plan_execute(created, &a, workspace.data(), bytes)); };
    // The inputs have one shape: in turn each is read where the other lies.
    hr_attention other = c;
    std::swap(other.q.data, other.k.data);
    std::swap(other.v.data, other.dout.data);
    int calls = 0;
    result[name + "planned" + suffix + "_us"] = host_us([&] { planned(c); });
    result[name + "planned_elsewhere" + suffix + "_us"] = host_us([&] { planned(calls++ % 2 == 0 ? other : c); });
    result[name + "unplanned" + suffix + "_us"] =
        host_us([&] { succeed(backward ? hr_backward(&c) : hr_forward(&c)); });
  }

  double host_us(const std::function<void()>& call) {
    constexpr int batches = 100, calls = 100;  // a stream takes about 1000 launches before a call waits
    for (int n = 0; n < calls; ++n) call();
    std::vector<double> seconds;
    for (int batch = 0; batch < batches; ++batch) {
      stream_.synchronize();
      seconds.push_back(seconds_of([&] {
                          for (int n = 0; n < calls; ++n) call();
                        }) /
                        calls);
    }
    stream_.synchronize();
    return 1e6 * median(seconds);
  }

  static void keep_busy(const Contestant& contestant, double seconds) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    while (Clock::now() < end) static_cast<void>(contestant.turn());
  }

  static void warm_up(const std::vector<std::unique_ptr<Contestant>>& contestants, double seconds) {
    for (const auto& contestant : contestants)
      if (contestant != nullptr) keep_busy(*contestant, seconds);
  }

  static void print(const Json& cell) {
    const auto text = [&](const char* key) { return cell[key].get<std::string>(); };
    if (cell.contains("skipped")) {
      fmt::print("{:9} {:10} skipped: {}\n", text("dtype"), text("name"), text("skipped"));
    } else {
      const std::string ratio =
          cell.contains("tflops_ratio")
              ? fmt::format("  {:.3f} of plain ({:.3f} on visited tiles)", cell["tflops_ratio"].get<double>(),
                            cell["tile_tflops_ratio"].get<double>())
              : "";
      fmt::print("{:9} {:10} {} n {:5} heads {}/{} d {:3}: {:9.2f} us, {:5.1f} TFLOP/s{}\n", text("dtype"),
                 text("name"), cell["causal"].get<bool>() ? "causal" : "full  ", cell["seqlen"].get<std::int64_t>(),
                 cell["heads"].get<std::int64_t>(), cell["heads_kv"].get<std::int64_t>(),
                 cell["head_dim"].get<std::int64_t>(), cell["us"].get<double>(), cell["tflops"].get<double>(), ratio);
    }
    std::fflush(stdout);
  }

  const Pool& pool(DType dtype) {
    std::unique_ptr<Pool>& pool = pools_[dtype];
    if (pool == nullptr) pool = std::make_unique<Pool>(dtype);
    return *pool;
  }

  const Gpu& gpu_;
  const int rounds_;
  GpuStream stream_;
  std::map<DType, std::unique_ptr<Pool>> pools_;
};

Problem of_grid(std::int64_t seqlen, std::int64_t dim, bool causal) {
  return {.batch = tokens / seqlen,
          .seqlen = seqlen,
          .heads_q = width / dim,
          .heads_kv = width / dim,
          .dim = dim,
          .causal = causal};
}

// The options at two lengths: each beside the plain call.
std::vector<Problem> with_options(std::int64_t seqlen, std::int64_t dim, bool causal) {
  const Problem plain = of_grid(seqlen, dim, causal);
  std::vector<Problem> problems = {plain};
  const auto add = [&](const char* name, const auto& change) {
    Problem problem = plain;
    problem.name = name;
    change(problem);
    problems.push_back(problem);
  };
  add("softcap", [](Problem& p) { p.softcap = 30.0; });
  add("alibi", [](Problem& p) { p.alibi = true; });
  add("copied_k", [](Problem& p) { p.unaligned_k = true; });
  add("gqa", [](Problem& p) { p.heads_kv /= 4; });
  add("fp16", [](Problem& p) { p.dtype = DType::float16; });
  add("float32", [](Problem& p) { p.dtype = DType::float32; });
  if (seqlen >= 16384 && !causal) {
    add("window", [](Problem& p) { p.window_left = 1024, p.window_right = 0; });
    add("window_2", [](Problem& p) { p.window_left = p.window_right = 512; });
  }
  return problems;
}

struct Flags {
  std::string output, commit = "unknown";
  std::vector<std::string> tables = {"overhead", "short", "options", "grid"};
  int device = 0, rounds = 7;
};

void run(const Flags& flags) {
  const Gpu gpu(flags.device);
  Json result = {{"version", version()},
                 {"commit", flags.commit},
                 {"gpu", gpu.name()},
                 {"driver", cuda::version_text(cuda::driver_status().version)}};
  Bench bench(gpu, flags.rounds);
  const auto wanted = [&](const char* table) { return std::ranges::find(flags.tables, table) != flags.tables.end(); };
  const auto race = [&](const char* table, const std::vector<Problem>& problems) {
    for (Json& cell : bench.race(problems)) result[table].push_back(std::move(cell));
  };
  if (wanted("overhead")) result["overhead"] = bench.overhead();
  if (flags.tables != std::vector<std::string>{"overhead"}) bench.warm_up();
  if (wanted("short"))
    for (const std::int64_t dim : {64, 128})
      for (const bool causal : {false, true})
        for (const std::int64_t seqlen : {128, 256, 512, 1024})
          race("short", {{.seqlen = seqlen, .heads_q = 16, .heads_kv = 16, .dim = dim, .causal = causal}});
  if (wanted("options"))
    for (const std::int64_t dim : {64, 128})
      for (const bool causal : {false, true})
        for (const std::int64_t seqlen : {4096, 16384}) race("options", with_options(seqlen, dim, causal));
  if (wanted("grid"))
    for (const std::int64_t dim : {64, 128, 256})
      for (const bool causal : {false, true})
        for (const std::int64_t seqlen : {512, 1024, 2048, 4096, 8192, 16384})
          race("grid", {of_grid(seqlen, dim, causal)});
  std::ofstream file(flags.output);
  file << result.dump(1) << '\n';
  if (!file.flush()) throw std::runtime_error(flags.output + ": cannot be written");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app(
      "Measure the library on a GPU: host overhead of both passes, kernel times of the forward pass, what options "
      "cost.",
      "attention_gpu");
  Flags flags;
  app.add_option("OUTPUT", flags.output, "The JSON file to write")->required();
  app.add_option("--commit", flags.commit, "Of the library, for the record");
  app.add_option("--tables", flags.tables, "Which tables: overhead, short, options, grid")
      ->delimiter(',')
      ->check(CLI::IsMember({"overhead", "short", "options", "grid"}));
  app.add_option("--device", flags.device, "Number of the CUDA device")->check(CLI::NonNegativeNumber);
  app.add_option("--rounds", flags.rounds, "Turns of each contestant")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  try {
    run(flags);
  } catch (const std::exception& error) {
    fmt::print(stderr, "attention_gpu: error: {}\n", error.what());
    return 1;
  }
}
