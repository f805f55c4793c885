#include "plot.hpp"

#include <algorithm>
#include <cmath>

#include "fmt/format.h"

namespace headrace::tool {
namespace {

// From values to pixels.
class Scale {
 public:
  Scale(bool logarithmic, double from, double to, double pixel_from, double pixel_to)
      : logarithmic_(logarithmic), from_(map(from)), to_(map(to)), pixel_from_(pixel_from), pixel_to_(pixel_to) {}
  double operator()(double value) const {
    const double share = (map(value) - from_) / (to_ - from_);
    return pixel_from_ + (pixel_to_ - pixel_from_) * std::clamp(share, 0.0, 1.0);
  }

 private:
  [[nodiscard]] double map(double value) const { return logarithmic_ ? std::log10(value) : value; }
  bool logarithmic_;
  double from_, to_, pixel_from_, pixel_to_;
};

}  // namespace

std::string escape_html(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&')
      result += "&amp;";
    else if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '"')
      result += "&quot;";
    else
      result += c;
  }
  return result;
}

std::string svg(const Plot& plot) {
  const double left = plot.left, right = plot.width - 14, top = 12, bottom = plot.height - 40;
  const Scale x(plot.log_x, plot.x_min, plot.x_max, left, right);
  const Scale y(true, plot.y_ticks.front().value, plot.y_ticks.back().value, bottom, top);
  std::string out;
  const auto add = [&](fmt::string_view format, const auto&... values) {
    fmt::vformat_to(std::back_inserter(out), format, fmt::make_format_args(values...));
  };
  const auto line = [&](const char* css, double x1, double y1, double x2, double y2) {
    add("<line class='{}' x1='{:.1f}' y1='{:.1f}' x2='{:.1f}' y2='{:.1f}'/>", css, x1, y1, x2, y2);
  };

  add("<svg viewBox='0 0 {} {}' role='img' aria-label='{}'>", plot.width, plot.height, escape_html(plot.title));
  for (const Tick& tick : plot.y_ticks) {
    line("grid", left, y(tick.value), right, y(tick.value));
    add("<text x='{:.1f}' y='{:.1f}' text-anchor='end'>{}</text>", left - 7, y(tick.value) + 4, tick.label);
  }
  for (const double value : plot.separators) line("grid", x(value), top, x(value), bottom);
  for (const Tick& tick : plot.x_ticks)
    add("<text x='{:.1f}' y='{:.1f}' text-anchor='middle'>{}</text>", x(tick.value), bottom + 17, tick.label);
  add("<text x='{:.1f}' y='{:.1f}' text-anchor='middle'>{}</text>", (left + right) / 2, plot.height - 4, plot.x_label);
  for (const PlotRule& rule : plot.rules) {
    add("<line class='rule {}' x1='{:.1f}' y1='{:.1f}' x2='{:.1f}' y2='{:.1f}'/>", rule.css, left, y(rule.y), right,
        y(rule.y));
    add("<text class='{}' x='{:.1f}' y='{:.1f}' text-anchor='end'>{}</text>", rule.css, right - 3,
        y(rule.y) + (rule.label_below ? 13 : -5), rule.label);
  }
  for (const PlotSeries& series : plot.series) {
    if (series.line && series.points.size() > 1) {
      add("<polyline class='{}{}' points='", series.css, series.dashed ? " dashed" : "");
      for (const PlotPoint& point : series.points) add("{:.1f},{:.1f} ", x(point.x), y(point.y));
      add("'/>");
    }
    for (const PlotPoint& point : series.points)
      add("<circle class='{}{}' cx='{:.1f}' cy='{:.1f}' r='{}'><title>{}</title></circle>", series.css,
          series.hollow ? " hollow" : "", x(point.x), y(point.y), series.radius, escape_html(point.tip));
  }
  out += "</svg>";
  return out;
}

}  // namespace headrace::tool
