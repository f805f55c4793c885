// Attention calls of the tests: a Spec says in plain numbers what a call is, make_call gives it data.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"
#include "support/array.hpp"
#include "support/random.hpp"

namespace headrace::test {

constexpr double infinity = std::numeric_limits<double>::infinity();

// What q, k, v, dout look like.
enum class Inputs {
  normal,        // N(0, 1)
  large_logits,  // q and k ten times as large
  one_key,       // one key takes nearly all the weight
  offset,        // every logit is near 1e4, every value near 100
  equal,         // all scores and all values the same
  tiny           // all values near the smallest that matter
};
const char* name_of(Inputs inputs);

// A bias or boolean mask over (batch, head, query, key); `full` says which dimensions do not broadcast.
struct PairSpec {
  bool present = false;
  std::array<bool, 4> full{};
  Layout layout = Layout::contiguous;
  bool of_input_dtype = false;  // bias: the dtype of q, else float32
  double hidden = 0.0;          // fraction of -inf or false
  bool hide_rows = false;       // some rows hide every key
  bool hide_batch = false;      // batch entry 0 hides every key
};

struct BlockSpec {
  bool present = false;
  std::array<bool, 2> full{};  // batch, head
  Layout layout = Layout::contiguous;
  std::int64_t block_q = 1, block_k = 1;
  double hidden = 0.5;
};

enum class Sinks { none, normal, large, some_absent };
enum class Alibi { none, heads, batch_heads };

// Every member has an initializer, so that designated initializers may leave any out without a warning.
struct Spec {
  std::uint64_t seed = 1;  // of data and strides
  DType dtype = DType::float32;
  bool lse_float64 = false;
  std::int64_t batch = 1, heads_kv = 1, group = 1;
  std::int64_t head_dim = 16, value_dim = 16;
  // Length of each sequence (dense: all the same). seqlen_* also hold for batch 0.
  bool ragged = false;
  std::int64_t seqlen_q = 8, seqlen_k = 8;
  std::vector<std::int64_t> lengths_q{}, lengths_k{};  // ragged only, [batch]
  std::int64_t slack_q = 0, slack_k = 0;               // ragged only: tokens behind cu_seqlens[-1]
  std::vector<std::int64_t> used_q{}, used_k{};        // seqused, or empty
  Causal causal = Causal::none;
  std::optional<std::int64_t> window_left{}, window_right{};
  std::optional<double> scale{};
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::uint64_t dropout_seed = 0;
  PairSpec bias{}, mask{};
  BlockSpec blocks{};
  Alibi alibi = Alibi::none;
  Sinks sinks = Sinks::none;
  bool want_lse = true;  // of the forward pass; the backward pass always gets one
  bool dlse = false, dbias = false, dsinks = false;
  bool deterministic = false, batch_invariant = false;
  bool through_plan = false;  // hr_plan_* with a poisoned workspace instead of hr_forward / hr_backward
  int threads = 1;
  int multiprocessors = 0;  // that CUDA kernels are chosen for; 0: as many as there are
  Inputs inputs = Inputs::normal;
  Layout q_layout = Layout::contiguous, k_layout = Layout::contiguous, v_layout = Layout::contiguous;
  Layout out_layout = Layout::contiguous, dout_layout = Layout::contiguous, lse_layout = Layout::contiguous;
  Layout gradient_layout = Layout::contiguous;
  bool packed_qkv = false;  // q, k, v (and dq, dk, dv) interleaved in one tensor, where their dims agree

  [[nodiscard]] std::int64_t heads_q() const { return heads_kv * group; }
  [[nodiscard]] std::int64_t longest_q() const;
  [[nodiscard]] std::int64_t longest_k() const;
  // Multiply-adds of one forward pass without masks.
  [[nodiscard]] double cost() const;
  // One line that says all of it.
  [[nodiscard]] std::string describe() const;
};

// A Spec drawn from the whole option space whose cost() is at most max_cost.
Spec random_spec(Rng& rng, double max_cost);

// As above, but long enough to cross tiles, splits and pages of every size that a kernel might choose.
Spec random_large_spec(Rng& rng, double max_cost);

// A call with all its tensors, gradients too.
struct Call {
  Spec spec;
  Array q, k, v, out, lse;
  Array bias, mask, alibi_slopes, sinks, block_mask;
  Array cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  Array dout, dlse, dq, dk, dv, dbias, dsinks;

  [[nodiscard]] Attention attention(Backend backend) const;
};

Call make_call(const Spec& spec);

// The same call with its inputs converted, without loss, to contiguous float64.
Call in_float64(const Call& call);

}  // namespace headrace::test
