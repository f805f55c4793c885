#include "plan/explain.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "describe/tensor_view.hpp"
#include "plan/io_model.hpp"
#include "plan/tile_counts.hpp"

namespace headrace {
namespace {

using Json = nlohmann::ordered_json;

// Which of the three bounds the time: arithmetic, memory traffic, or too few tasks for the threads.
std::string_view limit_of(const IoModel& model, const KernelReport& report) {
  if (model.flops == 0) return "none";
  if (report.tasks < report.available_threads) return "parallelism";
  return model.intensity() < report.flops_per_byte ? "memory" : "compute";
}

std::string bytes_text(double bytes) {
  constexpr std::array units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < units.size(); ++unit) bytes /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

std::string count_text(double count) {
  constexpr std::array units = {"", " K", " M", " G", " T", " P", " E"};
  std::size_t unit = 0;
  for (; count >= 10000 && unit + 1 < units.size(); ++unit) count /= 1000;
  return unit == 0 ? fmt::format("{}", count) : fmt::format("{:.1f}{}", count, units[unit]);
}

// An integer where it is one that a double holds exactly.
Json number(double value) {
  if (std::abs(value) <= 9007199254740992.0 && value == std::floor(value)) return static_cast<std::int64_t>(value);
  return value;
}

std::string pair_text(const std::int64_t (&shape)[4]) { return fmt::format("[{}]", fmt::join(shape, shape + 4, ", ")); }

std::vector<std::string> options_of(const Problem& p) {
  std::vector<std::string> options;
  if (p.ragged) options.emplace_back("ragged");
  if (p.causal == HR_CAUSAL_BOTTOM_RIGHT) options.emplace_back("causal bottom-right");
  if (p.causal == HR_CAUSAL_TOP_LEFT) options.emplace_back("causal top-left");
  const auto bound = [](std::int64_t value) {
    return value == HR_UNBOUNDED ? std::string("unbounded") : std::to_string(value);
  };
  if (p.window_left != HR_UNBOUNDED || p.window_right != HR_UNBOUNDED)
    options.push_back(fmt::format("window ({}, {})", bound(p.window_left), bound(p.window_right)));
  if (p.softcap > 0) options.push_back(fmt::format("softcap {}", p.softcap));
  if (p.has_bias) options.push_back(fmt::format("{} bias {}", dtype_name(p.bias_dtype), pair_text(p.bias_shape)));
  if (p.has_alibi) options.emplace_back("ALiBi");
  if (p.has_mask) options.emplace_back("boolean mask");
  if (p.has_block_mask) options.push_back(fmt::format("block mask of {} x {}", p.block_q, p.block_k));
  if (p.has_sinks) options.emplace_back("sinks");
  if (p.dropout_p > 0) options.push_back(fmt::format("dropout {}", p.dropout_p));
  if (p.need_dbias) options.emplace_back("dbias");
  if (p.need_dsinks) options.emplace_back("dsinks");
  if (p.deterministic) options.emplace_back("deterministic");
  if (p.batch_invariant) options.emplace_back("batch invariant");
  return options;
}

}  // namespace

Explanation explain(const Problem& p, const Kernel& kernel, const std::uint8_t* block_mask) {
  const KernelReport report = kernel.report();
  const std::int64_t tile_q = std::max<std::int64_t>(report.tile_q, 1);
  const std::int64_t tile_k = std::max<std::int64_t>(report.tile_k, 1);
  const TileCounts counts = count_tiles(p, block_mask, tile_q, tile_k);
  const IoModel model = io_model(p, counts, tile_q, tile_k, report.key_reuse);
  const std::string_view limit = limit_of(model, report);
  const std::vector<std::string> options = options_of(p);
  const std::string_view pass = p.pass == Pass::forward ? "forward" : "backward";
  const std::string_view backend = p.device == HR_DEVICE_CUDA          ? "cuda"
                                   : p.backend == HR_BACKEND_REFERENCE ? "reference"
                                                                       : "cpu";
  std::vector<std::string> notes = report.notes;
  if (!counts.exact)
    notes.push_back(p.has_block_mask && block_mask == nullptr
                        ? "tiles are counted as if every block of block_mask were set: its data was NULL when planning"
                        : "tiles are extrapolated from a sample of their rows: there are too many to count them all");

  const Json json = {{"kernel", report.name},
                     {"backend", backend},
                     {"pass", pass},
                     {"dtype", dtype_name(p.dtype)},
                     {"batch", p.batch},
                     {"heads_q", p.heads_q},
                     {"heads_kv", p.heads_kv},
                     {"head_dim", p.head_dim},
                     {"value_dim", p.value_dim},
                     {"seqlen_q", p.seqlen_q},
                     {"seqlen_k", p.seqlen_k},
                     {"options", options},
                     {"tile_q", tile_q},
                     {"tile_k", tile_k},
                     {"tiles_total", number(counts.total)},
                     {"tiles_visited", number(counts.visited)},
                     {"tiles_edge", number(counts.edge)},
                     {"tiles_exact", counts.exact},
                     {"visible_pairs", number(counts.visible_pairs)},
                     {"flops", number(model.flops)},
                     {"bytes_streaming", number(model.bytes_streaming)},
                     {"bytes_standard", number(model.bytes_standard)},
                     {"intensity", model.intensity()},
                     {"workspace_bytes", kernel.workspace_bytes()},
                     {"fast_bytes", report.fast_bytes},
                     {"splits", report.splits},
                     {"tasks", report.tasks},
                     {"threads", report.threads},
                     {"limit", limit},
                     {"notes", notes}};

  std::string text = fmt::format("{} {}, backend {}\n", dtype_name(p.dtype), pass, backend);
  const auto line = [&text](std::string_view title, const std::string& value) {
    text += fmt::format("  {:<10} {}\n", title, value);
  };
  line("problem",
       fmt::format("batch {}, heads {} (key-value {}), seqlen {} x {}{}, head_dim {}, value_dim {}", p.batch, p.heads_q,
                   p.heads_kv, p.seqlen_q, p.seqlen_k, p.ragged ? " (the longest)" : "", p.head_dim, p.value_dim));
  line("options", options.empty() ? "none" : fmt::format("{}", fmt::join(options, ", ")));
  line("kernel", fmt::format("{}: {} tasks on {} {}s, keys in {} {}", report.name, report.tasks, report.threads,
                             report.worker, report.splits, report.splits == 1 ? "part" : "parts"));
  line("tiles", fmt::format("{} x {}: {} in all, {} visited, {} of them with an element mask", tile_q, tile_k,
                            count_text(counts.total), count_text(counts.visited), count_text(counts.edge)));
  line("memory",
       fmt::format("{} of fast memory a task, {} of workspace", bytes_text(static_cast<double>(report.fast_bytes)),
                   bytes_text(static_cast<double>(kernel.workspace_bytes()))));
  line("work", fmt::format("{} FLOP: {} for each of {} visible pairs", count_text(model.flops),
                           p.pass == Pass::forward ? "2 (head_dim + value_dim)" : "6 head_dim + 4 value_dim",
                           count_text(counts.visible_pairs)));
  line("traffic", fmt::format("{} streaming, {} standard attention", bytes_text(model.bytes_streaming),
                              bytes_text(model.bytes_standard)));
  line("limit", fmt::format("{}: {:.1f} FLOP a byte (a {} balances at about {})", limit, model.intensity(),
                            p.device == HR_DEVICE_CUDA ? "GPU" : "CPU core", report.flops_per_byte));
  for (const std::string& note : notes) line("note", note);
  return {text, json.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace headrace
