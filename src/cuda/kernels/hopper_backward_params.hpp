// The arguments of the backward kernels, beside tensor maps: read on host and device.
#pragma once

#include "hopper_forward_params.hpp"

namespace headrace::cuda {

// What the pass knows of a query row before it begins: minus its log-sum-exp, -inf where it sees no key (p is 0 then),
// and minus D = dout . out - dlse. Of the rows of a query tile first those of rows 0 and 1, then 2 and 3, ...: a
// tensor core's fragment has two neighbouring rows in a thread. Behind them a word that says whether an lse is so large
// that its rounding might make p overflow, and three that fill up 16 bytes.
struct RowPair {
  float minus_lse[2], minus_d[2];
};
constexpr int kTileWords = 4;
constexpr int statistics_words(int queries) { return 2 * queries + kTileWords; }

// dq, dk or dv: 16-bit rows.
struct GradientRows {
  void* to;
  HopperForwardParams::Strides3 strides;  // (batch, row, head)
  int columns;
  int by_tma;  // it has a tensor map
};

struct HopperBackwardParams {
  HopperForwardParams forward;  // options, lengths; out and lse are inputs

  const float* statistics;       // [batch, heads_q, query_tiles, statistics_words()]
  float* dq;                     // [batch, heads_q, query_tiles, ...] as tensor cores leave it
  int* turns;                    // [batch, heads_q, query_tiles]: how many key tiles have added to its dq
  int* tickets;                  // how many key tiles have been taken
  GradientRows dq_rows, dk, dv;  // dq_rows: of hopper_backward_queries.cuh
  void* dbias;                   // of the bias's type, an element for every score
  HopperForwardParams::Strides4 dbias_strides;

  Divisor query_tiles;      // of a head
  Divisor heads_kv, group;  // group: query heads of a key-value head
  unsigned key_tiles;       // of a head
  unsigned items;           // key tiles of all heads
  // The order of key tiles, see Item. A gang has so few members that times query_tiles they are below 2^31.
  unsigned heads, section_heads;  // key-value heads of all sequences; of a section
  Divisor section_items;
  unsigned gangs;  // of a head
  int in_order;    // a key tile waits for those before it alone
  // In order, whether key tiles go down from their last query tile, and not up; in this section, which has all heads
  // that are left, the other way.
  unsigned downwards, turned_section;
};

// Of backward_statistics.cuh.
struct BackwardStatisticsParams {
  const void *out, *dout;                                   // of the type of q
  HopperForwardParams::Strides3 out_strides, dout_strides;  // (batch, row, head)
  const float *lse, *dlse;                                  // dlse null: 0
  HopperForwardParams::Strides3 lse_strides, dlse_strides;  // (batch, head, row)
  int vectors;                                              // rows of out and dout begin at multiples of 16 bytes
  int seqlen_q, value_dim;
  Divisor query_tiles, heads_q;
  float lse_factor;  // of the units that the statistics are in
  float* statistics;
  float* dq;             // to be set to 0; null: need not be
  int dq_floats;         // of a query tile
  int *turns, *tickets;  // null: there are none
};

// Of backward_convert.cuh.
struct BackwardConvertParams {
  HopperForwardParams forward;
  const float* dq;
  void* to;                               // of the type of q
  HopperForwardParams::Strides3 strides;  // (batch, row, head)
  int vectors;                            // rows of `to` begin at multiples of 16 bytes
  int head_dim;
  Divisor query_tiles, heads_q;
  float scale;
};

// Of backward_gradient.cuh.
struct BackwardTensor {
  const void* data;
  HopperForwardParams::Strides3 strides;  // (batch, row, head)
  int rows, columns;
};
struct BackwardGradientParams {
  HopperForwardParams forward;
  BackwardTensor q, k, v, dout;
  const float* statistics;
  Divisor group, heads;  // heads: of the gradient
  Divisor tiles;         // of 64 rows and some columns, of a head; of the bias of 64 x 64
  int column_chunks;     // of a row
  int query_tiles, batch, heads_q;
  GradientRows to;  // float32; of the bias: only where it is
  HopperForwardParams::Strides4 dbias_strides;
  bool bias_is_full[4];  // not broadcast
  int bias_key_tiles;
};

// Of backward_sinks.cuh.
struct BackwardSinksParams {
  const float* sinks;
  long long sinks_stride;
  float* dsinks;
  long long dsinks_stride;
  const float* statistics;
  int batch, heads_q, seqlen_q, query_tiles;
  float to_log2;  // what brings the statistics to units of log2
};

}  // namespace headrace::cuda
