// A picture of the tiles of a score matrix that a kernel visits under a mask.
#pragma once

#include <cstdint>
#include <string>

#include "tiling/tiling.hpp"

namespace headrace::tool {

struct TilePicture {
  std::string svg;
  std::int64_t hidden = 0, full = 0, edge = 0;
  [[nodiscard]] std::int64_t tiles() const { return hidden + full + edge; }
};

// Queries run down, keys to the right; one rectangle a tile of tile_q x tile_k, coloured by what the
// kernels' own tile walk says of it.
TilePicture draw_tiles(const Visibility& visibility, std::int64_t tile_q, std::int64_t tile_k,
                       const std::string& title);

}  // namespace headrace::tool
