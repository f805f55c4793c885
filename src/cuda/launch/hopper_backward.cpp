// Launches hopper_backward.cuh and backward_convert.cuh, or hopper_backward_keys.cuh and hopper_backward_queries.cuh:
// the backward pass of 16-bit problems.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "cuda/launch/backward_pass.hpp"
#include "cuda/launch/backward_source.hpp"
#include "cuda/launch/forward_constants.hpp"
#include "cuda/launch/forward_params.hpp"
#include "cuda/launch/tma_input.hpp"
#include "describe/tensor_view.hpp"

namespace headrace::cuda {
namespace {

constexpr int rows_of_box = 16, convert_threads = 256, bias_zeros_threads = 256;

// dq, dk or dv.
struct Gradient {
  RowsOfHeads rows;
  bool walkable;  // by TMA, which writes 16 bytes at a time, behind the end of a row too
  PlannedTensorMap planned_map;

  Gradient(const RowsOfHeads& of, hr_dtype type)
      : rows(of), walkable(of.size % 8 == 0 && tma_obstacle(of, type).empty()), planned_map(of, type, rows_of_box) {}
  [[nodiscard]] GradientRows at(void* data) const {
    return {.to = data,
            .strides = by_row(rows.strides),
            .columns = static_cast<int>(rows.size),
            .by_tma = walkable && reinterpret_cast<std::uintptr_t>(data) % tma_alignment == 0};
  }
  // Where the kernel does not use it, any map will do.
  [[nodiscard]] CUtensorMap map(const GradientRows& gradient, const CUtensorMap& any) const {
    return gradient.by_tma != 0 ? planned_map.at(gradient.to) : any;
  }
};

class HopperBackward final : public BackwardPass {
 public:
  HopperBackward(const Problem& p, int multiprocessors)
      : BackwardPass(p, hopper_backward_tile(p).queries, !makes_dbias(p, hopper_backward_tile(p))),
        tile_(hopper_backward_tile(p)),
        multiprocessors_(multiprocessors),
        key_tiles_(ceil_div(p.seqlen_k, tile_.keys)),
        dq_({p.batch, p.seqlen_q, p.heads_q, p.head_dim, p.dq}, p.dtype),
        dk_({p.batch, p.seqlen_k, p.heads_kv, p.head_dim, p.dk}, p.dtype),
        dv_({p.batch, p.seqlen_k, p.heads_kv, p.value_dim, p.dv}, p.dtype) {
    const std::vector<KernelSource> sources = hopper_backward_sources(p, tile_);
    main_.emplace(sources[0]).load();
    std::size_t number = 0;
    const auto input = [&](const char* name, std::int64_t rows, std::int64_t heads, std::int64_t size,
                           const RowStrides& strides, int box_rows, bool aligned) {
      inputs_[number++].emplace(name, RowsOfHeads{p.batch, rows, heads, size, strides}, p.dtype, box_rows, aligned,
                                workspace_bytes_);
    };
    input("q", p.seqlen_q, p.heads_q, p.head_dim, p.q, tile_.queries, p.q_aligned);
    input("k", p.seqlen_k, p.heads_kv, p.head_dim, p.k, tile_.keys, p.k_aligned);
    input("v", p.seqlen_k, p.heads_kv, p.value_dim, p.v, tile_.keys, p.v_aligned);
    input("dout", p.seqlen_q, p.heads_q, p.value_dim, p.dout, tile_.queries, p.dout_aligned);
    if (loads_bias(p, tile_))
      bias_.emplace("bias", pair_rows(p, p.bias), p.dtype, tile_.queries, p.bias_aligned, workspace_bytes_);
    plan_main();
    if (tile_.two_passes()) {
      queries_.emplace(sources[1]).load();
      return;
    }
    if (makes_dbias(p, tile_) && (is_banded(p) || p.has_block_mask))
      bias_zeros_.emplace(backward_bias_zeros_source(p, tile_)).load();
    writes_dbias_in_vectors_ = (stores_dbias_by_tma(p, tile_) || bias_zeros_) && has_dbias_in_vectors(p);
    if (stores_dbias_by_tma(p, tile_)) dbias_.emplace(pair_rows(p, p.dbias), p.dtype, tile_.queries);
    convert_.emplace(backward_convert_source(p, tile_)).load();
    plan_convert();
    turns_offset_ = take(4 * (all_query_tiles() + 1));  // one more: the tickets
    dq_offset_ = take(std::int64_t{4} * dq_floats * all_query_tiles());
  }

  [[nodiscard]] KernelReport report() const override {
    return {.name = tile_.two_passes() ? "cuda.hopper_backward_keys, _queries" : "cuda.hopper_backward",
            .worker = "SM",
            .tile_q = tile_.queries,
            .tile_k = tile_.keys,
            .splits = 1,
            .tasks = key_blocks(),
            .threads = static_cast<int>(std::min<std::int64_t>(key_blocks(), multiprocessors_)),
            .available_threads = multiprocessors_,
            .key_reuse = 1,
            .fast_bytes = shared_bytes(),
            .flops_per_byte = 206,  // H200: 990 TFLOP/s of bfloat16 against 4.8 TB/s
            .notes = notes()};
  }

 protected:
  void launch_gradients(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const override {
    launch_main(buffers, workspace, context);
    if (all_query_tiles() > 0 && !tile_.two_passes()) launch_convert(buffers, workspace, context);
  }
  [[nodiscard]] Zeroed zeroed(std::byte* workspace) const override {
    if (tile_.two_passes()) return {};
    return {.dq = accumulates_onto_zeros(problem_, tile_) ? dq_in(workspace) : nullptr,
            .dq_floats = dq_floats,
            .turns = turns_in(workspace),
            .tickets = tickets_in(workspace)};
  }

 private:
  static constexpr int dq_floats = 8192;  // of a query tile

  [[nodiscard]] std::int64_t dq_blocks() const {
    return ceil_div(query_tiles() * tile_.queries, HopperBackwardTile::query_rows) * problem_.batch * problem_.heads_q;
  }
  [[nodiscard]] std::int64_t key_blocks() const { return key_tiles_ * problem_.batch * problem_.heads_kv; }

  [[nodiscard]] float* dq_in(std::byte* workspace) const { return reinterpret_cast<float*>(workspace + dq_offset_); }
  [[nodiscard]] int* turns_in(std::byte* workspace) const { return reinterpret_cast<int*>(workspace + turns_offset_); }
  [[nodiscard]] int* tickets_in(std::byte* workspace) const { return turns_in(workspace) + all_query_tiles(); }

  // In which order key tiles are worked on, see Item in hopper_backward.cuh.
  void set_order(HopperBackwardParams& params) const {
    const Problem& p = problem_;
    // A key-value head's q, dout, dq. So many heads' leave room in 50 MiB of L2 cache for the keys.
    constexpr std::int64_t room = std::int64_t{34} << 20, most_of_gang = (std::int64_t{1} << 31) - 1;
    const std::int64_t of_head = p.group() * p.seqlen_q * (6 * p.head_dim + 2 * p.value_dim);
    const std::int64_t heads = p.batch * p.heads_kv;
    const std::int64_t most_heads = std::clamp<std::int64_t>(room / std::max<std::int64_t>(of_head, 1), 1, heads);
    const std::int64_t most_members =
        std::clamp<std::int64_t>(most_of_gang / std::max<std::int64_t>(query_tiles(), 1), 1, multiprocessors_);
    params.heads = static_cast<unsigned>(heads);
    params.turned_section = std::numeric_limits<unsigned>::max();
    params.in_order = is_done_in_order(p, tile_);
    if (params.in_order != 0) {
      // Bounded below only, the first key tiles are those that see few queries.
      params.downwards = params.forward.band_hi >= p.seqlen_k - 1 && params.forward.band_lo > 1 - p.seqlen_q;
      set_sections(params, most_heads, 1);
      // The last sections are one, if it would not fill the device else.
      const std::int64_t sections = ceil_div(heads, most_heads);
      const std::int64_t turned_heads =
          std::max<std::int64_t>(heads - (sections - 1) * most_heads, ceil_div(multiprocessors_, key_tiles_));
      const std::int64_t turned_section = std::max<std::int64_t>(heads - turned_heads, 0) / most_heads;
      const bool full = turned_section * most_heads * key_tiles_ >= multiprocessors_;
      params.turned_section = static_cast<unsigned>(full ? turned_section : sections);  // or none
      return;
    }
    // What fills the device best; of equals, most heads, whose key tiles follow one another at the greatest distance.
    // More heads than multiprocessors never fit.
    std::int64_t filled = 0;
    for (std::int64_t h = 1; h <= std::min<std::int64_t>(most_heads, multiprocessors_); ++h) {
      const std::int64_t gangs =
          std::max<std::int64_t>(ceil_div(key_tiles_ * h, multiprocessors_), ceil_div(key_tiles_, most_members));
      const std::int64_t at_once = h * ceil_div(key_tiles_, gangs);
      // Several sections work at the same time where they are small.
      const std::int64_t busy = at_once * std::max<std::int64_t>(multiprocessors_ / at_once, 1);
      if (busy < filled || at_once > multiprocessors_) continue;
      filled = busy;
      set_sections(params, h, gangs);
    }
  }
  void set_sections(HopperBackwardParams& params, std::int64_t heads, std::int64_t gangs) const {
    params.section_heads = static_cast<unsigned>(heads);
    params.section_items = divisor(heads * key_tiles_);
    params.gangs = static_cast<unsigned>(gangs);
  }

  void plan_main() {
    const Problem& p = problem_;
    params_.forward = options();
    params_.key_tiles = static_cast<unsigned>(key_tiles_);
    params_.items = static_cast<unsigned>(key_blocks());
    params_.heads_kv = divisor(p.heads_kv);
    params_.group = divisor(p.group());
    params_.query_tiles = divisor(query_tiles());
    params_.dbias_strides = {p.dbias.batch, p.dbias.head, p.dbias.query, p.dbias.key};
    if (key_blocks() > 0) set_order(params_);
  }

  void launch_main(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const {
    HopperBackwardParams params = params_;
    cuda::set_pointers(params.forward, buffers);
    params.statistics = statistics_in(workspace);
    params.dq = dq_in(workspace);
    params.turns = turns_in(workspace);
    params.tickets = tickets_in(workspace);
    params.dq_rows = dq_.at(buffers.dq);
    params.dk = dk_.at(buffers.dk);
    params.dv = dv_.at(buffers.dv);
    if (writes_dbias_in_vectors_) check_aligned("dbias", buffers.dbias);
    params.dbias = buffers.dbias;

    // Without queries or keys nothing of them is loaded, but a map needs memory behind it.
    const auto map_of = [&](std::size_t input, const void* data) {
      return inputs_[input]->map(data, workspace, static_cast<CUstream>(buffers.stream), context);
    };
    const bool any_q = all_query_tiles() > 0, any_k = key_blocks() > 0;
    CUtensorMap k = any_k ? map_of(1, buffers.k) : map_of(0, buffers.q);
    CUtensorMap v = any_k ? map_of(2, buffers.v) : k;
    CUtensorMap q = any_q ? map_of(0, buffers.q) : k;
    CUtensorMap dout = any_q ? map_of(3, buffers.dout) : k;
    if (any_k) {
      CUtensorMap dk = dk_.map(params.dk, k), dv = dv_.map(params.dv, k);
      CUtensorMap bias =
          bias_ ? bias_->map(buffers.bias, workspace, static_cast<CUstream>(buffers.stream), context) : k;
      CUtensorMap dbias = dbias_ ? dbias_->at(buffers.dbias) : k;
      void* one_pass[] = {&q, &k, &v, &dout, &dk, &dv, &bias, &dbias, &params};
      void* two_passes[] = {&q, &k, &v, &dout, &dk, &dv, &params};
      // hopper_backward's blocks of threads stay.
      const std::int64_t blocks =
          tile_.two_passes() ? key_blocks() : std::min<std::int64_t>(key_blocks(), multiprocessors_);
      launch(main_->in(context), static_cast<unsigned>(blocks), HopperBackwardTile::threads, buffers.stream,
             tile_.two_passes() ? two_passes : one_pass);
    }
    if (any_q && bias_zeros_) {
      void* arguments[] = {&params};
      launch(bias_zeros_->in(context), static_cast<unsigned>(all_query_tiles()), bias_zeros_threads, buffers.stream,
             arguments);
    }
    if (any_q && tile_.two_passes()) {
      CUtensorMap dq = dq_.map(params.dq_rows, q);
      void* arguments[] = {&q, &k, &v, &dout, &dq, &params};
      launch(queries_->in(context), static_cast<unsigned>(dq_blocks()), HopperBackwardTile::threads, buffers.stream,
             arguments);
    }
  }

  void plan_convert() {
    const Problem& p = problem_;
    convert_params_.forward = options();
    convert_params_.strides = by_row(p.dq);
    convert_params_.head_dim = static_cast<int>(p.head_dim);
    convert_params_.query_tiles = divisor(query_tiles());
    convert_params_.heads_q = divisor(p.heads_q);
    convert_params_.scale = static_cast<float>(p.scale);
  }

  void launch_convert(const Buffers& buffers, std::byte* workspace, const ContextScope& context) const {
    BackwardConvertParams params = convert_params_;
    cuda::set_pointers(params.forward, buffers);
    params.dq = dq_in(workspace);
    params.to = buffers.dq;
    params.vectors = rows_are_aligned(buffers.dq, problem_.dq);
    void* arguments[] = {&params};
    launch(convert_->in(context), static_cast<unsigned>(all_query_tiles()), convert_threads, buffers.stream, arguments);
  }

  [[nodiscard]] std::vector<std::string> notes() const {
    std::vector<std::string> all;
    for (const auto& input : inputs_)
      if (std::string note = input->note(); !note.empty()) all.push_back(std::move(note));
    return all;
  }

  [[nodiscard]] std::size_t shared_bytes() const {
    const Index columns = ceil_div(tile_.head_dim, 64) * 64 + ceil_div(tile_.value_dim, 64) * 64;
    const Index of_scores = static_cast<Index>(tile_.queries) * tile_.keys;
    const Index stages = bias_ ? tile_.stages_beside_bias : tile_.stages;
    const Index loaded = columns * (tile_.keys + stages * tile_.queries) + (bias_ ? tile_.bias_stages : 0) * of_scores;
    const Index exchanged = 2 * of_scores;
    return static_cast<std::size_t>(2 * (loaded + exchanged) + (tile_.two_passes() ? 0 : 4 * dq_floats));
  }

  const HopperBackwardTile& tile_;
  std::optional<PlannedKernel> main_;  // hopper_backward, or hopper_backward_keys
  std::optional<PlannedKernel> queries_, convert_, bias_zeros_;
  int multiprocessors_;
  std::int64_t key_tiles_;  // of a head
  Gradient dq_, dk_, dv_;
  std::optional<TmaInput> bias_;                   // where it is loaded by TMA
  std::optional<PlannedTensorMap> dbias_;          // where it is stored by TMA
  std::array<std::optional<TmaInput>, 4> inputs_;  // q, k, v, dout
  bool writes_dbias_in_vectors_ = false;
  HopperBackwardParams params_{};
  BackwardConvertParams convert_params_{};
  std::size_t dq_offset_ = 0, turns_offset_ = 0;
};

}  // namespace

std::unique_ptr<Kernel> make_hopper_backward(const Problem& p, int multiprocessors) {
  const ContextScope context(p.device_index);
  return std::make_unique<HopperBackward>(p, multiprocessors);
}

}  // namespace headrace::cuda
