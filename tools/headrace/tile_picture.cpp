#include "tile_picture.hpp"

#include "fmt/format.h"
#include "plot.hpp"

namespace headrace::tool {

TilePicture draw_tiles(const Visibility& visibility, std::int64_t tile_q, std::int64_t tile_k,
                       const std::string& title) {
  constexpr double side = 256.0, margin = 20.0;
  TilePicture picture;
  picture.svg =
      fmt::format("<svg viewBox='0 0 {0} {0}' role='img' aria-label='{1}'>", side + margin + 2, escape_html(title));
  picture.svg += fmt::format("<text x='{:.0f}' y='12' text-anchor='middle'>keys &#8594;</text>", margin + side / 2);
  picture.svg += fmt::format(
      "<text x='12' y='{0:.0f}' text-anchor='middle' transform='rotate(-90 12 {0:.0f})'>&#8592; queries</text>",
      margin + side / 2);
  const double per_row = side / static_cast<double>(visibility.seqlen_q);
  const double per_key = side / static_cast<double>(visibility.seqlen_k);
  for (Index i = 0; i < visibility.seqlen_q; i += tile_q) {
    for (Index j = 0; j < visibility.seqlen_k; j += tile_k) {
      const Range rows{i, min_index(i + tile_q, visibility.seqlen_q)};
      const Range keys{j, min_index(j + tile_k, visibility.seqlen_k)};
      const char* css = "hidden";
      switch (visibility.classify(rows, keys)) {
        case TileKind::hidden:
          ++picture.hidden;
          break;
        case TileKind::full:
          css = "full";
          ++picture.full;
          break;
        case TileKind::edge:
          css = "edge";
          ++picture.edge;
          break;
      }
      picture.svg +=
          fmt::format("<rect class='tile {}' x='{:.1f}' y='{:.1f}' width='{:.1f}' height='{:.1f}'/>", css,
                      margin + static_cast<double>(j) * per_key, margin + static_cast<double>(i) * per_row,
                      static_cast<double>(keys.size()) * per_key, static_cast<double>(rows.size()) * per_row);
    }
  }
  picture.svg += "</svg>";
  return picture;
}

}  // namespace headrace::tool
