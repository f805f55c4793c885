// A validated attention call in one normal form: what plan and execute read. Nothing here depends on
// a backend, and nothing behind it validates again.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"  // Pass
#include "tiling/tiling.hpp"

namespace headrace {

// Thrown by every step before execution and turned into status + message at the C border.
class Failure : public std::runtime_error {
 public:
  Failure(hr_status code, const std::string& message) : std::runtime_error(message), status(code) {}
  hr_status status;
};

// Strides in elements of a tensor of vectors, addressed as (batch, row, head); the vector itself is
// contiguous. In ragged calls `batch` is 0 and rows count over the packed tokens.
struct RowStrides {
  std::int64_t batch = 0, row = 0, head = 0;
  [[nodiscard]] std::int64_t at(std::int64_t b, std::int64_t r, std::int64_t h) const {
    return b * batch + r * row + h * head;
  }
};

// Strides in elements over (batch, head, query, key); 0 where the dimension broadcasts.
struct PairStrides {
  std::int64_t batch = 0, head = 0, query = 0, key = 0;
  [[nodiscard]] std::int64_t at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return b * batch + h * head + i * query + j * key;
  }
};

// One sequence of the batch: rows [q_begin, q_begin + q_len) of q and [k_begin, k_begin + k_len) of k
// and v. Dense: both begins are 0. i, j in masks, bias and dropout count from these begins.
struct Sequence {
  std::int64_t q_begin = 0, q_len = 0, k_begin = 0, k_len = 0;
};

// Rows of no sequence (slack behind cu_seqlens, tails behind seqused): outputs there are zeroed.
struct RowRange {
  std::int64_t batch = 0, begin = 0, end = 0;
};

struct Problem {
  Pass pass = Pass::forward;
  hr_dtype dtype = HR_FLOAT32;
  std::int64_t batch = 0;  // number of sequences
  std::int64_t heads_q = 0, heads_kv = 0;
  std::int64_t head_dim = 0, value_dim = 0;
  std::int64_t seqlen_q = 0, seqlen_k = 0;   // the longest sequence
  bool ragged = false;                       // packed tokens with cu_seqlens
  std::vector<Sequence> sequences;           // [batch]
  std::vector<RowRange> unused_q, unused_k;  // rows to zero in out / dq, and in dk / dv

  // lse, dlse as (batch, head, row); ragged: batch stride 0, row counts over the packed tokens.
  struct LseStrides {
    std::int64_t batch = 0, head = 0, row = 0;
    [[nodiscard]] std::int64_t at(std::int64_t b, std::int64_t h, std::int64_t r) const {
      return b * batch + h * head + r * row;
    }
  };

  RowStrides q, k, v, out, dout, dq, dk, dv;
  // Whether data begins at a multiple of 16 bytes in the planned call; true where it was NULL.
  bool q_aligned = true, k_aligned = true, v_aligned = true, dout_aligned = true, bias_aligned = true,
       dbias_aligned = true;
  LseStrides lse, dlse;
  hr_dtype lse_dtype = HR_FLOAT32, dlse_dtype = HR_FLOAT32;
  bool has_lse = false, has_dlse = false;  // backward always has lse

  bool has_bias = false, has_mask = false, has_alibi = false, has_sinks = false;
  bool need_dbias = false, need_dsinks = false;
  hr_dtype bias_dtype = HR_FLOAT32;
  PairStrides bias, mask, dbias;
  std::int64_t bias_shape[4] = {1, 1, 1, 1};  // 1 = broadcast; of dbias too
  std::int64_t alibi_batch_stride = 0, alibi_head_stride = 0;
  std::int64_t sinks_stride = 0, dsinks_stride = 0;

  bool has_block_mask = false;
  std::int64_t block_q = 0, block_k = 0;
  PairStrides block_mask;  // query and key count blocks

  double scale = 1.0;
  double softcap = 0.0;  // 0 = none
  hr_causal causal = HR_CAUSAL_NONE;
  std::int64_t window_left = HR_UNBOUNDED, window_right = HR_UNBOUNDED;
  double dropout_p = 0.0;
  std::uint64_t seed = 0;
  bool deterministic = false, batch_invariant = false;
  int threads = 0;
  hr_backend backend = HR_BACKEND_AUTO;
  hr_device device = HR_DEVICE_CPU;
  int device_index = 0;

  // Query heads that read one key-value head. heads_q == heads_kv == 0 is legal.
  [[nodiscard]] std::int64_t group() const { return heads_kv == 0 ? 0 : heads_q / heads_kv; }

  // What causal and window leave visible in sequence b.
  [[nodiscard]] Band band(std::int64_t b) const {
    const Sequence& s = sequences[static_cast<std::size_t>(b)];
    return Band::make(s.q_len, s.k_len, causal == HR_CAUSAL_BOTTOM_RIGHT || causal == HR_CAUSAL_TOP_LEFT,
                      causal == HR_CAUSAL_TOP_LEFT, window_left, window_right);
  }
};

// The data pointers of one execution; typed by the Problem. Null where absent or empty.
struct Buffers {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void *out = nullptr, *lse = nullptr;  // inputs of the backward pass
  const void* bias = nullptr;
  const std::uint8_t* mask = nullptr;
  const float *alibi_slopes = nullptr, *sinks = nullptr;
  const std::uint8_t* block_mask = nullptr;
  const void *dout = nullptr, *dlse = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr, *dbias = nullptr;
  float* dsinks = nullptr;
  void* stream = nullptr;  // of a CUDA device
};

// The visibility of sequence b, query head h, by position and block mask: the input of every tile walk.
inline Visibility visibility(const Problem& p, const Buffers& buffers, std::int64_t b, std::int64_t h) {
  const Sequence& s = p.sequences[static_cast<std::size_t>(b)];
  Visibility v{.band = p.band(b), .seqlen_q = s.q_len, .seqlen_k = s.k_len, .blocks = {}};
  if (p.has_block_mask) {
    v.blocks = {.bits = buffers.block_mask + p.block_mask.at(b, h, 0, 0),
                .stride_q = p.block_mask.query,
                .stride_k = p.block_mask.key,
                .block_q = p.block_q,
                .block_k = p.block_k};
  }
  return v;
}

// Checks every rule of headrace.h and returns the normal form; throws Failure. Reads host metadata
// (cu_seqlens, seqused), no other data.
Problem validate(const hr_attention& attention, Pass pass);

// Checks that attention is the call that was planned from `planned`, with usable data pointers, and
// collects them; throws Failure.
Buffers bind(const hr_attention& planned, const hr_attention& attention, Pass pass);

}  // namespace headrace
