#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "describe/dropout.hpp"
#include "describe/problem.hpp"
#include "describe/tensor_view.hpp"

namespace headrace {
namespace {

constexpr std::int64_t max_head_dim = 512;

template <typename... Args>
[[noreturn]] void invalid(fmt::format_string<Args...> format, Args&&... args) {
  throw Failure(HR_ERROR_VALUE, fmt::format(format, std::forward<Args>(args)...));
}

// Builds the Problem step by step; every step relies on what the ones before it checked.
class Validator {
 public:
  Validator(const hr_attention& attention, Pass pass) : a_(attention) { p_.pass = pass; }

  Problem run() {
    options();
    queries_keys_values();
    sequences();
    p_.q = rows(a_.q);
    p_.k = rows(a_.k);
    p_.v = rows(a_.v);
    p_.q_aligned = is_aligned(a_.q);
    p_.k_aligned = is_aligned(a_.k);
    p_.v_aligned = is_aligned(a_.v);
    results();
    pair_inputs();
    head_inputs();
    block_mask();
    dropout_range();
    if (p_.pass == Pass::backward) gradients();
    return std::move(p_);
  }

 private:
  void options() {
    if (a_.struct_size != sizeof(hr_attention))
      invalid("struct_size: is {}; it must be {}: start from hr_attention_init", a_.struct_size, sizeof(hr_attention));
    if (a_.causal < HR_CAUSAL_NONE || a_.causal > HR_CAUSAL_TOP_LEFT)
      invalid("causal: is {}; it must be 0 (none), 1 (bottom-right) or 2 (top-left)", a_.causal);
    if (a_.backend < HR_BACKEND_AUTO || a_.backend > HR_BACKEND_CUDA)
      invalid("backend: is {}; it must be 0 (auto), 1 (cpu), 2 (reference) or 3 (cuda)", a_.backend);
    if (a_.device < HR_DEVICE_CPU || a_.device > HR_DEVICE_CUDA)
      invalid("device: is {}; it must be 0 (cpu) or 1 (cuda)", a_.device);
    const bool on_cuda = a_.device == HR_DEVICE_CUDA;
    if (a_.backend != HR_BACKEND_AUTO && on_cuda != (a_.backend == HR_BACKEND_CUDA))
      invalid("backend: is {} ({}), but the tensors are on device {} ({})", a_.backend,
              a_.backend == HR_BACKEND_CUDA ? "cuda" : "cpu or reference", a_.device, on_cuda ? "cuda" : "cpu");
    if (a_.device_index < 0) invalid("device_index: is {}; it must not be negative", a_.device_index);
    if (a_.has_scale != 0 && !std::isfinite(a_.scale)) invalid("scale: is {}; it must be finite", a_.scale);
    if (!std::isfinite(a_.softcap) || a_.softcap < 0)
      invalid("softcap: is {}; it must be finite, and 0 (none) or above", a_.softcap);
    if (!(a_.dropout_p >= 0 && a_.dropout_p < 1))
      invalid("dropout_p: is {}; it must be at least 0 and below 1", a_.dropout_p);
    if (a_.threads < 0 || a_.threads > 1024) invalid("threads: is {}; it must be 0 (all) to 1024", a_.threads);

    p_.causal = static_cast<hr_causal>(a_.causal);
    p_.backend = static_cast<hr_backend>(a_.backend);
    p_.device = static_cast<hr_device>(a_.device);
    p_.device_index = a_.device_index;
    p_.window_left = a_.window_left;
    p_.window_right = a_.window_right;
    p_.softcap = a_.softcap;
    p_.dropout_p = a_.dropout_p;
    p_.seed = a_.seed;
    p_.deterministic = a_.deterministic != 0;
    p_.batch_invariant = a_.batch_invariant != 0;
    p_.threads = a_.threads;
  }

  void queries_keys_values() {
    check_present("q", a_.q);
    check_present("k", a_.k);
    check_present("v", a_.v);
    check_dtype("q", a_.q, {HR_FLOAT32, HR_FLOAT16, HR_BFLOAT16, HR_FLOAT64});
    p_.dtype = static_cast<hr_dtype>(a_.q.dtype);
    same_dtype_as_q("k", a_.k);
    same_dtype_as_q("v", a_.v);

    p_.ragged = is_present(a_.cu_seqlens_q) || is_present(a_.cu_seqlens_k);
    if (p_.ragged && !(is_present(a_.cu_seqlens_q) && is_present(a_.cu_seqlens_k)))
      invalid("{}: is absent, but {} is given; a ragged batch needs both",
              is_present(a_.cu_seqlens_q) ? "cu_seqlens_k" : "cu_seqlens_q",
              is_present(a_.cu_seqlens_q) ? "cu_seqlens_q" : "cu_seqlens_k");
    vectors("q", a_.q, "[total_q, heads_q, head_dim]", "[batch, seqlen_q, heads_q, head_dim]");
    vectors("k", a_.k, "[total_k, heads_kv, head_dim]", "[batch, seqlen_k, heads_kv, head_dim]");
    vectors("v", a_.v, "[total_k, heads_kv, value_dim]", "[batch, seqlen_k, heads_kv, value_dim]");

    const int token = p_.ragged ? 0 : 1, head = token + 1, dim = token + 2;
    if (!p_.ragged) {
      p_.batch = a_.q.shape[0];
      equal("k", "batch", a_.k.shape[0], "q", p_.batch);
      equal("v", "batch", a_.v.shape[0], "q", p_.batch);
    }
    tokens_q_ = a_.q.shape[token];
    tokens_k_ = a_.k.shape[token];
    equal("v", p_.ragged ? "total_k" : "seqlen_k", a_.v.shape[token], "k", tokens_k_);

    p_.heads_q = a_.q.shape[head];
    p_.heads_kv = a_.k.shape[head];
    equal("v", "heads_kv", a_.v.shape[head], "k", p_.heads_kv);
    if (p_.heads_kv == 0 ? p_.heads_q != 0 : p_.heads_q % p_.heads_kv != 0)
      invalid("q: heads_q is {}, but k has heads_kv {}; heads_q must be a multiple of heads_kv", p_.heads_q,
              p_.heads_kv);

    p_.head_dim = a_.q.shape[dim];
    p_.value_dim = a_.v.shape[dim];
    dim_in_range("q", "head_dim", p_.head_dim);
    equal("k", "head_dim", a_.k.shape[dim], "q", p_.head_dim);
    dim_in_range("v", "value_dim", p_.value_dim);
    p_.scale = a_.has_scale != 0 ? a_.scale : 1.0 / std::sqrt(static_cast<double>(p_.head_dim));
    // Where scores are float32, a cap outside these bounds acts like the bound, to float32 accuracy; but cap * tanh(s /
    // cap) must not become inf * 0, or 0 / 0.
    if (p_.softcap > 0 && p_.dtype != HR_FLOAT64) p_.softcap = std::clamp(p_.softcap, 0x1p-120, 0x1p120);
  }

  void sequences() {
    std::vector<std::int32_t> begin_q, begin_k;
    if (p_.ragged) {
      begin_q = cu_seqlens("cu_seqlens_q", a_.cu_seqlens_q, "total_q", tokens_q_);
      begin_k = cu_seqlens("cu_seqlens_k", a_.cu_seqlens_k, "total_k", tokens_k_);
      if (begin_q.size() != begin_k.size())
        invalid("cu_seqlens_k: has {} entries, but cu_seqlens_q has {}; they must be equal (batch + 1)", begin_k.size(),
                begin_q.size());
      p_.batch = static_cast<std::int64_t>(begin_q.size()) - 1;
    }
    p_.sequences.resize(static_cast<std::size_t>(p_.batch));
    for (std::size_t b = 0; b < p_.sequences.size(); ++b) {
      p_.sequences[b] = p_.ragged
                            ? Sequence{begin_q[b], begin_q[b + 1] - begin_q[b], begin_k[b], begin_k[b + 1] - begin_k[b]}
                            : Sequence{0, tokens_q_, 0, tokens_k_};
    }
    used("seqused_q", a_.seqused_q, &Sequence::q_begin, &Sequence::q_len, p_.unused_q);
    used("seqused_k", a_.seqused_k, &Sequence::k_begin, &Sequence::k_len, p_.unused_k);
    if (p_.ragged) {
      if (begin_q.back() < tokens_q_) p_.unused_q.push_back({0, begin_q.back(), tokens_q_});
      if (begin_k.back() < tokens_k_) p_.unused_k.push_back({0, begin_k.back(), tokens_k_});
      for (const Sequence& s : p_.sequences) {
        p_.seqlen_q = std::max(p_.seqlen_q, s.q_len);
        p_.seqlen_k = std::max(p_.seqlen_k, s.k_len);
      }
    } else {
      p_.seqlen_q = tokens_q_;
      p_.seqlen_k = tokens_k_;
    }
  }

  void results() {
    check_present("out", a_.out);
    same_dtype_as_q("out", a_.out);
    like_output("out", a_.out);
    p_.out = rows(a_.out);
    if (p_.pass == Pass::backward) check_present("lse", a_.lse);
    p_.has_lse = is_present(a_.lse);
    if (p_.has_lse) {
      p_.lse_dtype = statistics("lse", a_.lse);
      p_.lse = statistics_strides(a_.lse);
    }
    if (p_.pass == Pass::forward) {
      check_output("out", a_.out);
      if (p_.has_lse) check_output("lse", a_.lse);
    }
  }

  void pair_inputs() {
    const std::array<std::int64_t, 4> full = {p_.batch, p_.heads_q, p_.seqlen_q, p_.seqlen_k};
    p_.has_bias = is_present(a_.bias);
    if (p_.has_bias) {
      if (p_.dtype == HR_FLOAT32)
        check_dtype("bias", a_.bias, {HR_FLOAT32});
      else
        check_dtype("bias", a_.bias, {HR_FLOAT32, p_.dtype});
      pairs("bias", a_.bias, full);
      p_.bias_dtype = static_cast<hr_dtype>(a_.bias.dtype);
      p_.bias = pair_strides(a_.bias);
      p_.bias_aligned = is_aligned(a_.bias);
      std::copy_n(a_.bias.shape, 4, p_.bias_shape);
    }
    p_.has_mask = is_present(a_.mask);
    if (p_.has_mask) {
      check_dtype("mask", a_.mask, {HR_BOOL});
      pairs("mask", a_.mask, full);
      p_.mask = pair_strides(a_.mask);
    }
  }

  void head_inputs() {
    p_.has_alibi = is_present(a_.alibi_slopes);
    if (p_.has_alibi) {
      const hr_tensor& t = a_.alibi_slopes;
      check_dtype("alibi_slopes", t, {HR_FLOAT32});
      const int ndim = t.ndim == 2 ? 2 : 1;
      check_view("alibi_slopes", t, ndim, "[heads_q], or 2: [batch, heads_q]");
      equal("alibi_slopes", "heads_q", t.shape[ndim - 1], "q", p_.heads_q);
      if (ndim == 2) equal("alibi_slopes", "batch", t.shape[0], "the call", p_.batch);
      p_.alibi_batch_stride = ndim == 2 ? stride_of(t, 0) : 0;
      p_.alibi_head_stride = stride_of(t, ndim - 1);
    }
    p_.has_sinks = is_present(a_.sinks);
    if (p_.has_sinks) {
      per_head("sinks", a_.sinks);
      p_.sinks_stride = stride_of(a_.sinks, 0);
    }
  }

  void block_mask() {
    p_.has_block_mask = is_present(a_.block_mask);
    const std::array<std::pair<const char*, std::int64_t>, 2> blocks = {
        {{"block_q", a_.block_q}, {"block_k", a_.block_k}}};
    for (const auto& [name, size] : blocks) {
      if (!p_.has_block_mask && size != 0)
        invalid("{}: is {}, but block_mask is absent; it must then be 0", name, size);
      if (p_.has_block_mask && size < 1) invalid("{}: is {}; with a block_mask it must be at least 1", name, size);
    }
    if (!p_.has_block_mask) return;
    const hr_tensor& t = a_.block_mask;
    check_dtype("block_mask", t, {HR_BOOL});
    check_view("block_mask", t, 4, "[1|batch, 1|heads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)]");
    broadcast("block_mask", "batch", t.shape[0], p_.batch, false);
    broadcast("block_mask", "heads_q", t.shape[1], p_.heads_q, false);
    // A block longer than the sequences acts like one of any greater length: bounded, ceil_div cannot overflow.
    p_.block_q = std::min(a_.block_q, size_limit);
    p_.block_k = std::min(a_.block_k, size_limit);
    blocks_of("seqlen_q", t.shape[2], p_.seqlen_q, "block_q", p_.block_q);
    blocks_of("seqlen_k", t.shape[3], p_.seqlen_k, "block_k", p_.block_k);
    p_.block_mask = pair_strides(t);
  }

  void dropout_range() const {
    if (p_.dropout_p > 0 && !Dropout::distinguishes(p_.batch, p_.heads_q, p_.seqlen_q, p_.seqlen_k))
      invalid(
          "dropout_p: is {} for batch {}, heads_q {}, seqlen_q {}, seqlen_k {}; dropout works up to 2^32 sequences "
          "and heads and lengths of 2^33",
          p_.dropout_p, p_.batch, p_.heads_q, p_.seqlen_q, p_.seqlen_k);
  }

  void gradients() {
    check_present("dout", a_.dout);
    same_dtype_as_q("dout", a_.dout);
    like_output("dout", a_.dout);
    p_.dout = rows(a_.dout);
    p_.dout_aligned = is_aligned(a_.dout);
    p_.has_dlse = is_present(a_.dlse);
    if (p_.has_dlse) {
      p_.dlse_dtype = statistics("dlse", a_.dlse);
      p_.dlse = statistics_strides(a_.dlse);
    }
    p_.dq = gradient("dq", a_.dq, "q", a_.q);
    p_.dk = gradient("dk", a_.dk, "k", a_.k);
    p_.dv = gradient("dv", a_.dv, "v", a_.v);
    p_.need_dbias = is_present(a_.dbias);
    if (p_.need_dbias) {
      if (!p_.has_bias) invalid("dbias: is given, but bias is absent; there is no gradient to write");
      if (a_.dbias.dtype != a_.bias.dtype)
        throw Failure(HR_ERROR_TYPE, fmt::format("dbias: dtype is {}, but bias has {}; they must be equal",
                                                 dtype_name(a_.dbias.dtype), dtype_name(a_.bias.dtype)));
      check_view("dbias", a_.dbias, 4, "the shape of bias");
      same_shape("dbias", a_.dbias, "bias", a_.bias);
      check_output("dbias", a_.dbias);
      p_.dbias = pair_strides(a_.dbias);
      p_.dbias_aligned = is_aligned(a_.dbias);
    }
    p_.need_dsinks = is_present(a_.dsinks);
    if (p_.need_dsinks) {
      if (!p_.has_sinks) invalid("dsinks: is given, but sinks is absent; there is no gradient to write");
      per_head("dsinks", a_.dsinks);
      check_output("dsinks", a_.dsinks);
      p_.dsinks_stride = stride_of(a_.dsinks, 0);
    }
  }

  // ---- rules that several tensors share ----

  void same_dtype_as_q(std::string_view name, const hr_tensor& t) const {
    if (t.dtype != p_.dtype)
      throw Failure(HR_ERROR_TYPE, fmt::format("{}: dtype is {}, but q has {}; they must be equal", name,
                                               dtype_name(t.dtype), dtype_name(p_.dtype)));
  }

  static void equal(std::string_view name, std::string_view dimension, std::int64_t size, std::string_view other,
                    std::int64_t expected) {
    if (size != expected)
      invalid("{}: {} is {}, but {} has {}; they must be equal", name, dimension, size, other, expected);
  }

  static void same_shape(std::string_view name, const hr_tensor& t, std::string_view other, const hr_tensor& expected) {
    if (!std::equal(t.shape, t.shape + t.ndim, expected.shape))
      invalid("{}: shape is {}, but {} has {}; they must be equal", name, shape_text(t), other, shape_text(expected));
  }

  static void dim_in_range(std::string_view name, std::string_view dimension, std::int64_t size) {
    if (size < 1 || size > max_head_dim)
      invalid("{}: {} is {}; it must be 1 to {}", name, dimension, size, max_head_dim);
  }

  void vectors(std::string_view name, const hr_tensor& t, std::string_view ragged, std::string_view dense) const {
    check_view(name, t, p_.ragged ? 3 : 4, p_.ragged ? ragged : dense);
    check_vectors(name, t);
  }

  // out and dout.
  void like_output(std::string_view name, const hr_tensor& t) const {
    vectors(name, t, "[total_q, heads_q, value_dim]", "[batch, seqlen_q, heads_q, value_dim]");
    hr_tensor expected = a_.q;
    expected.shape[expected.ndim - 1] = p_.value_dim;
    if (!std::equal(t.shape, t.shape + t.ndim, expected.shape))
      invalid("{}: shape is {}; q and v make it {}", name, shape_text(t), shape_text(expected));
  }

  RowStrides gradient(std::string_view name, const hr_tensor& t, std::string_view of, const hr_tensor& input) const {
    check_present(name, t);
    same_dtype_as_q(name, t);
    check_view(name, t, input.ndim, fmt::format("the shape of {}", of));
    check_vectors(name, t);
    same_shape(name, t, of, input);
    check_output(name, t);
    return rows(t);
  }

  static bool is_aligned(const hr_tensor& t) { return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0; }

  [[nodiscard]] RowStrides rows(const hr_tensor& t) const {
    return p_.ragged ? RowStrides{0, stride_of(t, 0), stride_of(t, 1)}
                     : RowStrides{stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
  }

  // lse and dlse.
  hr_dtype statistics(std::string_view name, const hr_tensor& t) const {
    if (p_.dtype == HR_FLOAT64)
      check_dtype(name, t, {HR_FLOAT32, HR_FLOAT64});
    else
      check_dtype(name, t, {HR_FLOAT32});
    check_view(name, t, p_.ragged ? 2 : 3, p_.ragged ? "[heads_q, total_q]" : "[batch, heads_q, seqlen_q]");
    hr_tensor expected{};
    expected.ndim = t.ndim;
    if (p_.ragged) {
      expected.shape[0] = p_.heads_q, expected.shape[1] = tokens_q_;
    } else {
      expected.shape[0] = p_.batch, expected.shape[1] = p_.heads_q, expected.shape[2] = tokens_q_;
    }
    if (!std::equal(t.shape, t.shape + t.ndim, expected.shape))
      invalid("{}: shape is {}; q makes it {}", name, shape_text(t), shape_text(expected));
    return static_cast<hr_dtype>(t.dtype);
  }

  [[nodiscard]] Problem::LseStrides statistics_strides(const hr_tensor& t) const {
    return p_.ragged ? Problem::LseStrides{0, stride_of(t, 0), stride_of(t, 1)}
                     : Problem::LseStrides{stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)};
  }

  static void broadcast(std::string_view name, std::string_view dimension, std::int64_t size, std::int64_t full,
                        bool or_more) {
    if (size == 1 || size == full || (or_more && size > full)) return;
    invalid("{}: {} is {}; it must be 1 or {}{}", name, dimension, size, or_more ? "at least " : "", full);
  }

  // bias and mask.
  void pairs(std::string_view name, const hr_tensor& t, const std::array<std::int64_t, 4>& full) const {
    check_view(name, t, 4, "[1|batch, 1|heads_q, 1|seqlen_q, 1|seqlen_k]");
    constexpr std::array<std::string_view, 4> dimension = {"batch", "heads_q", "seqlen_q", "seqlen_k"};
    for (std::size_t i = 0; i < 4; ++i) broadcast(name, dimension[i], t.shape[i], full[i], p_.ragged && i >= 2);
  }

  static PairStrides pair_strides(const hr_tensor& t) {
    return {stride_of(t, 0), stride_of(t, 1), stride_of(t, 2), stride_of(t, 3)};
  }

  // sinks and dsinks.
  void per_head(std::string_view name, const hr_tensor& t) const {
    check_dtype(name, t, {HR_FLOAT32});
    check_view(name, t, 1, "[heads_q]");
    equal(name, "heads_q", t.shape[0], "q", p_.heads_q);
  }

  void blocks_of(std::string_view dimension, std::int64_t count, std::int64_t length, std::string_view block_name,
                 std::int64_t block) const {
    const std::int64_t needed = ceil_div(length, block);
    if (p_.ragged ? count >= needed : count == needed) return;
    invalid("block_mask: has {} blocks for {} {} and {} {}; it must have {}{}", count, dimension, length, block_name,
            block, p_.ragged ? "at least " : "", needed);
  }

  // int32, one dimension, contiguous, readable.
  static const std::int32_t* metadata(std::string_view name, const hr_tensor& t, std::string_view layout) {
    if (t.dtype == HR_INT64)
      throw Failure(HR_ERROR_TYPE,
                    fmt::format("{}: dtype is int64; it must be int32 (convert it: no length needs more)", name));
    check_dtype(name, t, {HR_INT32});
    check_view(name, t, 1, layout);
    check_vectors(name, t);
    check_data(name, t);
    return static_cast<const std::int32_t*>(t.data);
  }

  static std::vector<std::int32_t> cu_seqlens(std::string_view name, const hr_tensor& t, std::string_view total_name,
                                              std::int64_t total) {
    const std::int32_t* data = metadata(name, t, "[batch + 1]");
    if (t.shape[0] == 0) invalid("{}: has no entries; it must have batch + 1 ([0] is an empty batch)", name);
    std::vector<std::int32_t> begin(data, data + t.shape[0]);
    if (begin[0] != 0) invalid("{}: entry 0 is {}; it must be 0", name, begin[0]);
    for (std::size_t b = 1; b < begin.size(); ++b) {
      if (begin[b] < begin[b - 1])
        invalid("{}: entry {} is {}, below entry {}, {}; entries must not decrease", name, b, begin[b], b - 1,
                begin[b - 1]);
    }
    if (begin.back() > total)
      invalid("{}: the last entry is {}; it must be at most {} {}", name, begin.back(), total_name, total);
    return begin;
  }

  // Shortens the sequences to the tokens in use and lists what is left.
  void used(std::string_view name, const hr_tensor& t, std::int64_t Sequence::*begin, std::int64_t Sequence::*length,
            std::vector<RowRange>& unused) {
    if (!is_present(t)) return;
    const std::int32_t* data = metadata(name, t, "[batch]");
    equal(name, "batch", t.shape[0], "the call", p_.batch);
    for (std::size_t b = 0; b < p_.sequences.size(); ++b) {
      Sequence& s = p_.sequences[b];
      if (data[b] < 0 || data[b] > s.*length)
        invalid("{}: entry {} is {}; it must be 0 to {}, the length of that sequence", name, b, data[b], s.*length);
      if (data[b] == s.*length) continue;
      unused.push_back({p_.ragged ? 0 : static_cast<std::int64_t>(b), s.*begin + data[b], s.*begin + s.*length});
      s.*length = data[b];
    }
  }

  const hr_attention& a_;
  Problem p_;
  std::int64_t tokens_q_ = 0, tokens_k_ = 0;  // rows of q and k: of one batch entry, or packed
};

}  // namespace

Problem validate(const hr_attention& attention, Pass pass) { return Validator(attention, pass).run(); }

}  // namespace headrace
