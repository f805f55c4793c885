// headrace demo: attention of a real transformer, checked head by head, then stretched to long sequences.
#include "demo.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>

#include "CLI/CLI.hpp"
#include "command.hpp"
#include "contest.hpp"
#include "flags.hpp"
#include "fmt/format.h"
#include "rounded_attention.hpp"
#include "safetensors.hpp"

namespace headrace::tool {
namespace {

using Json = nlohmann::json;

struct DemoFlags {
  std::string data, report, blas;
  std::vector<std::int64_t> lengths = {1024, 2048, 4096, 8192, 16384, 32768, 65536};
  int threads = 0;
};

// The largest; NaN if one is.
double largest(std::initializer_list<double> values) {
  double result = 0.0;
  for (const double value : values)
    if (!(value <= result) && !std::isnan(result)) result = value;
  return result;
}

// The sample of the source tree, or the installed one.
std::string find_data() {
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path candidates[] = {HEADRACE_SAMPLE,
                                              program.parent_path().parent_path() / HEADRACE_INSTALLED_SAMPLE};
  for (const std::filesystem::path& candidate : candidates)
    if (std::filesystem::exists(candidate, error)) return candidate;
  throw FileError(fmt::format("{}: the sample is not there; give --data FILE", candidates[0].string()));
}

Tensors read_sample(SafetensorsReader& file) {
  Tensors sample;
  for (const char* name : {"q", "k", "v"}) {
    sample[name] = file.read(name);
    const Array& array = sample[name];
    const bool number = array.dtype == DType::float16 || array.dtype == DType::bfloat16 ||
                        array.dtype == DType::float32 || array.dtype == DType::float64;
    if (!number || array.shape.size() != 4 || array.size() == 0 || array.shape != sample["q"].shape)
      throw FileError(
          fmt::format("{}: {}: is {} {}; q, k and v must be floating-point [layers, tokens, heads, dim], "
                      "all of one shape, none of it 0",
                      file.path(), name, dtype_name(array.dtype), to_string(array.shape)));
  }
  return sample;
}

// Sums of one head of a [layers, tokens, heads, dim] tensor.
double relative_error(const Array& computed, const Array& expected, std::int64_t layer, std::int64_t head) {
  const std::int64_t tokens = expected.shape[1], heads = expected.shape[2], dim = expected.shape[3];
  double error = 0.0, size = 0.0;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t row = ((layer * tokens + i) * heads + head) * dim;
    for (std::int64_t c = row; c < row + dim; ++c) {
      error += std::pow(computed.at(c) - expected.at(c), 2);
      size += std::pow(expected.at(c), 2);
    }
  }
  return error == 0.0 ? 0.0 : std::sqrt(error / size);
}

// Of one head of a [layers, heads, tokens] tensor.
double absolute_error(const Array& computed, const Array& expected, std::int64_t layer, std::int64_t head) {
  const std::int64_t heads = expected.shape[1], tokens = expected.shape[2];
  double error = 0.0;
  for (std::int64_t i = 0; i < tokens; ++i) {
    const std::int64_t at = (layer * heads + head) * tokens + i;
    const double difference = std::abs(computed.at(at) - expected.at(at));
    if (!(difference <= error)) error = difference;  // a NaN stays
  }
  return error;
}

Errors errors_of_head(const Tensors& computed, const Tensors& exact, std::int64_t layer, std::int64_t head) {
  Errors errors;
  for (const auto& [name, member] : error_kinds)
    errors.*member =
        (member == &Errors::lse ? absolute_error : relative_error)(computed.at(name), exact.at(name), layer, head);
  return errors;
}

double mean_peak(const Array& peak, std::int64_t layer, std::int64_t head) {
  const std::int64_t tokens = peak.shape[2];
  double sum = 0.0;
  for (std::int64_t i = 0; i < tokens; ++i) sum += peak.at((layer * peak.shape[1] + head) * tokens + i);
  return sum / static_cast<double>(tokens);
}

// Forward and backward of every layer at once: the layers are the batch.
std::vector<HeadErrors> check_heads(const Tensors& sample, DType dtype, bool causal, int threads) {
  Tensors tensors;
  for (const char* name : {"q", "k", "v"}) tensors[name] = convert(sample.at(name), dtype);
  const Shape shape = tensors["q"].shape;
  NormalSource source(1);
  tensors["dout"] = normal_array(dtype, shape, source);
  const Tensors standard = rounded_attention(tensors, causal);
  tensors["lse"] = Array(DType::float32, {shape[0], shape[2], shape[1]});
  for (const char* name : {"out", "dq", "dk", "dv"}) tensors[name] = Array(dtype, shape);
  Attention options;
  options.causal = causal ? Causal::bottom_right : Causal::none;
  options.threads = threads;
  Attention call = options;
  bind_tensors(call, tensors);
  forward(call);
  backward(call);
  const Tensors exact = reference(options, tensors, true);

  std::vector<HeadErrors> heads;
  for (std::int64_t layer = 0; layer < shape[0]; ++layer)
    for (std::int64_t head = 0; head < shape[2]; ++head)
      heads.push_back({.layer = layer,
                       .head = head,
                       .ours = errors_of_head(tensors, exact, layer, head),
                       .standard = errors_of_head(standard, exact, layer, head),
                       .peak = mean_peak(standard.at("peak"), layer, head)});
  return heads;
}

Json to_json(const std::vector<HeadErrors>& heads) {
  Json result = Json::array();
  for (const HeadErrors& head : heads) {
    Json item = {{"layer", head.layer}, {"head", head.head}, {"peak", head.peak}};
    for (const auto& [name, member] : error_kinds) {
      item["ours"][name] = head.ours.*member;
      item["standard"][name] = head.standard.*member;
    }
    result.push_back(std::move(item));
  }
  return result;
}

std::vector<HeadErrors> heads_from_json(const Json& json) {
  std::vector<HeadErrors> result;
  for (const Json& item : json) {
    HeadErrors head{
        .layer = item["layer"], .head = item["head"], .ours = {}, .standard = {}, .peak = number_or_nan(item["peak"])};
    for (const auto& [name, member] : error_kinds) {
      head.ours.*member = number_or_nan(item["ours"][name]);
      head.standard.*member = number_or_nan(item["standard"][name]);
    }
    result.push_back(head);
  }
  return result;
}

Errors promise(DType dtype) {
  const Contract c = contract(dtype);
  return {.out = c.output, .dq = c.gradient, .dk = c.gradient, .dv = c.gradient, .lse = c.lse};
}

std::string verdict(const ErrorsByHead& errors) {
  if (errors.broken() > 0) return fmt::format("BROKEN by {} heads", errors.broken());
  const std::size_t beyond = errors.beyond_promise().size();
  return beyond == 0 ? "ok" : fmt::format("ok, {} head{} by rule 2", beyond, beyond == 1 ? "" : "s");
}

// Heads outside the promise for ordinary inputs, where only the comparison with standard attention can tell
// whether that is the head or the library.
void print_beyond_promise(const DemoResult& result) {
  bool first = true;
  for (const ErrorsByHead& errors : result.errors) {
    for (const HeadErrors& head : errors.beyond_promise()) {
      if (std::exchange(first, false))
        fmt::print(
            "\nRule 2: on inputs harder than N(0, 1), at most twice the error of standard attention in the same "
            "dtype.\n"
            "A head that looks at nearly one key only has gradients that are differences of nearly equal numbers.\n");
      fmt::print("  {} {}, layer {} head {} (largest probability {:.4f}): gradient {:.1e}, standard attention {:.1e}\n",
                 errors.dtype, errors.causal ? "causal" : "full", head.layer + 1, head.head + 1, head.peak,
                 head.ours.worst_gradient(), head.standard.worst_gradient());
    }
  }
}

void run_checks(const Tensors& sample, DemoResult& result, Progress& progress) {
  fmt::print("Largest error of {} heads against float64, and what the contract promises (out / gradients / lse)\n\n",
             result.layers * result.heads);
  fmt::print("{:<9} {:<7} {:>9} {:>9} {:>9} {:>9} {:>9}   promised\n", "dtype", "mask", "out", "dq", "dk", "dv", "lse");
  for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
    for (const bool causal : {false, true}) {
      const char* mask = causal ? "causal" : "full";
      progress.show(fmt::format("checking {} {}", dtype_name(dtype), mask));
      // In a child, since this process must stay without threads to measure memory later.
      const Json heads = in_child([&] { return to_json(check_heads(sample, dtype, causal, result.threads)); });
      progress.clear();
      const ErrorsByHead errors{
          .dtype = dtype_name(dtype), .causal = causal, .promised = promise(dtype), .heads = heads_from_json(heads)};
      fmt::print("{:<9} {:<7}", errors.dtype, mask);
      for (const auto& [name, member] : error_kinds) fmt::print(" {:>9.1e}", errors.worst(member));
      fmt::print("   {:.0e} / {:.0e} / {:.0e}  {}\n", errors.promised.out, errors.promised.dq, errors.promised.lse,
                 verdict(errors));
      std::fflush(stdout);
      result.errors.push_back(errors);
    }
  }
  print_beyond_promise(result);
}

double standard_deviation(const Array& array) {
  double sum = 0.0, squares = 0.0;
  for (std::int64_t i = 0; i < array.size(); ++i) sum += array.at(i), squares += array.at(i) * array.at(i);
  const double count = static_cast<double>(array.size()), mean = sum / count;
  return std::sqrt(std::max(0.0, squares / count - mean * mean));
}

// Token t of the long sequence is token t mod tokens of the sample, plus noise of its own: activations as
// the model makes them, but no two rows alike.
Array stretch(const Array& sample, std::int64_t layer, std::int64_t head, std::int64_t seqlen, std::uint64_t seed) {
  const std::int64_t tokens = sample.shape[1], heads = sample.shape[2], dim = sample.shape[3];
  const double noise = stretch_noise * standard_deviation(sample);
  NormalSource source(seed);
  Array result(DType::float32, {1, seqlen, 1, dim});
  for (std::int64_t t = 0; t < seqlen; ++t)
    for (std::int64_t c = 0; c < dim; ++c)
      result.set(t * dim + c,
                 sample.at(((layer * tokens + t % tokens) * heads + head) * dim + c) + noise * source.next());
  return result;
}

void print_stretched(const Json& row) {
  const Json &ours = row["headrace"], &standard = row["standard"];
  fmt::print("{:>7} {:>10} {:>10} {:>9.1e}   ", row["seqlen"].get<std::int64_t>(),
             format_seconds(ours["seconds"].get<double>()), format_bytes(ours["peak_bytes"].get<double>()),
             number_or_nan(ours["error"]));
  if (standard.contains("skipped"))
    fmt::print("{:>22}\n", standard["skipped"].get<std::string>() + ": skipped");
  else
    fmt::print("{:>10} {:>11} {:>8.1f}x\n", format_seconds(standard["seconds"].get<double>()),
               format_bytes(standard["peak_bytes"].get<double>()), row["speedup"].get<double>());
  std::fflush(stdout);
}

void run_stretched(const Tensors& sample, const DemoFlags& flags, DemoResult& result, Progress& progress) {
  const BlasProbe blas = probe_blas(flags.blas);
  if (!blas.problem.empty() && !flags.blas.empty()) throw FileError(blas.problem);
  result.blas = blas.description;
  Contest contest;
  contest.shape = {.heads = 1, .seqlen = 1, .dim = result.dim, .causal = false};
  contest.threads = result.threads;
  contest.preallocate = true;  // the stronger yardstick: fresh memory is slow when first touched
  contest.rounds = 3;
  contest.budget_seconds = 4.0;
  contest.blas = flags.blas;
  contest.standard_problem = blas.problem.empty() ? "" : "no BLAS";
  contest.standard_max_bytes = available_memory() / 2;
  contest.inputs = [&](const Contest& c) {
    Tensors tensors;
    std::uint64_t seed = 0;
    for (const char* name : {"q", "k", "v"})
      tensors[name] = stretch(sample.at(name), result.stretched_layer, result.stretched_head, c.shape.seqlen, ++seed);
    return tensors;
  };
  fmt::print(
      "\nThe same activations, stretched: head {} of layer {}, float32, every query sees every key.\n"
      "Standard attention: {}\n\n",
      result.stretched_head + 1, result.stretched_layer + 1,
      blas.problem.empty() ? blas.description : "not measured: " + blas.problem);
  fmt::print("{:>7} {:>10} {:>10} {:>9}   {:>10} {:>11} {:>9}\n", "tokens", "Headrace", "memory", "error", "standard",
             "memory", "faster");
  for (const std::int64_t seqlen : flags.lengths) {
    contest.shape.seqlen = seqlen;
    const Json row = run_contest(contest, progress);
    progress.clear();
    print_stretched(row);
    result.stretched.push_back(row);
  }
}

int demo(const DemoFlags& flags) {
  const auto start = std::chrono::steady_clock::now();
  if (std::ranges::any_of(flags.lengths, [](std::int64_t n) { return n < 1 || n > (std::int64_t{1} << 20); }))
    throw UsageError("--lengths must be from 1 to 1048576");
  if (flags.threads < 0 || flags.threads > 1024) throw UsageError("--threads must be from 1 to 1024");
  SafetensorsReader file(flags.data.empty() ? find_data() : flags.data);
  const Tensors sample = read_sample(file);
  const Shape& shape = sample.at("q").shape;
  DemoResult result;
  result.metadata = file.metadata();
  result.machine = Json::parse(info());
  result.layers = shape[0], result.tokens = shape[1], result.heads = shape[2], result.dim = shape[3];
  result.stretched_layer = result.layers / 2;
  result.threads = flags.threads > 0 ? flags.threads : default_threads();
  result.stretched_contract = contract(DType::float32).output;

  const auto described = [&](const char* key) {
    const auto found = result.metadata.find(key);
    return found == result.metadata.end() ? std::string("not said") : found->second;
  };
  fmt::print(
      "model   {}\ntext    {}\nshape   {} layers, {} tokens, {} heads of dimension {}\nmachine {} threads, {}\n\n",
      described("model"), described("text"), result.layers, result.tokens, result.heads, result.dim, result.threads,
      result.machine["simd"]["chosen"].get<std::string>());
  Progress progress;
  run_checks(sample, result, progress);
  run_stretched(sample, flags, result, progress);
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();

  const std::int64_t broken = result.broken();
  if (broken == 0)
    fmt::print("\nAll {} checks are within the accuracy contract. {:.0f} s.\n", result.checked(), result.seconds);
  else
    fmt::print("\n{} of {} checks are OUTSIDE the accuracy contract.\n", broken, result.checked());
  if (!flags.report.empty()) {
    std::ofstream page(flags.report);
    page << html_report(result);
    if (!page.flush()) throw FileError(fmt::format("{}: cannot be written", flags.report));
    fmt::print("Report: {}\n", flags.report);
  }
  return broken == 0 ? exit_ok : exit_check_failed;
}

}  // namespace

double Errors::worst_gradient() const { return largest({dq, dk, dv}); }

double ErrorsByHead::worst(double Errors::*member) const {
  double result = 0.0;
  for (const HeadErrors& head : heads) result = largest({result, head.ours.*member});
  return result;
}

bool ErrorsByHead::within_promise(const HeadErrors& head) const {
  return std::ranges::all_of(error_kinds,
                             [&](const ErrorKind& e) { return head.ours.*e.member <= promised.*e.member; });
}

bool ErrorsByHead::within_contract(const HeadErrors& head) const {
  return std::ranges::all_of(error_kinds, [&](const ErrorKind& e) {
    return head.ours.*e.member <= std::max(promised.*e.member, 2.0 * head.standard.*e.member);
  });
}

std::vector<HeadErrors> ErrorsByHead::beyond_promise() const {
  std::vector<HeadErrors> result;
  std::ranges::copy_if(heads, std::back_inserter(result), [&](const HeadErrors& h) { return !within_promise(h); });
  return result;
}

std::int64_t ErrorsByHead::broken() const {
  return std::ranges::count_if(heads, [&](const HeadErrors& head) { return !within_contract(head); });
}

std::int64_t DemoResult::broken() const {
  std::int64_t count = 0;
  for (const ErrorsByHead& e : errors) count += e.broken();
  for (const Json& row : stretched)
    if (!(number_or_nan(row["headrace"]["error"]) <= stretched_contract)) ++count;
  return count;
}

std::int64_t DemoResult::checked() const {
  std::int64_t count = static_cast<std::int64_t>(stretched.size());
  for (const ErrorsByHead& e : errors) count += static_cast<std::int64_t>(e.heads.size());
  return count;
}

void add_demo(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("demo", "Attention of a real transformer: every head checked, then 64k tokens");
  auto flags = std::make_shared<DemoFlags>();
  sub->add_option("--report", flags->report, "Write a page with plots, for any browser, to FILE.html")
      ->type_name("FILE");
  sub->add_option("--data", flags->data,
                  "Captured q, k, v [layers, tokens, heads, dim] (default: the sample of all-MiniLM-L6-v2)")
      ->type_name("FILE");
  sub->add_option("--lengths", flags->lengths, "Lengths to stretch to, with commas between")
      ->delimiter(',')
      ->capture_default_str()
      ->type_name("N,...");
  add_integer(*sub, "--threads", flags->threads, "Threads (default: one a core)");
  sub->add_option("--blas", flags->blas, "Shared library with cblas_sgemm (default: OpenBLAS)")->type_name("FILE");
  sub->footer(
      "Every head of every layer runs in float32, float16 and bfloat16, forward and backward, full and\n"
      "causal, and is compared with float64. Then one head is stretched to long sequences: token t is token\n"
      "t mod N of the sample plus noise of a tenth of the tensor's standard deviation. Takes a minute or two.\n\n"
      "Examples:\n"
      "  headrace demo\n"
      "  headrace demo --report demo.html\n"
      "  headrace demo --data mine.safetensors --lengths 4096,131072");
  sub->callback([&command, flags] { command = [flags] { return demo(*flags); }; });
}

}  // namespace headrace::tool
