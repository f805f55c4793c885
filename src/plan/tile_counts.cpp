#include "plan/tile_counts.hpp"

#include <algorithm>
#include <cmath>

namespace headrace {
namespace {

double length(Range range) { return static_cast<double>(range.size()); }

// Sum over i in rows of clamp(i + offset, keys.begin, keys.end).
double sum_of_clamped(Range rows, Index offset, Range keys) {
  const Index below = std::clamp<Index>(keys.begin - offset - rows.begin, 0, rows.size());
  const Index above = std::clamp<Index>(rows.end + offset - keys.end, 0, rows.size() - below);
  const double between = static_cast<double>(rows.size() - below - above);
  const double first = static_cast<double>(rows.begin + below + offset);
  return static_cast<double>(below) * static_cast<double>(keys.begin) +
         static_cast<double>(above) * static_cast<double>(keys.end) +
         (between > 0 ? between * first + between * (between - 1) / 2 : 0);
}

// A row of tiles without a block mask: the visited tiles are those that the interval of visible keys touches, and the
// full ones lie between two bounds.
void add_band_row(const Visibility& visibility, Range rows, Index tile_k, double weight, TileCounts& counts) {
  const Range keys = visibility.keys_of_rows(rows);
  if (keys.empty()) return;
  const Index visited = ceil_div(keys.end, tile_k) - keys.begin / tile_k;
  const Index first_key = max_index(0, rows.end - 1 + visibility.band.lo);  // visible to all rows from here
  const Index end_key = min_index(visibility.seqlen_k, rows.begin + visibility.band.hi + 1);  // to here
  // The last tile may be short, and is then full where its end is that of the sequence.
  const Index end_tile = end_key == visibility.seqlen_k ? ceil_div(end_key, tile_k) : max_index(0, end_key) / tile_k;
  const Index full = max_index(0, end_tile - ceil_div(first_key, tile_k));
  counts.visited += weight * static_cast<double>(visited);
  counts.edge += weight * static_cast<double>(visited - full);
}

void add_masked_row(const Visibility& visibility, Range rows, Index tile_k, double weight, TileCounts& counts) {
  const Range keys = visibility.keys_of_rows(rows);
  for (Index begin = keys.begin / tile_k * tile_k; begin < keys.end; begin += tile_k) {
    const TileKind kind = visibility.classify(rows, {begin, min_index(visibility.seqlen_k, begin + tile_k)});
    if (kind == TileKind::hidden) continue;
    counts.visited += weight;
    if (kind == TileKind::edge) counts.edge += weight;
  }
}

// Pairs of the blocks that are set in the rows of one block row.
void add_block_row(const Visibility& visibility, Range rows, double weight, TileCounts& counts) {
  const BlockMask& blocks = visibility.blocks;
  const Range keys = visibility.keys_of_rows(rows);
  for (Index begin = keys.begin / blocks.block_k * blocks.block_k; begin < keys.end; begin += blocks.block_k) {
    if (blocks.visible(rows.begin, begin))
      counts.visible_pairs += weight * pairs_in_band(visibility.band, rows,
                                                     {begin, min_index(visibility.seqlen_k, begin + blocks.block_k)});
  }
}

// Calls add(rows, weight) for chunks of `size` rows, each standing for `weight` chunks: all of them, or one of every
// `step` neighbours, its place among them scrambled so that it does not beat with the period of the tiles of keys.
template <typename Add>
void sample_rows(Index seqlen_q, Index size, double cost_of_chunk, double budget, bool& exact, Add&& add) {
  const Index chunks = ceil_div(seqlen_q, size);
  const double allowed = std::max(1.0, std::floor(budget / std::max(1.0, cost_of_chunk)));
  const Index step = max_index(1, static_cast<Index>(std::ceil(static_cast<double>(chunks) / allowed)));
  if (step > 1) exact = false;
  for (Index group = 0; group < chunks; group += step) {
    const Index members = min_index(step, chunks - group);
    const std::uint64_t scrambled = static_cast<std::uint64_t>(group / step) * 0x9E3779B97F4A7C15u >> 33;
    const Index chunk = group + static_cast<Index>(scrambled) % members;
    add(Range{chunk * size, min_index(seqlen_q, (chunk + 1) * size)}, static_cast<double>(members));
  }
}

// One (sequence, head), counted `weight` times.
void add_sequence(Visibility visible, Index tile_q, Index tile_k, double weight, double budget, TileCounts& counts) {
  const double tiles_of_row = static_cast<double>(ceil_div(visible.seqlen_k, tile_k));
  counts.total += weight * static_cast<double>(ceil_div(visible.seqlen_q, tile_q)) * tiles_of_row;
  counts.pairs += weight * static_cast<double>(visible.seqlen_q) * static_cast<double>(visible.seqlen_k);

  const double blocks_of_tile = static_cast<double>(tile_q / visible.blocks.block_q + 2) *
                                static_cast<double>(tile_k / visible.blocks.block_k + 2);
  const double cost_of_row = tiles_of_row * blocks_of_tile;
  if (visible.blocks.bits != nullptr && cost_of_row > 64 * std::max(budget, 1e4)) {
    visible.blocks = {};
    counts.exact = false;
  }
  if (visible.blocks.bits == nullptr) {
    counts.visible_pairs += weight * pairs_in_band(visible.band, {0, visible.seqlen_q}, {0, visible.seqlen_k});
    sample_rows(visible.seqlen_q, tile_q, 1, budget, counts.exact, [&](Range rows, double rows_weight) {
      add_band_row(visible, rows, tile_k, weight * rows_weight, counts);
    });
    return;
  }
  sample_rows(visible.seqlen_q, tile_q, cost_of_row, budget, counts.exact, [&](Range rows, double rows_weight) {
    add_masked_row(visible, rows, tile_k, weight * rows_weight, counts);
  });
  const double cost_of_block_row = static_cast<double>(ceil_div(visible.seqlen_k, visible.blocks.block_k));
  sample_rows(visible.seqlen_q, visible.blocks.block_q, cost_of_block_row, budget, counts.exact,
              [&](Range rows, double rows_weight) { add_block_row(visible, rows, weight * rows_weight, counts); });
}

}  // namespace

double pairs_in_band(const Band& band, Range rows, Range keys) {
  if (rows.empty() || keys.empty() || band.lo > band.hi) return 0;
  if (band.everything()) return length(rows) * length(keys);
  return sum_of_clamped(rows, band.hi + 1, keys) - sum_of_clamped(rows, band.lo, keys);
}

TileCounts count_tiles(const Problem& problem, const std::uint8_t* block_mask, std::int64_t tile_q, std::int64_t tile_k,
                       double budget) {
  TileCounts counts;
  const bool read_blocks = problem.has_block_mask && block_mask != nullptr;
  counts.exact = read_blocks || !problem.has_block_mask || problem.seqlen_q == 0 || problem.seqlen_k == 0;

  // Heads with the same block mask, and dense sequences without lengths of their own, count alike.
  const bool heads_differ = read_blocks && problem.block_mask.head != 0;
  const bool sequences_differ = problem.ragged || !problem.unused_q.empty() || !problem.unused_k.empty() ||
                                (read_blocks && problem.block_mask.batch != 0);
  const std::int64_t heads = heads_differ ? problem.heads_q : std::min<std::int64_t>(problem.heads_q, 1);
  const std::int64_t batch = sequences_differ ? problem.batch : std::min<std::int64_t>(problem.batch, 1);
  if (heads == 0 || batch == 0) return counts;
  const double alike = static_cast<double>(problem.heads_q / heads) * static_cast<double>(problem.batch / batch);
  const double share = budget / (static_cast<double>(heads) * static_cast<double>(batch));

  Buffers buffers;
  buffers.block_mask = block_mask;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const Sequence& s = problem.sequences[static_cast<std::size_t>(b)];
      const Visibility by_band{.band = problem.band(b), .seqlen_q = s.q_len, .seqlen_k = s.k_len, .blocks = {}};
      add_sequence(read_blocks ? visibility(problem, buffers, b, h) : by_band, tile_q, tile_k, alike, share, counts);
    }
  }
  return counts;
}

}  // namespace headrace
