// The demo's report: one HTML page that needs nothing else, for readers who have never seen the library.
#include <algorithm>
#include <cmath>
#include <ctime>

#include "array.hpp"
#include "contest.hpp"
#include "demo.hpp"
#include "fmt/chrono.h"
#include "fmt/format.h"
#include "headrace/headrace.hpp"
#include "measure.hpp"
#include "plot.hpp"
#include "tile_picture.hpp"

namespace headrace::tool {
namespace {

using Json = nlohmann::json;

constexpr const char* style = R"(
:root { color-scheme: light dark;
  --page: #ffffff; --ink: #1c2330; --soft: #5c6675; --grid: #e3e7ed; --card: #f5f7fa;
  --ours: #1f6fc9; --standard: #c8651b; --good: #1b7f4b; --bad: #c02f2f;
  --hidden: #eceff3; --full: #1f6fc9; --edge: #f0b354; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14181f; --ink: #e6eaf0; --soft: #9aa5b4; --grid: #2c343f; --card: #1c222b;
  --ours: #6aaef5; --standard: #f09a55; --good: #5cc48d; --bad: #ff7b72;
  --hidden: #262d37; --full: #4b8fdc; --edge: #d99a3a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 8px; }
h2 { font-size: 21px; margin: 48px 0 6px; }
p { margin: 8px 0; max-width: 74ch; }
.lead { font-size: 18px; color: var(--soft); }
.note, figcaption { color: var(--soft); font-size: 14px; }
.verdict { display: inline-block; margin: 14px 0 4px; padding: 6px 14px; border-radius: 6px; color: #fff;
  background: var(--good); font-weight: 600; }
.verdict.broken { background: var(--bad); }
@media (prefers-color-scheme: dark) { .verdict { color: #10151b; } }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 14px; margin: 20px 0 0; }
.card { background: var(--card); border-radius: 8px; padding: 14px 16px; }
.card b { display: block; font-size: 24px; line-height: 1.3; }
.card span { color: var(--soft); font-size: 14px; }
.row { display: grid; grid-template-columns: repeat(auto-fit, minmax(290px, 1fr)); gap: 18px; margin: 16px 0; }
figure { margin: 0; }
figure h3 { font-size: 15px; margin: 0 0 2px; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11.5px; fill: var(--soft); stroke: none; }
svg text.ours { fill: var(--ours); stroke: none; } svg text.standard { fill: var(--standard); stroke: none; }
.grid { stroke: var(--grid); stroke-width: 1; }
.ours { stroke: var(--ours); fill: var(--ours); } .standard { stroke: var(--standard); fill: var(--standard); }
polyline { fill: none !important; stroke-width: 2; }
polyline.dashed { stroke-dasharray: 3 5; }
circle { stroke-width: 1.4; } circle.hollow { fill: var(--page); }
.rule { stroke-width: 1.4; stroke-dasharray: 6 4; }
.tile { stroke: var(--page); stroke-width: 1; }
.hidden { fill: var(--hidden); } .full { fill: var(--full); } .edge { fill: var(--edge); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; font-size: 14px; color: var(--soft); margin: 12px 0; }
.legend span { display: inline-flex; align-items: center; gap: 8px; }
.legend svg { width: 14px; height: 14px; flex: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14.5px; margin: 12px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 14px 5px 0; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
td.text, th.text { text-align: left; white-space: normal; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
code, pre { font: 13.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { background: var(--card); border-radius: 8px; padding: 12px 16px; overflow-x: auto; }
)";

// 1e-06 as a reader of papers writes it.
std::string power_of_ten(int exponent) {
  const char* digits[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string text = exponent < 0 ? "10⁻" : "10";
  for (const char c : std::to_string(std::abs(exponent))) text += digits[c - '0'];
  return text;
}

std::string scientific(double value) {
  if (!std::isfinite(value)) return "not finite";
  if (value == 0.0) return "0";
  const int exponent = static_cast<int>(std::floor(std::log10(value)));
  return fmt::format("{:.1f}·{}", value / std::pow(10.0, exponent), power_of_ten(exponent));
}

std::string tokens_text(std::int64_t tokens) {
  return tokens % 1024 == 0 ? fmt::format("{}k", tokens / 1024) : std::to_string(tokens);
}

std::string legend_item(const std::string& mark, const std::string& text) {
  return fmt::format("<span><svg viewBox='0 0 14 14' aria-hidden='true'>{}</svg>{}</span>", mark, text);
}

std::string dot(const char* css) { return fmt::format("<circle class='{}' cx='7' cy='7' r='4.5'/>", css); }
std::string square(const char* css) { return fmt::format("<rect class='{}' width='14' height='14' rx='2'/>", css); }

std::string card(const std::string& number, const std::string& text) {
  return fmt::format("<div class='card'><b>{}</b><span>{}</span></div>\n", number, text);
}

const Json* last_with_standard(const DemoResult& result) {
  const Json* found = nullptr;
  for (const Json& row : result.stretched)
    if (row.contains("speedup")) found = &row;
  return found;
}

std::string heading(const DemoResult& result) {
  const std::int64_t broken = result.broken(), checked = result.checked();
  std::string out = fmt::format(
      "<h1>Attention of a real transformer, exact and in little memory</h1>\n"
      "<p class='lead'>Headrace computes softmax(Q&#8202;K<sup>T</sup>)&#8202;V tile by tile, so that the matrix of "
      "all "
      "query–key scores never exists. This page is what <code>headrace demo</code> measured on one machine, "
      "{:%Y-%m-%d %H:%M}.</p>\n",
      fmt::localtime(std::time(nullptr)));
  out += broken == 0
             ? fmt::format("<div class='verdict'>All {} checks are within the accuracy contract</div>\n", checked)
             : fmt::format("<div class='verdict broken'>{} of {} checks are outside the accuracy contract</div>\n",
                           broken, checked);
  out += "<div class='cards'>\n";
  if (!result.stretched.empty()) {
    const Json& longest = result.stretched.back();
    const std::string tokens = tokens_text(longest["seqlen"]);
    out += card(format_bytes(longest["headrace"]["peak_bytes"]),
                fmt::format("memory beyond the tensors at {} tokens", tokens));
    out += card(format_bytes(longest["standard"]["needs_bytes"]),
                fmt::format("that the scores alone take in standard attention at {} tokens", tokens));
  }
  if (const Json* row = last_with_standard(result))
    out += card(fmt::format("{:.1f}×", row->at("speedup").get<double>()),
                fmt::format("as fast as standard attention at {} tokens", tokens_text(row->at("seqlen"))));
  out +=
      card(fmt::format("{} × {}", result.layers, result.heads), "layers and heads, each checked in three number types");
  return out + "</div>\n";
}

Plot error_plot(const DemoResult& result, const std::string& dtype, const Errors& promised) {
  Plot plot;
  plot.title = fmt::format("Errors of every head in {}", dtype);
  plot.x_label = "layer (its heads from left to right)";
  plot.width = 330, plot.height = 300, plot.left = 42;
  plot.log_x = false;
  const double heads = static_cast<double>(result.heads);
  plot.x_min = -0.5, plot.x_max = static_cast<double>(result.layers) * heads - 0.5;
  for (std::int64_t layer = 0; layer < result.layers; ++layer) {
    const double begin = static_cast<double>(layer) * heads;
    plot.x_ticks.push_back({begin + (heads - 1) / 2, std::to_string(layer + 1)});
    if (layer > 0) plot.separators.push_back(begin - 0.5);
  }
  for (int exponent = -8; exponent <= 0; ++exponent)
    plot.y_ticks.push_back({std::pow(10.0, exponent), power_of_ten(exponent)});
  for (const ErrorsByHead& errors : result.errors) {
    if (errors.dtype != dtype) continue;
    PlotSeries outputs{.css = "ours", .points = {}, .line = false, .hollow = errors.causal, .radius = 2.3};
    PlotSeries gradients{.css = "standard", .points = {}, .line = false, .hollow = errors.causal, .radius = 2.3};
    for (const HeadErrors& head : errors.heads) {
      const double x = static_cast<double>(head.layer) * heads + static_cast<double>(head.head);
      const auto point = [&](const char* what, double error) {
        // What is not finite stands at the top, where it is seen.
        return PlotPoint{x, std::isfinite(error) ? std::max(error, 1e-8) : 1.0,
                         fmt::format("layer {} head {}, {} {}: {}", head.layer + 1, head.head + 1,
                                     errors.causal ? "causal" : "full", what, scientific(error))};
      };
      outputs.points.push_back(point("output", head.ours.out));
      gradients.points.push_back(point("worst gradient", head.ours.worst_gradient()));
    }
    plot.series.push_back(std::move(gradients));
    plot.series.push_back(std::move(outputs));
  }
  plot.rules.push_back({promised.dq, "standard", "promised: gradients", false});
  plot.rules.push_back({promised.out, "ours", "promised: outputs", true});
  return plot;
}

// Says why heads may lie above their line, where some do.
std::string beyond_promise_text(const DemoResult& result) {
  std::string rows;
  for (const ErrorsByHead& errors : result.errors)
    for (const HeadErrors& head : errors.beyond_promise())
      rows += fmt::format(
          "<tr><td>layer {} head {}</td><td class='text'>{}, {}</td><td>{:.4f}</td><td>{}</td><td>{}</td>"
          "<td class='{}'>{}</td></tr>\n",
          head.layer + 1, head.head + 1, errors.dtype, errors.causal ? "causal" : "full", head.peak,
          scientific(head.ours.worst_gradient()), scientific(head.standard.worst_gradient()),
          errors.within_contract(head) ? "good" : "bad", errors.within_contract(head) ? "within" : "outside");
  if (rows.empty()) return "";
  return "<p>Why do some points lie above their line? A head whose queries look at one key only, with a probability "
         "near 1, has gradients of Q and K near 0: differences of nearly equal numbers, in which rounding is large "
         "by comparison. That is so for every method that works in the same number type, and for such inputs the "
         "contract says: never more than twice the error of standard attention.</p>\n"
         "<div class='scroll'><table><tr><th>head</th><th class='text'>run</th><th>largest probability, mean</th>"
         "<th>gradient error</th><th>standard attention</th><th>contract</th></tr>\n" +
         rows + "</table></div>\n";
}

std::string error_table(const DemoResult& result) {
  std::string out =
      "<div class='scroll'><table><tr><th>type</th><th class='text'>mask</th><th>output</th><th>dQ</th><th>dK</th>"
      "<th>dV</th><th>LSE</th><th>promised: output</th><th>gradients</th><th>LSE</th><th>within the "
      "contract</th></tr>\n";
  for (const ErrorsByHead& errors : result.errors) {
    const auto count = static_cast<std::int64_t>(errors.heads.size());
    out += fmt::format("<tr><td>{}</td><td class='text'>{}</td>", errors.dtype, errors.causal ? "causal" : "full");
    for (const ErrorKind& kind : error_kinds) out += fmt::format("<td>{}</td>", scientific(errors.worst(kind.member)));
    out += fmt::format("<td>{}</td><td>{}</td><td>{}</td><td class='{}'>{} of {} heads</td></tr>\n",
                       scientific(errors.promised.out), scientific(errors.promised.dq), scientific(errors.promised.lse),
                       errors.broken() == 0 ? "good" : "bad", count - errors.broken(), count);
  }
  return out +
         "</table></div>\n<p class='note'>Largest error of any head: relative; of the LSE, the logarithm of the "
         "softmax's denominator, absolute. Training keeps the LSE for the backward pass.</p>\n";
}

std::string error_section(const DemoResult& result) {
  std::string out =
      "<h2>Is it exact?</h2>\n"
      "<p>Every head of every layer was computed in three number types, forward and backward, with all keys "
      "visible and with a causal mask, and compared with plain double-precision attention on the very same "
      "inputs. The error of a head is that of its whole result, relative to the size of the result. Rounding "
      "cannot be avoided: a number type has only so many digits. The dashed lines are what "
      "Headrace promises for inputs like normal deviates.</p>\n<div class='legend'>";
  out += legend_item(dot("ours"), "output");
  out += legend_item(dot("standard"), "worst of the three gradients");
  out += legend_item(dot("ours"), "filled: all keys visible") + legend_item(dot("ours hollow"), "hollow: causal");
  out += "</div>\n<div class='row'>\n";
  std::vector<std::string> drawn;
  for (const ErrorsByHead& errors : result.errors) {
    if (std::ranges::find(drawn, errors.dtype) != drawn.end()) continue;
    drawn.push_back(errors.dtype);
    out += fmt::format("<figure><h3>{}</h3>{}</figure>\n", errors.dtype,
                       svg(error_plot(result, errors.dtype, errors.promised)));
  }
  out += "</div>\n" + beyond_promise_text(result) + error_table(result);
  return out;
}

Plot scaling_plot(const DemoResult& result, const char* title) {
  Plot plot;
  plot.title = title;
  plot.x_label = "tokens";
  for (const Json& row : result.stretched) {
    const auto tokens = row["seqlen"].get<std::int64_t>();
    plot.x_ticks.push_back({static_cast<double>(tokens), tokens_text(tokens)});
  }
  const auto [least, most] = std::ranges::minmax_element(plot.x_ticks, {}, &Tick::value);
  plot.x_min = least->value / 1.15, plot.x_max = std::max(most->value * 1.15, least->value * 1.5);
  return plot;
}

// Ticks from the list so that they enclose all points.
void set_y_ticks(Plot& plot, const std::vector<Tick>& choices) {
  double least = choices.back().value, most = choices.front().value;
  for (const PlotSeries& series : plot.series) {
    for (const PlotPoint& point : series.points) {
      least = std::min(least, point.y);
      most = std::max(most, point.y);
    }
  }
  std::size_t first = 0, last = choices.size() - 1;
  while (first + 2 < choices.size() && choices[first + 1].value <= least) ++first;
  while (last > first + 1 && choices[last - 1].value >= most) --last;
  plot.y_ticks.assign(choices.begin() + static_cast<std::ptrdiff_t>(first),
                      choices.begin() + static_cast<std::ptrdiff_t>(last) + 1);
}

std::string time_plot(const DemoResult& result) {
  Plot plot = scaling_plot(result, "Time by length");
  PlotSeries standard{.css = "standard", .points = {}}, ours{.css = "ours", .points = {}};
  for (const Json& row : result.stretched) {
    const auto add = [&](PlotSeries& series, const char* key, const char* name) {
      if (!row[key].contains("seconds")) return;
      const double seconds = row[key]["seconds"];
      series.points.push_back(
          {row["seqlen"], seconds,
           fmt::format("{} at {} tokens: {}", name, tokens_text(row["seqlen"]), format_seconds(seconds))});
    };
    add(standard, "standard", "standard attention");
    add(ours, "headrace", "Headrace");
  }
  plot.series = {standard, ours};
  set_y_ticks(plot, {{1e-5, "10 µs"},
                     {1e-4, "100 µs"},
                     {1e-3, "1 ms"},
                     {1e-2, "10 ms"},
                     {1e-1, "100 ms"},
                     {1, "1 s"},
                     {10, "10 s"},
                     {100, "100 s"},
                     {1000, "1000 s"}});
  return svg(plot);
}

std::string memory_plot(const DemoResult& result) {
  Plot plot = scaling_plot(result, "Memory beyond the tensors by length");
  PlotSeries standard{.css = "standard", .points = {}}, ours{.css = "ours", .points = {}};
  PlotSeries needed{.css = "standard", .points = {}, .hollow = true, .dashed = true};
  for (const Json& row : result.stretched) {
    const std::string tokens = tokens_text(row["seqlen"]);
    const auto point = [&](double bytes, const char* text) {
      return PlotPoint{row["seqlen"], std::max(bytes, 1024.0),
                       fmt::format(fmt::runtime(text), tokens, format_bytes(bytes))};
    };
    ours.points.push_back(point(row["headrace"]["peak_bytes"], "Headrace at {} tokens: {}"));
    if (row["standard"].contains("peak_bytes")) {
      standard.points.push_back(point(row["standard"]["peak_bytes"], "standard attention at {} tokens: {}"));
    } else {
      if (needed.points.empty() && !standard.points.empty()) needed.points.push_back(standard.points.back());
      needed.points.push_back(
          point(row["standard"]["needs_bytes"], "standard attention at {} tokens: not run, the scores need {}"));
    }
  }
  plot.series = {needed, standard, ours};
  std::vector<Tick> ticks;
  for (int power = 10; power <= 46; power += 4)
    ticks.push_back({std::pow(2.0, power), format_bytes(std::pow(2.0, power))});
  for (Tick& tick : ticks) tick.label.replace(tick.label.find(".0"), 2, "");
  set_y_ticks(plot, ticks);
  return svg(plot);
}

std::string scaling_section(const DemoResult& result) {
  if (result.stretched.empty()) return "";
  std::string out = fmt::format(
      "<h2>What does it cost when the text is long?</h2>\n"
      "<p>Head {} of layer {} was stretched: token t of the long sequence is token t mod {} of the sample plus "
      "normal noise of {} times the tensor's standard deviation, so that the numbers look like the model's and no "
      "row is a copy. Both methods ran in float32 on {} threads, with every key visible. Standard attention "
      "multiplies Q and K with {}, keeps all scores, turns them into probabilities in place (vectorised like "
      "Headrace's), and multiplies with V; its memory for the "
      "scores was ready before the clock started. Time grows with the square of the length for both; memory only for "
      "one.</p>\n",
      result.stretched_head + 1, result.stretched_layer + 1, result.tokens, stretch_noise, result.threads,
      result.blas.empty() ? "a BLAS (none was found, so it was not run)" : escape_html(result.blas));
  out += "<div class='legend'>" + legend_item(dot("ours"), "Headrace") +
         legend_item(dot("standard"), "standard attention") +
         legend_item(dot("standard hollow"), "needed, but not run") + "</div>\n";
  out += "<div class='row' style='grid-template-columns: repeat(auto-fit, minmax(380px, 1fr))'>\n";
  out += "<figure><h3>Time of one forward pass</h3>" + time_plot(result) + "</figure>\n";
  out += "<figure><h3>Peak memory beyond the tensors</h3>" + memory_plot(result) + "</figure>\n</div>\n";
  out +=
      "<div class='scroll'><table><tr><th>tokens</th><th>Headrace</th><th>GFLOP/s</th><th>memory</th><th>error</th>"
      "<th>standard</th><th>GFLOP/s</th><th>memory</th><th>faster by</th></tr>\n";
  for (const Json& row : result.stretched) {
    const Json &ours = row["headrace"], &standard = row["standard"];
    const double error = number_or_nan(ours["error"]);
    out += fmt::format("<tr><td>{}</td><td>{}</td><td>{:.0f}</td><td>{}</td><td class='{}'>{}</td>",
                       row["seqlen"].get<std::int64_t>(), format_seconds(ours["seconds"]), ours["gflops"].get<double>(),
                       format_bytes(ours["peak_bytes"]), error <= result.stretched_contract ? "good" : "bad",
                       scientific(error));
    if (standard.contains("skipped"))
      out += fmt::format("<td colspan='3'>not run: {}</td><td></td></tr>\n",
                         escape_html(standard["skipped"].get<std::string>()));
    else
      out += fmt::format("<td>{}</td><td>{:.0f}</td><td>{}</td><td>{:.1f}×</td></tr>\n",
                         format_seconds(standard["seconds"]), standard["gflops"].get<double>(),
                         format_bytes(standard["peak_bytes"]), row["speedup"].get<double>());
  }
  return out +
         "</table></div>\n<p class='note'>Memory is the growth of a fresh process during the call, as the kernel "
         "counts "
         "it. Times are medians of alternating runs. Errors are those of sampled rows against float64. Standard "
         "attention is not run where its scores would take more than half of the free memory.</p>\n";
}

std::string tile_figure(const char* title, const TilePicture& picture) {
  const double read = 100.0 * static_cast<double>(picture.full + picture.edge) / static_cast<double>(picture.tiles());
  return fmt::format(
      "<figure><h3>{}</h3>{}<figcaption>{} of {} tiles read ({:.0f} %), {} of them with a mask inside"
      "</figcaption></figure>\n",
      title, picture.svg, picture.full + picture.edge, picture.tiles(), read, picture.edge);
}

std::string tiles_section(const DemoResult& result) {
  constexpr std::int64_t seqlen = 4096, window = 768, block = 256, blocks = seqlen / block;
  // The tiles that the kernel would really use at this length.
  Attention shape;
  shape.q = shape.k = shape.v = shape.out = {nullptr, DType::float32, {1, seqlen, 1, result.dim}};
  const Json plan = Json::parse(Plan(shape, Pass::forward).explain_json());
  const std::int64_t tile_q = plan["tile_q"], tile_k = plan["tile_k"];

  // Nearby blocks, the first block as a summary for all, and a few far ones.
  std::vector<unsigned char> bits;
  for (std::int64_t i = 0; i < blocks; ++i)
    for (std::int64_t j = 0; j < blocks; ++j)
      bits.push_back(std::abs(i - j) <= 1 || j == 0 || (5 * i + 11 * j) % 13 == 3);
  const auto visibility = [&](std::int64_t left, bool sparse) {
    Visibility v{.band = Band::make(seqlen, seqlen, true, false, left, INT64_MAX),
                 .seqlen_q = seqlen,
                 .seqlen_k = seqlen,
                 .blocks = {}};
    if (sparse) v.blocks = {bits.data(), blocks, 1, block, block};
    return v;
  };
  std::string out = fmt::format(
      "<h2>What is never read?</h2>\n"
      "<p>The kernel walks the score matrix in tiles of {} queries × {} keys. Where a mask hides a whole tile, its "
      "keys and values are not even loaded; where it hides part of one, single scores are masked. These are the "
      "tiles of a sequence of {} tokens, drawn by the library's own tile walk.</p>\n<div class='legend'>",
      tile_q, tile_k, seqlen);
  out += legend_item(square("full"), "full: every score counts") +
         legend_item(square("edge"), "edge: a mask inside the tile") +
         legend_item(square("hidden"), "hidden: never read") + "</div>\n<div class='row'>\n";
  const std::int64_t unbounded = INT64_MAX;
  out += tile_figure("Causal", draw_tiles(visibility(unbounded, false), tile_q, tile_k, "Causal mask"));
  out += tile_figure(fmt::format("Causal, with a window of {} keys", window).c_str(),
                     draw_tiles(visibility(window - 1, false), tile_q, tile_k, "Sliding window"));
  out += tile_figure(fmt::format("Causal and block-sparse, in blocks of {}", block).c_str(),
                     draw_tiles(visibility(unbounded, true), tile_q, tile_k, "Block-sparse mask"));
  return out + "</div>\n";
}

std::string details_section(const DemoResult& result) {
  std::string out = "<h2>Where the numbers come from</h2>\n<div class='scroll'><table>\n";
  const auto row = [&](const std::string& name, const std::string& value) {
    out += fmt::format("<tr><td>{}</td><td class='text'>{}</td></tr>\n", escape_html(name), escape_html(value));
  };
  row("Headrace", std::string(version()));
  row("SIMD", result.machine["simd"]["chosen"]);
  row("threads", std::to_string(result.threads));
  row("sample", fmt::format("{} layers, {} tokens, {} heads of dimension {}", result.layers, result.tokens,
                            result.heads, result.dim));
  for (const auto& [name, value] : result.metadata) row("sample: " + name, value);
  row("gradient that enters the backward pass", "normal deviates of a fixed seed");
  row("whole demo", format_seconds(result.seconds));
  out +=
      "</table></div>\n<p>To repeat it, and to measure other shapes:</p>\n<pre>headrace demo --report demo.html\n"
      "headrace bench --heads 8 --dim 128 --causal\nheadrace explain --seqlen-q 65536 --causal</pre>\n";
  return out;
}

}  // namespace

std::string html_report(const DemoResult& result) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
      "<meta name='viewport' content='width=device-width, initial-scale=1'>\n<title>Headrace demo</title>\n"
      "<style>{}</style>\n</head>\n<body>\n<main>\n{}{}{}{}{}</main>\n</body>\n</html>\n",
      style, heading(result), error_section(result), scaling_section(result), tiles_section(result),
      details_section(result));
}

}  // namespace headrace::tool
