// Plots as inline SVG. Colours come from the page's style sheet, by class, so that they follow its theme.
#pragma once

#include <string>
#include <vector>

namespace headrace::tool {

std::string escape_html(const std::string& text);

struct Tick {
  double value;
  std::string label;
};

struct PlotPoint {
  double x, y;
  std::string tip;  // shown by the browser when the mouse rests on it
};

struct PlotSeries {
  std::string css;  // class of the marks, e.g. "ours"
  std::vector<PlotPoint> points;
  bool line = true;
  bool hollow = false;
  bool dashed = false;
  double radius = 3.5;
};

// A horizontal line with a word on it.
struct PlotRule {
  double y;
  std::string css, label;
  bool label_below = false;
};

struct Plot {
  std::string title;  // read by screen readers
  std::string x_label;
  double width = 460, height = 300;
  double left = 58;                    // room for the labels of y
  bool log_x = true;                   // y always is logarithmic
  std::vector<Tick> x_ticks, y_ticks;  // the first and last y tick bound the plot
  double x_min = 0, x_max = 1;
  std::vector<double> separators;  // vertical lines
  std::vector<PlotSeries> series;
  std::vector<PlotRule> rules;
};

std::string svg(const Plot& plot);

}  // namespace headrace::tool
