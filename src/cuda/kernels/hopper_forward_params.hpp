// The arguments of the Hopper forward kernel, beside the tensor maps of q, k and v: read on host and device.
#pragma once

#include "describe/dropout.hpp"
#include "tiling/tiling.hpp"

namespace headrace::cuda {

struct HopperForwardParams {
  // Strides in elements, over (batch, row, head) or (batch, head, row); of bias and mask over (batch, head, row, key).
  struct Strides3 {
    long long s0, s1, s2;
  };
  struct Strides4 {
    long long batch, head, row, key;
  };

  void* out;  // 16-bit
  Strides3 out_strides;
  float* lse;  // null: not wanted
  Strides3 lse_strides;
  int vector_out;  // rows of out can be written 16 bytes at a time

  const void* bias;  // float32 if bias_float32, else the type of q
  Strides4 bias_strides;
  const unsigned char* mask;
  Strides4 mask_strides;
  const unsigned char* block_mask;
  Strides4 block_strides;  // row and key count blocks
  long long block_q, block_k;
  const float* alibi_slopes;
  long long alibi_batch, alibi_head;
  const float* sinks;
  long long sinks_stride;

  Band band;
  int seqlen_q, seqlen_k, value_dim;
  int heads_q, group;  // query heads that read one key-value head
  float scale;         // of the scores
  float softcap, inverse_softcap;
  unsigned long long seed;
  unsigned dropout_threshold;
  float dropout_kept;

  int query_tiles;     // of a head
  int pieces;          // of work of a head: its tiles, or pairs of them
  int all_pieces;      // of all heads
  int sequence_heads;  // batch * heads_q
  int redo_shift;      // tiles of a block that share one bit of the list of tiles to be done again, log2
};

}  // namespace headrace::cuda
