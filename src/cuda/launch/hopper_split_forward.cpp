// Launches split_rows.cuh and hopper_split_forward.cuh: the forward pass of float32 problems.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>

#include "cuda/driver/context.hpp"
#include "cuda/driver/driver.hpp"
#include "cuda/driver/module_cache.hpp"
#include "cuda/kernels/hopper_split_forward_params.hpp"
#include "cuda/launch/cuda_kernel.hpp"
#include "cuda/launch/forward_params.hpp"
#include "cuda/launch/hopper_split_forward_source.hpp"
#include "cuda/launch/tensor_map.hpp"

namespace headrace::cuda {
namespace {

constexpr std::int64_t parts = 2, rows_of_q_group = 64;

// q, k or v, and where its parts lie in the workspace.
struct Input {
  const char* name;
  RowsOfHeads from;
  std::int64_t rows_of_group;
  std::size_t parts_offset = 0, groups_offset = 0;
  std::optional<PlannedTensorMap> map{};  // of the parts

  [[nodiscard]] std::int64_t pitch() const { return ceil_div(from.size, 8) * 8; }
  [[nodiscard]] std::int64_t groups_of_head() const { return ceil_div(from.rows, rows_of_group); }
  [[nodiscard]] std::int64_t groups() const { return from.batch * from.heads * groups_of_head(); }

  // Part after part, head after head.
  [[nodiscard]] RowsOfHeads of_parts() const {
    return {.batch = parts * from.batch,
            .rows = from.rows,
            .heads = from.heads,
            .size = from.size,
            .strides = {.batch = from.heads * from.rows * pitch(), .row = pitch(), .head = from.rows * pitch()}};
  }

  // All but the pointers.
  [[nodiscard]] SplitTensor tensor() const {
    return {.from = nullptr,
            .batch_stride = from.strides.batch,
            .row_stride = from.strides.row,
            .head_stride = from.strides.head,
            .parts = nullptr,
            .groups = nullptr,
            .rows = static_cast<int>(from.rows),
            .heads = static_cast<int>(from.heads),
            .size = static_cast<int>(from.size),
            .pitch = static_cast<int>(pitch()),
            .rows_of_group = static_cast<int>(rows_of_group),
            .groups_of_head = static_cast<int>(groups_of_head()),
            .all_groups = static_cast<int>(groups())};
  }
  void set_pointers(SplitTensor& tensor, const void* data, std::byte* workspace) const {
    tensor.from = static_cast<const float*>(data);
    tensor.parts = reinterpret_cast<unsigned short*>(workspace + parts_offset);
    tensor.groups = reinterpret_cast<SplitGroup*>(workspace + groups_offset);
  }
  [[nodiscard]] CUtensorMap map_in(const std::byte* workspace) const { return map->at(workspace + parts_offset); }
};

class HopperSplitForward final : public CudaKernel {
 public:
  HopperSplitForward(const Problem& p, int multiprocessors)
      : CudaKernel(p),
        variant_(hopper_split_variant(p, multiprocessors)),
        kernel_(hopper_split_forward_source(p, variant_)),
        split_(split_rows_source(p)),
        multiprocessors_(multiprocessors),
        inputs_{
            {{.name = "q", .from = {p.batch, p.seqlen_q, p.heads_q, p.head_dim, p.q}, .rows_of_group = rows_of_q_group},
             {.name = "k",
              .from = {p.batch, p.seqlen_k, p.heads_kv, p.head_dim, p.k},
              .rows_of_group = variant_.tile->keys},
             {.name = "v",
              .from = {p.batch, p.seqlen_k, p.heads_kv, p.value_dim, p.v},
              .rows_of_group = variant_.tile->keys}}} {
    check_size(p);
    const std::int64_t query_tiles = ceil_div(p.seqlen_q, HopperSplitTile::rows);
    params_.forward = forward_params(p, {.query_tiles = query_tiles,
                                         .paired = variant_.paired,
                                         .value_chunks = variant_.value_chunks(p),
                                         .most_blocks = multiprocessors});
    params_.value_chunks = divisor(variant_.value_chunks(p));
    params_.batch = static_cast<int>(p.batch);
    params_.head_dim = static_cast<int>(p.head_dim);
    pairs_out_ = p.value_dim % 2 == 0 && p.out.batch % 2 == 0 && p.out.row % 2 == 0 && p.out.head % 2 == 0;
    if (blocks() == 0) return;
    for (Input& input : inputs_) {
      place(input);
      split_blocks_ += static_cast<unsigned>(input.groups());
    }
    params_.q = inputs_[0].tensor();
    params_.k = inputs_[1].tensor();
    params_.v = inputs_[2].tensor();
    const ContextScope context(p.device_index);
    split_.load();
    kernel_.load();
  }

  [[nodiscard]] std::size_t workspace_bytes() const override { return workspace_bytes_; }

  [[nodiscard]] KernelReport report() const override {
    return {.name = "cuda.hopper_split_forward",
            .worker = "SM",
            .tile_q = HopperSplitTile::rows,
            .tile_k = variant_.tile->keys,
            .splits = 1,
            .tasks = params_.forward.all_pieces,
            .threads = blocks(),
            .available_threads = multiprocessors_,
            .key_reuse = 1,
            .fast_bytes = shared_bytes(),
            .flops_per_byte = 69,  // H200: a third of 990 TFLOP/s of float16 against 4.8 TB/s
            .notes = {"float32 is computed as three products of float16 parts, which are made in the workspace first"}};
  }

  void execute(const Buffers& buffers, std::byte* workspace) const override {
    if (blocks() == 0) return;
    const ContextScope context(problem_.device_index);
    check_pointers(buffers, workspace);
    HopperSplitForwardParams params = params_;
    set_pointers(params.forward, buffers);
    params.pairs_out = pairs_out_ && reinterpret_cast<std::uintptr_t>(buffers.out) % (2 * sizeof(float)) == 0;
    inputs_[0].set_pointers(params.q, buffers.q, workspace);
    inputs_[1].set_pointers(params.k, buffers.k, workspace);
    inputs_[2].set_pointers(params.v, buffers.v, workspace);
    SplitRowsParams rows{{params.q, params.k, params.v}};
    void* split_arguments[] = {&rows};
    launch(split_.in(context), split_blocks_, 256, buffers.stream, split_arguments);

    CUtensorMap map_q = inputs_[0].map_in(workspace);
    // Without keys nothing is loaded, but a map needs memory behind it.
    CUtensorMap map_k = problem_.seqlen_k == 0 ? map_q : inputs_[1].map_in(workspace);
    CUtensorMap map_v = problem_.seqlen_k == 0 ? map_q : inputs_[2].map_in(workspace);
    void* arguments[] = {&map_q, &map_k, &map_v, &params};
    launch(kernel_.in(context), params.forward.blocks, 128 * (HopperSplitTile::warpgroups + 1), buffers.stream,
           arguments);
  }

 private:
  void place(Input& input) {
    constexpr std::size_t alignment = 128;
    const RowsOfHeads of_parts = input.of_parts();
    constexpr std::int64_t limit = std::int64_t{1} << 30;
    if (!tma_obstacle(of_parts, HR_FLOAT16).empty() || input.groups() >= limit)
      unsupported(fmt::format("{}: float16 parts of [{}, {}, {}, {}] are too large for CUDA", input.name,
                              input.from.batch, input.from.rows, input.from.heads, input.from.size));
    input.map.emplace(of_parts, HR_FLOAT16, static_cast<int>(input.rows_of_group));
    const auto take = [&](std::int64_t bytes) {
      const std::size_t offset = (workspace_bytes_ + alignment - 1) / alignment * alignment;
      workspace_bytes_ = offset + static_cast<std::size_t>(bytes);
      return offset;
    };
    input.parts_offset = take(parts * input.from.batch * of_parts.strides.batch * 2);
    input.groups_offset = take(input.groups() * static_cast<std::int64_t>(sizeof(SplitGroup)));
  }

  [[nodiscard]] int blocks() const { return static_cast<int>(params_.forward.blocks); }

  [[nodiscard]] std::size_t shared_bytes() const {
    const HopperSplitTile& t = *variant_.tile;
    const Index rows_of_head = HopperSplitTile::rows + HopperSplitTile::stages * t.keys;
    const Index elements =
        rows_of_head * t.head_dim + static_cast<Index>(HopperSplitTile::stages) * t.keys * t.value_dim;
    return static_cast<std::size_t>(parts * elements * 2);
  }

  HopperSplitVariant variant_;
  PlannedKernel kernel_, split_;
  int multiprocessors_;
  HopperSplitForwardParams params_{};
  std::array<Input, 3> inputs_;
  unsigned split_blocks_ = 0;
  bool pairs_out_ = false;  // strides allow two columns at a time
  std::size_t workspace_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Kernel> make_hopper_split_forward(const Problem& problem, int multiprocessors) {
  return std::make_unique<HopperSplitForward>(problem, multiprocessors);
}

}  // namespace headrace::cuda
