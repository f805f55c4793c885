#include "flags.hpp"

#include <vector>

namespace headrace::tool {

void AttentionFlags::add_to(CLI::App& app) {
  const char* options = "Options of the attention";
  app.add_flag("--causal{bottom_right}", causal,
               "Hide keys after the query; the last query is aligned with the last key, or with\n"
               "--causal=top_left the first query with the first key")
      ->check(CLI::IsMember({"none", "bottom_right", "top_left"}).description(""))
      ->group(options);
  add_integer(app, "--window-left", window_left, "Show at most N keys before the query's position; may be negative")
      ->group(options);
  add_integer(app, "--window-right", window_right, "Show at most N keys after the query's position; may be negative")
      ->group(options);
  app.add_option("--scale", scale, "Factor of q . k (default: 1 / sqrt(head_dim))")->type_name("X")->group(options);
  app.add_option("--softcap", softcap, "Scores become C tanh(score / C)")->type_name("C")->group(options);
  app.add_option("--dropout-p", dropout_p, "Share of the probabilities to drop, 0 <= P < 1")
      ->type_name("P")
      ->group(options);
  add_integer(app, "--seed", seed, "Seed of the dropout mask")->group(options);
  add_integer(app, "--block-q", block_q, "Queries of one block of the block mask")->group(options);
  add_integer(app, "--block-k", block_k, "Keys of one block of the block mask")->group(options);
  app.add_flag("--deterministic", deterministic, "The same bits every run")->group(options);
  app.add_flag("--batch-invariant", batch_invariant, "The bits of a row do not depend on the rest of the batch")
      ->group(options);
  add_integer(app, "--threads", threads, "Threads (default: one a core)")->group(options);
  app.add_option("--backend", backend, "auto, cpu, or reference: the plain float64 computation")
      ->check(CLI::IsMember({"auto", "cpu", "reference"}).description(""))
      ->type_name("NAME")
      ->group(options);
}

Attention AttentionFlags::attention() const {
  Attention a;
  a.causal = causal == "bottom_right" ? Causal::bottom_right : causal == "top_left" ? Causal::top_left : Causal::none;
  a.backend = backend == "cpu" ? Backend::cpu : backend == "reference" ? Backend::reference : Backend::automatic;
  a.scale = scale;
  a.window_left = window_left, a.window_right = window_right;
  a.softcap = softcap;
  a.dropout_p = dropout_p, a.seed = seed;
  a.block_q = block_q, a.block_k = block_k;
  a.deterministic = deterministic, a.batch_invariant = batch_invariant;
  a.threads = threads;
  return a;
}

std::string AttentionFlags::summary() const {
  std::vector<std::string> parts;
  if (causal != "none") parts.push_back(fmt::format("causal {}", causal));
  if (window_left) parts.push_back(fmt::format("window_left {}", *window_left));
  if (window_right) parts.push_back(fmt::format("window_right {}", *window_right));
  if (scale) parts.push_back(fmt::format("scale {}", *scale));
  if (softcap != 0.0) parts.push_back(fmt::format("softcap {}", softcap));
  if (dropout_p != 0.0) parts.push_back(fmt::format("dropout_p {} seed {}", dropout_p, seed));
  if (batch_invariant) parts.push_back("batch_invariant");
  if (backend != "auto") parts.push_back(fmt::format("backend {}", backend));
  return fmt::to_string(fmt::join(parts, ", "));
}

}  // namespace headrace::tool
