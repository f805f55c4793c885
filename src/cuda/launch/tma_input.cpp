#include "cuda/launch/tma_input.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "cuda/driver/driver.hpp"
#include "cuda/driver/module_cache.hpp"
#include "cuda/kernels/pack_rows_params.hpp"
#include "cuda/launch/cuda_kernel.hpp"
#include "cuda/launch/pack_rows_source.hpp"
#include "describe/tensor_view.hpp"

namespace headrace::cuda {
namespace {

constexpr std::int64_t row_alignment = 8;         // elements: 16 bytes of the smallest type
constexpr std::size_t block_alignment = 64;       // bytes, of a copy in the workspace
constexpr int threads = 256, most_blocks = 2048;  // about two rounds of all that a GPU holds at a time

RowsOfHeads contiguous(RowsOfHeads t) {
  const std::int64_t pitch = ceil_div(t.size, row_alignment) * row_alignment;
  t.strides = {.batch = t.rows * t.heads * pitch, .row = t.heads * pitch, .head = pitch};
  return t;
}

}  // namespace

TmaInput::TmaInput(const char* name, const RowsOfHeads& rows, hr_dtype dtype, bool aligned,
                   std::size_t& workspace_bytes)
    : name_(name), rows_(rows), packed_(rows), dtype_(dtype) {
  if (rows.batch == 0 || rows.rows == 0 || rows.heads == 0) return;
  obstacle_ = tma_obstacle(rows, dtype);
  if (obstacle_.empty() && !aligned) obstacle_ = fmt::format("its data is not aligned to {} bytes", tma_alignment);
  if (obstacle_.empty()) return;
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
  packed_ = contiguous(rows);
  offset_ = (workspace_bytes + block_alignment - 1) / block_alignment * block_alignment;
  workspace_bytes = offset_ + static_cast<std::size_t>(bytes);
  load_kernel(pack_rows_source(static_cast<int>(dtype_size(dtype))));
}

CUtensorMap TmaInput::map(const void* data, std::byte* workspace, CUstream stream, int box_rows) const {
  if (!obstacle_.empty()) {
    copy(data, workspace + offset_, stream);
    return make_tensor_map(packed_, dtype_, workspace + offset_, box_rows);
  }
  if (reinterpret_cast<std::uintptr_t>(data) % tma_alignment != 0)
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: is at {}, but the plan was made for data aligned to {} bytes; make "
                                              "a new plan",
                                              name_, fmt::ptr(data), tma_alignment));
  return make_tensor_map(rows_, dtype_, data, box_rows);
}

std::string TmaInput::note() const {
  return obstacle_.empty() ? "" : fmt::format("{} is copied to the workspace first: {}", name_, obstacle_);
}

void TmaInput::copy(const void* data, std::byte* to, CUstream stream) const {
  const LoadedKernel& kernel = load_kernel(pack_rows_source(static_cast<int>(dtype_size(dtype_))));
  PackRowsParams params{.from = data,
                        .to = to,
                        .batch_stride = rows_.strides.batch,
                        .row_stride = rows_.strides.row,
                        .head_stride = rows_.strides.head,
                        .rows = rows_.rows,
                        .heads = rows_.heads,
                        .all = rows_.batch * rows_.rows * rows_.heads,
                        .size = static_cast<int>(rows_.size),
                        .pitch = static_cast<int>(packed_.strides.head),
                        .rows_of_warp = 0};
  constexpr std::int64_t warps = threads / 32;
  params.rows_of_warp = ceil_div(params.all, warps * most_blocks);
  const auto blocks = static_cast<unsigned>(ceil_div(params.all, warps * params.rows_of_warp));
  void* arguments[] = {&params};
  launch(kernel, blocks, threads, stream, arguments);
}

}  // namespace headrace::cuda
