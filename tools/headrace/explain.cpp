// headrace explain: the plan of a call that is described by its shapes alone.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "array.hpp"
#include "command.hpp"
#include "flags.hpp"
#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace headrace::tool {
namespace {

struct ExplainFlags {
  std::int64_t batch = 1, heads = 1, dim = 64;
  std::int64_t seqlen_q = 1024;
  std::optional<std::int64_t> seqlen_k, heads_kv, value_dim;
  std::string dtype = "float32";
  Shape bias_shape, mask_shape;
  bool alibi = false, sinks = false, backward = false, json = false;
  AttentionFlags options;
};

// A tensor without memory: planning reads shapes only.
Tensor shape_only(DType dtype, const Shape& shape) { return {nullptr, dtype, shape}; }

Attention describe(const ExplainFlags& flags) {
  const DType dtype = parse_dtype(flags.dtype);
  const std::int64_t seqlen_k = flags.seqlen_k.value_or(flags.seqlen_q);
  const std::int64_t heads_kv = flags.heads_kv.value_or(flags.heads);
  const std::int64_t value_dim = flags.value_dim.value_or(flags.dim);
  Attention a = flags.options.attention();
  a.q = shape_only(dtype, {flags.batch, flags.seqlen_q, flags.heads, flags.dim});
  a.k = shape_only(dtype, {flags.batch, seqlen_k, heads_kv, flags.dim});
  a.v = shape_only(dtype, {flags.batch, seqlen_k, heads_kv, value_dim});
  a.out = shape_only(dtype, {flags.batch, flags.seqlen_q, flags.heads, value_dim});
  a.lse = shape_only(DType::float32, {flags.batch, flags.heads, flags.seqlen_q});
  if (!flags.bias_shape.empty()) a.bias = shape_only(DType::float32, flags.bias_shape);
  if (!flags.mask_shape.empty()) a.mask = shape_only(DType::boolean, flags.mask_shape);
  if (flags.alibi) a.alibi_slopes = shape_only(DType::float32, {flags.heads});
  if (flags.sinks) a.sinks = shape_only(DType::float32, {flags.heads});
  if (flags.backward) {
    a.dout = a.out;
    a.dq = a.q, a.dk = a.k, a.dv = a.v;
    if (flags.sinks) a.dsinks = a.sinks;
    if (!flags.bias_shape.empty()) a.dbias = a.bias;
  }
  return a;
}

int explain(const ExplainFlags& flags) {
  const Plan plan(describe(flags), flags.backward ? Pass::backward : Pass::forward);
  if (flags.json)
    fmt::print("{}\n", nlohmann::ordered_json::parse(plan.explain_json()).dump(2));
  else
    fmt::print("{}{}", plan.explain(), plan.explain().ends_with('\n') ? "" : "\n");
  return exit_ok;
}

}  // namespace

void add_explain(CLI::App& app, Command& command) {
  CLI::App* sub = app.add_subcommand(
      "explain", "Show the plan of a call: kernel, tiles, FLOPs, and bytes moved against standard attention");
  auto flags = std::make_shared<ExplainFlags>();
  const char* shapes = "Shapes";
  add_integer(*sub, "--batch", flags->batch, "Sequences")->capture_default_str()->group(shapes);
  add_integer(*sub, "--seqlen-q", flags->seqlen_q, "Queries of a sequence")->capture_default_str()->group(shapes);
  add_integer(*sub, "--seqlen-k", flags->seqlen_k, "Keys of a sequence (default: as queries)")->group(shapes);
  add_integer(*sub, "--heads", flags->heads, "Query heads")->capture_default_str()->group(shapes);
  add_integer(*sub, "--heads-kv", flags->heads_kv, "Key-value heads (default: as query heads)")->group(shapes);
  add_integer(*sub, "--dim", flags->dim, "Dimension of q and k")->capture_default_str()->group(shapes);
  add_integer(*sub, "--value-dim", flags->value_dim, "Dimension of v (default: as q)")->group(shapes);
  sub->add_option("--dtype", flags->dtype, "float32, float16, bfloat16 or float64")
      ->capture_default_str()
      ->type_name("T")
      ->group(shapes);
  sub->add_option("--bias-shape", flags->bias_shape, "With a float32 bias of this shape: B,H,Q,K, each 1 or full")
      ->delimiter(',')
      ->expected(4)
      ->type_name("N,N,N,N")
      ->group(shapes);
  sub->add_option("--mask-shape", flags->mask_shape, "With a boolean mask of this shape")
      ->delimiter(',')
      ->expected(4)
      ->type_name("N,N,N,N")
      ->group(shapes);
  sub->add_flag("--alibi", flags->alibi, "With ALiBi slopes")->group(shapes);
  sub->add_flag("--sinks", flags->sinks, "With sink logits")->group(shapes);
  sub->add_flag("--backward", flags->backward, "The backward pass");
  sub->add_flag("--json", flags->json, "Print a JSON object");
  flags->options.add_to(*sub);
  sub->footer(
      "Nothing is computed and no tensor is allocated, so any length will do.\n\n"
      "Examples:\n"
      "  headrace explain --seqlen-q 65536 --heads 16 --dim 128 --causal --dtype bfloat16\n"
      "  headrace explain --seqlen-q 1 --seqlen-k 100000 --heads 32 --heads-kv 8 --json\n"
      "  headrace explain --seqlen-q 8192 --window-left 1023 --window-right 0 --backward");
  sub->callback([&command, flags] { command = [flags] { return explain(*flags); }; });
}

}  // namespace headrace::tool
