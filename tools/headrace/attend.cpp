// headrace attend: one attention call on tensors from a file.
#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "array.hpp"
#include "command.hpp"
#include "contract.hpp"
#include "flags.hpp"
#include "fmt/format.h"
#include "gpu.hpp"
#include "nlohmann/json.hpp"
#include "safetensors.hpp"

namespace headrace::tool {
namespace {

using OrderedJson = nlohmann::ordered_json;

struct AttendFlags {
  std::string input, output, dtype, device = "cpu";
  std::vector<std::string> names;
  bool check = false, backward = false, dbias = false, dsinks = false, json = false;
  AttentionFlags options;
};

constexpr const char* required_inputs[] = {"q", "k", "v"};
constexpr const char* optional_inputs[] = {"bias",         "mask",         "alibi_slopes", "sinks",    "block_mask",
                                           "cu_seqlens_q", "cu_seqlens_k", "seqused_q",    "seqused_k"};
constexpr const char* outputs[] = {"out", "lse", "dq", "dk", "dv", "dbias", "dsinks"};

// --name KEY=NAME: where to find an input in the file; an empty NAME means nowhere.
class TensorNames {
 public:
  explicit TensorNames(const std::vector<std::string>& assignments) {
    for (const std::string& text : assignments) {
      const std::size_t split = text.find('=');
      const std::string key = text.substr(0, split);
      if (split == std::string::npos) throw UsageError(fmt::format("--name: {} has no '='; give KEY=NAME", text));
      const auto known = [&](const auto& keys) { return std::ranges::find(keys, key) != std::end(keys); };
      const char* gradients[] = {"dout", "dlse"};
      if (!known(required_inputs) && !known(optional_inputs) && !known(gradients))
        throw UsageError(fmt::format("--name: {} is no input; the inputs are {}, {}, dout, dlse", key,
                                     fmt::join(required_inputs, ", "), fmt::join(optional_inputs, ", ")));
      given_[key] = text.substr(split + 1);
    }
  }

  [[nodiscard]] bool given(const std::string& key) const { return given_.contains(key); }
  [[nodiscard]] std::string of(const std::string& key) const { return given(key) ? given_.at(key) : key; }

 private:
  std::map<std::string, std::string> given_;
};

// Arrays of NumPy and PyTorch count in int64 by default; the library wants int32.
Array metadata_as_int32(Array array, const std::string& name) {
  if (array.dtype != DType::int64) return array;
  Array result(DType::int32, array.shape);
  const auto* source = reinterpret_cast<const std::int64_t*>(array.bytes.data());
  auto* target = reinterpret_cast<std::int32_t*>(result.bytes.data());
  for (std::int64_t i = 0; i < array.size(); ++i) {
    if (source[i] < std::numeric_limits<std::int32_t>::min() || source[i] > std::numeric_limits<std::int32_t>::max())
      throw FileError(fmt::format("{}: {} at {} does not fit int32", name, source[i], i));
    target[i] = static_cast<std::int32_t>(source[i]);
  }
  return result;
}

Tensors read_inputs(const AttendFlags& flags) {
  const TensorNames names(flags.names);
  SafetensorsReader file(flags.input);
  Tensors tensors;
  const auto read = [&](const char* key, bool required) {
    const std::string name = names.of(key);
    if (required || (names.given(key) ? !name.empty() : file.contains(name))) tensors[key] = file.read(name);
  };
  for (const char* key : required_inputs) read(key, true);
  for (const char* key : optional_inputs) read(key, false);
  if (flags.backward) {
    read("dout", true);
    read("dlse", false);
  }

  for (const char* key : {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"})
    if (tensors.contains(key)) tensors[key] = metadata_as_int32(std::move(tensors[key]), key);
  for (const char* key : {"q", "k", "v", "dout"}) {
    if (!tensors.contains(key)) continue;
    Array& array = tensors[key];
    const bool number = array.dtype != DType::boolean && array.dtype != DType::int32 && array.dtype != DType::int64;
    if (!number)
      throw FileError(fmt::format("{}: dtype is {}; it must be float32, float16, bfloat16 or float64", key,
                                  dtype_name(array.dtype)));
    if (array.shape.size() < 3 || array.shape.size() > 4)
      throw FileError(
          fmt::format("{}: shape is {}; it must be [batch, seqlen, heads, dim], or [total, heads, dim] "
                      "with cu_seqlens",
                      key, to_string(array.shape)));
    if (!flags.dtype.empty()) array = convert(array, parse_dtype(flags.dtype));
  }
  // A bias is float32 or of the type of q: what was neither before --dtype changed q is widened with it.
  if (!flags.dtype.empty() && tensors.contains("bias") && tensors["bias"].dtype != DType::float32)
    tensors["bias"] = convert(tensors["bias"], tensors["q"].dtype);
  return tensors;
}

void add_outputs(const AttendFlags& flags, Tensors& tensors) {
  const Array &q = tensors["q"], &v = tensors["v"];
  Shape out = q.shape;
  out.back() = v.shape.back();
  Shape lse = q.shape;  // [batch, heads, seqlen] or [heads, total]
  lse.pop_back();
  std::swap(lse[lse.size() - 1], lse[lse.size() - 2]);
  tensors["out"] = Array(q.dtype, out);
  tensors["lse"] = Array(q.dtype == DType::float64 ? DType::float64 : DType::float32, lse);
  if (!flags.backward) return;
  const auto like = [&](const char* name, const char* source) {
    if (tensors.contains(source)) tensors[name] = Array(tensors[source].dtype, tensors[source].shape);
  };
  like("dq", "q");
  like("dk", "k");
  like("dv", "v");
  if (flags.dbias) like("dbias", "bias");
  if (flags.dsinks) like("dsinks", "sinks");
}

double seconds(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void validate_flags(const AttendFlags& flags) {
  if (flags.output.empty() && !flags.check)
    throw UsageError("attend: nothing would come of it; give --output FILE, --check, or both");
  if ((flags.dbias || flags.dsinks) && !flags.backward)
    throw UsageError("--dbias and --dsinks are gradients; give --backward with them");
  if (!flags.dtype.empty()) {
    const DType dtype = parse_dtype(flags.dtype);
    if (dtype == DType::boolean || dtype == DType::int32 || dtype == DType::int64)
      throw UsageError(
          fmt::format("--dtype: {} is no type of q; give float32, float16, bfloat16 or float64", flags.dtype));
  }
}

OrderedJson summary(const AttendFlags& flags, const Tensors& tensors) {
  OrderedJson inputs = OrderedJson::object();
  for (const auto& [name, array] : tensors)
    if (std::ranges::find(outputs, name) == std::end(outputs))
      inputs[name] = {{"shape", array.shape}, {"dtype", dtype_name(array.dtype)}};
  return {{"input", flags.input}, {"inputs", inputs}, {"options", flags.options.summary()}};
}

void print_summary(const AttendFlags& flags, const Tensors& tensors) {
  for (const auto* keys : {&required_inputs[0], &required_inputs[1], &required_inputs[2]})
    fmt::print("{:<13} {} {}\n", *keys, to_string(tensors.at(*keys).shape), dtype_name(tensors.at(*keys).dtype));
  for (const char* key : optional_inputs)
    if (const auto found = tensors.find(key); found != tensors.end())
      fmt::print("{:<13} {} {}\n", key, to_string(found->second.shape), dtype_name(found->second.dtype));
  if (const std::string options = flags.options.summary(); !options.empty())
    fmt::print("{:<13} {}\n", "options", options);
}

// Both passes, with their seconds into the report.
void run_on_cpu(const AttendFlags& flags, const Tensors& tensors, OrderedJson& report) {
  Attention call = flags.options.attention();
  bind_tensors(call, tensors);
  report["seconds"]["forward"] = seconds([&] { forward(call); });
  if (flags.backward) report["seconds"]["backward"] = seconds([&] { headrace::backward(call); });
}

// The same with copies of the tensors on a GPU. The seconds are the device's, of a run after one that loads the kernel;
// copies are not counted.
void run_on_gpu(const AttendFlags& flags, const Gpu& gpu, Tensors& tensors, OrderedJson& report) {
  const GpuStream stream;
  const GpuTensors on_gpu(tensors);
  Attention call = flags.options.attention();
  on_gpu.bind(call, gpu, stream);
  report["device"] = gpu.name();
  const GpuPass pass(call, Pass::forward);
  pass();
  report["seconds"]["forward"] = stream.seconds_of([&] { pass(); });
  if (flags.backward) {
    headrace::backward(call);
    report["seconds"]["backward"] = stream.seconds_of([&] { headrace::backward(call); });
  }
  for (const char* name : outputs)
    if (const auto found = tensors.find(name); found != tensors.end()) on_gpu.read(name, found->second);
}

int attend(const AttendFlags& flags) {
  validate_flags(flags);
  std::optional<Gpu> gpu;  // asked for before anything is read: without one nothing else matters
  if (const std::optional<int> index = parse_device(flags.device)) gpu.emplace(*index);
  Tensors tensors = read_inputs(flags);
  add_outputs(flags, tensors);

  OrderedJson report = summary(flags, tensors);
  if (!flags.json) print_summary(flags, tensors);
  if (gpu)
    run_on_gpu(flags, *gpu, tensors, report);
  else
    run_on_cpu(flags, tensors, report);
  if (!flags.json && gpu) fmt::print("{:<13} {}\n", "device", gpu->name());
  if (!flags.json)
    for (const auto& [pass, time] : report["seconds"].items())
      fmt::print("{:<13} {:.3f} ms\n", pass, 1e3 * time.get<double>());

  bool ok = true;
  if (flags.check) {
    if (!flags.json) fmt::print("\n{:<10} {:>12} {:>12}  against the float64 reference\n", "", "error", "allowed");
    for (const Comparison& result : compare_with_reference(flags.options.attention(), tensors, flags.backward)) {
      ok = ok && result.ok();
      report["check"][result.tensor] = {{"error", result.error}, {"allowed", result.allowed}, {"ok", result.ok()}};
      if (!flags.json)
        fmt::print("{:<10} {:>12.2e} {:>12.2e}  {}{}\n", result.tensor, result.error, result.allowed,
                   result.ok() ? "ok" : "OUTSIDE THE CONTRACT", result.tensor == "lse" ? " (absolute)" : "");
    }
    report["ok"] = ok;
  }

  if (!flags.output.empty()) {
    std::vector<std::pair<std::string, const Array*>> written;
    for (const char* name : outputs)
      if (const auto found = tensors.find(name); found != tensors.end()) written.emplace_back(name, &found->second);
    write_safetensors(
        flags.output, written,
        {{"made_by", fmt::format("headrace {} attend", version())}, {"options", flags.options.summary()}});
    report["output"] = flags.output;
    if (!flags.json) fmt::print("\nwrote {}\n", flags.output);
  }
  if (flags.json) fmt::print("{}\n", report.dump(2));
  return ok ? exit_ok : exit_check_failed;
}

}  // namespace

void add_attend(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand("attend", "Compute attention over q, k, v of a .safetensors file");
  auto flags = std::make_shared<AttendFlags>();
  sub->add_option("FILE", flags->input, "The .safetensors file with q, k and v")->required();
  sub->add_option("-o,--output", flags->output, "Write out and lse, and gradients, to this .safetensors file")
      ->type_name("FILE");
  sub->add_flag("--check", flags->check, "Compare with the float64 reference; exit 1 outside the accuracy contract");
  sub->add_flag("--backward", flags->backward, "Compute the gradients dq, dk, dv too, from dout (and dlse)");
  sub->add_flag("--dbias", flags->dbias, "With --backward: the gradient of bias too");
  sub->add_flag("--dsinks", flags->dsinks, "With --backward: the gradient of sinks too");
  sub->add_option("--dtype", flags->dtype, "Convert q, k, v, dout first: float32, float16, bfloat16 or float64")
      ->type_name("T");
  sub->add_option("--device", flags->device, "cpu, cuda (the first GPU) or cuda:N")->type_name("D");
  sub->add_option("--name", flags->names, "Read input KEY from the tensor called NAME; KEY= leaves it out")
      ->type_name("KEY=NAME")
      ->allow_extra_args(false);
  sub->add_flag("--json", flags->json, "Print a JSON object instead of text");
  flags->options.add_to(*sub);
  sub->footer(
      "Tensors of FILE, by name (others are ignored):\n"
      "  q             [batch, seqlen_q, heads_q, head_dim]     F32, F16, BF16 or F64\n"
      "  k             [batch, seqlen_k, heads_kv, head_dim]    as q\n"
      "  v             [batch, seqlen_k, heads_kv, value_dim]   as q\n"
      "  bias          [1|batch, 1|heads_q, 1|seqlen_q, 1|seqlen_k]   F32 or as q\n"
      "  mask          the shapes of bias                       BOOL, true = visible\n"
      "  alibi_slopes  [heads_q] or [batch, heads_q]            F32\n"
      "  sinks         [heads_q]                                F32\n"
      "  block_mask    [1|batch, 1|heads_q, blocks_q, blocks_k] BOOL, with --block-q and --block-k\n"
      "  cu_seqlens_q, cu_seqlens_k   [batch + 1]               I32; then q, k, v are [total, heads, dim]\n"
      "  seqused_q, seqused_k         [batch]                   I32\n"
      "  dout, dlse    as out and lse, for --backward\n\n"
      "Examples:\n"
      "  headrace attend examples/data/minilm_qkv.safetensors --check\n"
      "  headrace attend qkv.safetensors -o out.safetensors --causal --window-left 255\n"
      "  headrace attend layer.safetensors -o out.safetensors --name q=attn.q --name bias= --dtype bfloat16\n"
      "  headrace attend qkv.safetensors --dtype bfloat16 --device cuda --check\n"
      "  headrace attend qkv.safetensors --backward --check --json");
  sub->callback([&command, flags] { command = [flags] { return attend(*flags); }; });
}

}  // namespace headrace::tool
