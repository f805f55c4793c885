#include "cuda/launch/tma_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "cuda/driver/driver.hpp"
#include "cuda/launch/cuda_kernel.hpp"
#include "cuda/launch/pack_rows_source.hpp"
#include "describe/tensor_view.hpp"

namespace headrace::cuda {
namespace {

constexpr std::int64_t row_alignment = 8;              // elements: 16 bytes of the smallest type
constexpr std::size_t block_alignment = 64;            // bytes, of a copy in the workspace
constexpr int pack_threads = 256, most_blocks = 2048;  // about two rounds of all that a GPU holds at a time

RowsOfHeads contiguous(RowsOfHeads t) {
  const std::int64_t pitch = ceil_div(t.size, row_alignment) * row_alignment;
  t.strides = {.batch = t.rows * t.heads * pitch, .row = t.heads * pitch, .head = pitch};
  return t;
}

}  // namespace

TmaInput::TmaInput(const char* name, const RowsOfHeads& rows, hr_dtype dtype, int box_rows, bool aligned,
                   std::size_t& workspace_bytes)
    : name_(name) {
  if (rows.batch == 0 || rows.rows == 0 || rows.heads == 0) return;
  obstacle_ = tma_obstacle(rows, dtype);
  if (obstacle_.empty() && !aligned) obstacle_ = fmt::format("its data is not aligned to {} bytes", tma_alignment);
  if (obstacle_.empty()) {
    map_.emplace(rows, dtype, box_rows);
    return;
  }
  // A view with strides of 0 may be larger than any memory; TMA's strides end at 2^40 bytes.
  std::int64_t bytes = ceil_div(rows.size, row_alignment) * row_alignment * dtype_size(dtype);
  bool fits = true;
  for (const std::int64_t count : {rows.heads, rows.rows, rows.batch}) {
    fits = fits && (bytes < tma_largest_stride || count == 1);
    fits = !__builtin_mul_overflow(bytes, count, &bytes) && fits;
  }
  if (!fits || bytes > std::numeric_limits<std::int64_t>::max() / 4)
    unsupported(fmt::format("{}: {}, and a copy of [{}, {}, {}, {}] is too large for CUDA", name, obstacle_, rows.batch,
                            rows.rows, rows.heads, rows.size));
  const RowsOfHeads packed = contiguous(rows);
  map_.emplace(packed, dtype, box_rows);
  offset_ = (workspace_bytes + block_alignment - 1) / block_alignment * block_alignment;
  workspace_bytes = offset_ + static_cast<std::size_t>(bytes);
  pack_.emplace(pack_rows_source(static_cast<int>(dtype_size(dtype)))).load();
  params_ = {.from = nullptr,
             .to = nullptr,
             .batch_stride = rows.strides.batch,
             .row_stride = rows.strides.row,
             .head_stride = rows.strides.head,
             .rows = rows.rows,
             .heads = rows.heads,
             .all = rows.batch * rows.rows * rows.heads,
             .size = static_cast<int>(rows.size),
             .pitch = static_cast<int>(packed.strides.head),
             .rows_of_warp = 0};
  constexpr std::int64_t warps = pack_threads / 32;
  params_.rows_of_warp = ceil_div(params_.all, warps * most_blocks);
  blocks_ = static_cast<unsigned>(ceil_div(params_.all, warps * params_.rows_of_warp));
}

CUtensorMap TmaInput::map(const void* data, std::byte* workspace, CUstream stream, const ContextScope& context) const {
  if (obstacle_.empty()) {
    check_aligned(name_, data);
    return map_->at(data);
  }
  PackRowsParams params = params_;
  params.from = data;
  params.to = workspace + offset_;
  void* arguments[] = {&params};
  launch(pack_->in(context), blocks_, pack_threads, stream, arguments);
  return map_->at(params.to);
}

std::string TmaInput::note() const {
  return obstacle_.empty() ? "" : fmt::format("{} is copied to the workspace first: {}", name_, obstacle_);
}

}  // namespace headrace::cuda
