// headrace bench: streaming against standard attention on this machine, over sequence lengths.
#include <algorithm>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "command.hpp"
#include "contest.hpp"
#include "flags.hpp"
#include "fmt/format.h"
#include "gpu.hpp"
#include "nlohmann/json.hpp"
#include "safetensors.hpp"

namespace headrace::tool {
namespace {

using OrderedJson = nlohmann::ordered_json;

struct BenchFlags {
  std::int64_t heads = 2, dim = 64;
  std::vector<std::int64_t> lengths = {512, 1024, 2048, 4096, 8192, 16384};
  std::string dtype = "float32", device = "cpu", json, blas;
  bool causal = false, backward = false, preallocate = false;
  int threads = 0, repeats = 0;
  std::uint64_t max_memory = 0;
};

Tensors normal_inputs(const Contest& contest) {
  NormalSource source(static_cast<std::uint64_t>(contest.shape.seqlen));
  const Shape shape = {1, contest.shape.seqlen, contest.shape.heads, contest.shape.dim};
  Tensors tensors;
  for (const char* name : {"q", "k", "v"}) tensors[name] = normal_array(contest.dtype, shape, source);
  if (contest.backward) tensors["dout"] = normal_array(contest.dtype, shape, source);
  return tensors;
}

void print_heading() {
  fmt::print("{:>8} | {:>10} {:>8} {:>10} {:>8} | {:>10} {:>8} {:>10} {:>8} |\n", "", "Headrace", "", "", "",
             "standard", "", "", "");
  fmt::print("{:>8} | {:>10} {:>8} {:>10} {:>8} | {:>10} {:>8} {:>10} {:>8} | {:>7}\n", "seqlen", "time", "GFLOP/s",
             "memory", "error", "time", "GFLOP/s", "memory", "error", "faster");
}

std::string run_text(const OrderedJson& run) {
  return fmt::format("{:>10} {:>8.1f} {:>10} {:>8.1e}", format_seconds(run["seconds"].get<double>()),
                     run["gflops"].get<double>(), format_bytes(run["peak_bytes"].get<double>()),
                     number_or_nan(run["error"]));
}

void print_row(const OrderedJson& row) {
  const OrderedJson& standard = row["standard"];
  const bool skipped = standard.contains("skipped");
  fmt::print("{:>8} | {} | {:>39} | {:>7}\n", row["seqlen"].get<std::int64_t>(), run_text(row["headrace"]),
             skipped ? standard["skipped"].get<std::string>() + ": skipped" : run_text(standard),
             skipped ? "" : fmt::format("{:.2f}x", row["speedup"].get<double>()));
  std::fflush(stdout);
}

void validate(const BenchFlags& flags) {
  const DType dtype = parse_dtype(flags.dtype);
  if (dtype != DType::float32 && dtype != DType::float16 && dtype != DType::bfloat16)
    throw UsageError(fmt::format("--dtype: {} is not measured; give float32, float16 or bfloat16", flags.dtype));
  if (flags.heads < 1 || flags.dim < 1 || flags.dim > 512)
    throw UsageError("--heads must be at least 1 and --dim from 1 to 512");
  if (std::ranges::any_of(flags.lengths, [](std::int64_t n) { return n < 1 || n > (std::int64_t{1} << 24); }))
    throw UsageError("--lengths must be from 1 to 16777216");
  if (flags.threads < 0 || flags.threads > 1024) throw UsageError("--threads must be from 1 to 1024");
  if (flags.repeats < 0) throw UsageError("--repeats must be at least 1");
}

int bench(const BenchFlags& flags) {
  validate(flags);
  std::optional<Gpu> gpu;
  if (const std::optional<int> index = parse_device(flags.device)) gpu.emplace(*index);
  const BlasProbe blas = gpu ? BlasProbe{"", "not on a GPU"} : probe_blas(flags.blas);
  if (!blas.problem.empty() && !flags.blas.empty()) throw FileError(blas.problem);

  Contest contest;
  contest.shape = {.heads = flags.heads, .seqlen = 1, .dim = flags.dim, .causal = flags.causal};
  contest.dtype = parse_dtype(flags.dtype);
  contest.threads = flags.threads > 0 ? flags.threads : default_threads();
  contest.backward = flags.backward;
  contest.preallocate = flags.preallocate;
  if (flags.repeats > 0) contest.rounds = flags.repeats, contest.budget_seconds = 1e9;
  contest.blas = flags.blas;
  contest.standard_problem = blas.problem.empty() ? "" : "no BLAS";
  contest.standard_max_bytes = flags.max_memory > 0 ? flags.max_memory : available_memory() / 2;
  contest.inputs = normal_inputs;

  OrderedJson report = {{"version", version()},
                        {"machine", OrderedJson::parse(info())},
                        {"pass", flags.backward ? "backward" : "forward"},
                        {"dtype", flags.dtype},
                        {"heads", flags.heads},
                        {"dim", flags.dim},
                        {"causal", flags.causal},
                        {"threads", contest.threads},
                        {"device", gpu ? gpu->name() : "cpu"},
                        {"preallocate", flags.preallocate},
                        {"blas", blas.description},
                        {"standard_max_bytes", contest.standard_max_bytes},
                        {"rows", OrderedJson::array()}};
  const bool table = flags.json != "-";
  if (table) {
    const std::string where =
        gpu ? gpu->name()
            : fmt::format("{} thread{}, SIMD {}", contest.threads, contest.threads == 1 ? "" : "s",
                          report["machine"]["simd"]["chosen"].get<std::string>());
    fmt::print("{} {}{}, {} head{} of dimension {}, {}\n", flags.dtype, flags.causal ? "causal " : "",
               flags.backward ? "backward" : "forward", flags.heads, flags.heads == 1 ? "" : "s", flags.dim, where);
    fmt::print("standard attention: {}\n\n", blas.problem.empty() ? blas.description : "not measured: " + blas.problem);
    print_heading();
  }
  Progress progress;
  for (const std::int64_t seqlen : flags.lengths) {
    contest.shape.seqlen = seqlen;
    const OrderedJson row = gpu ? run_on_gpu(contest, *gpu) : run_contest(contest, progress);
    report["rows"].push_back(row);
    progress.clear();
    if (table) print_row(row);
  }
  if (table)
    fmt::print(
        "\ntime: median of {}. memory: {}{}.\n"
        "error: relative, of {} of sampled rows, against float64.\n",
        gpu ? "the device's runs" : "alternating runs",
        gpu ? "the workspace" : "peak of a fresh process above the tensors",
        flags.backward ? ", forward and backward" : "", flags.backward ? "out and dq" : "out");
  if (flags.json == "-") {
    fmt::print("{}\n", report.dump(2));
  } else if (!flags.json.empty()) {
    std::ofstream file(flags.json);
    file << report.dump(2) << '\n';
    if (!file.flush()) throw FileError(fmt::format("{}: cannot be written", flags.json));
  }
  return exit_ok;
}

}  // namespace

void add_bench(CLI::App& app, Command& command) {
  CLI::App* sub =
      app.add_subcommand("bench", "Measure this machine: streaming against standard attention over sequence lengths");
  auto flags = std::make_shared<BenchFlags>();
  sub->add_option("--lengths", flags->lengths, "Sequence lengths, with commas between")
      ->delimiter(',')
      ->capture_default_str()
      ->type_name("N,...");
  add_integer(*sub, "--heads", flags->heads, "Heads")->capture_default_str();
  add_integer(*sub, "--dim", flags->dim, "Dimension of a head")->capture_default_str();
  sub->add_option("--dtype", flags->dtype,
                  "float32, float16 or bfloat16 (which standard attention converts to float32 first)")
      ->capture_default_str()
      ->type_name("T");
  sub->add_option("--device", flags->device, "cpu, cuda (the first GPU) or cuda:N; on a GPU Headrace runs alone")
      ->capture_default_str()
      ->type_name("D");
  sub->add_flag("--causal", flags->causal, "Hide keys after the query");
  sub->add_flag("--backward", flags->backward, "Time the backward pass");
  add_integer(*sub, "--threads", flags->threads, "Threads (default: one a core)");
  add_integer(*sub, "--repeats", flags->repeats, "Rounds (default: 5, or as many as fit into 20 s a length)");
  sub->add_flag("--preallocate", flags->preallocate,
                "Make plan, workspace and score matrix once, outside the clock, not in every call");
  sub->add_option("--max-memory", flags->max_memory,
                  "Skip standard attention where its scores take more, e.g. 8GiB (default: half of what is free)")
      ->transform(CLI::AsSizeValue(false))
      ->type_name("SIZE");
  sub->add_option("--blas", flags->blas, "Shared library with cblas_sgemm, e.g. libmkl_rt.so (default: OpenBLAS)")
      ->type_name("FILE");
  sub->add_option("--json", flags->json, "Write the results to FILE as JSON too; - prints them instead of the table")
      ->type_name("FILE");
  sub->footer(
      "Standard attention keeps the scores of all heads in memory: S = q k^T by BLAS, softmax in place,\n"
      "vectorised as Headrace's own, P v by BLAS; with --causal the hidden half is multiplied too. It uses\n"
      "as many threads, spread over heads and rows or within each product, whichever is faster.\n\n"
      "Examples:\n"
      "  headrace bench\n"
      "  headrace bench --heads 1 --dim 128 --lengths 2048,65536 --causal\n"
      "  headrace bench --dtype bfloat16 --heads 16 --dim 128 --device cuda\n"
      "  headrace bench --dtype bfloat16 --backward --json bench.json");
  sub->callback([&command, flags] { command = [flags] { return bench(*flags); }; });
}

}  // namespace headrace::tool
