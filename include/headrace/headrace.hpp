// Headrace: exact, IO-aware attention. The C++20 interface: a thin, header-only layer over headrace.h,
// where shapes, types and semantics are documented.
//
//   std::vector<float> q(...), k(...), v(...), out(...);
//   headrace::forward({.q = {q.data(), {batch, seqlen, heads, dim}}, .k = ..., .v = ..., .out = ...,
//                      .causal = headrace::Causal::bottom_right});
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "headrace/headrace.h"

namespace headrace {

enum class DType : std::int32_t {
  float32 = HR_FLOAT32,
  float16 = HR_FLOAT16,
  bfloat16 = HR_BFLOAT16,
  float64 = HR_FLOAT64,
  boolean = HR_BOOL,
  int32 = HR_INT32,
  int64 = HR_INT64,
};

enum class Causal : std::int32_t {
  none = HR_CAUSAL_NONE,
  bottom_right = HR_CAUSAL_BOTTOM_RIGHT,
  top_left = HR_CAUSAL_TOP_LEFT,
};

enum class Backend : std::int32_t {
  automatic = HR_BACKEND_AUTO,
  cpu = HR_BACKEND_CPU,
  reference = HR_BACKEND_REFERENCE,
  cuda = HR_BACKEND_CUDA,
};

enum class Device : std::int32_t { cpu = HR_DEVICE_CPU, cuda = HR_DEVICE_CUDA };

enum class Pass : std::int32_t { forward = HR_FORWARD, backward = HR_BACKWARD };

// Every failure of the library. status() tells the kind, what() is the sentence of hr_last_error().
class Error : public std::runtime_error {
 public:
  Error(hr_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  [[nodiscard]] hr_status status() const noexcept { return status_; }

 private:
  hr_status status_;
};

namespace detail {

inline void check(hr_status status) {
  if (status != HR_OK) throw Error(status, hr_last_error());
}

template <typename T>
constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  static_assert(std::is_same_v<U, float> || std::is_same_v<U, double> || std::is_same_v<U, bool> ||
                    std::is_same_v<U, std::int32_t> || std::is_same_v<U, std::int64_t>,
                "no dtype belongs to this type; name one: Tensor(data, DType::bfloat16, {...})");
  if constexpr (std::is_same_v<U, float>) return DType::float32;
  if constexpr (std::is_same_v<U, double>) return DType::float64;
  if constexpr (std::is_same_v<U, bool>) return DType::boolean;
  if constexpr (std::is_same_v<U, std::int32_t>) return DType::int32;
  if constexpr (std::is_same_v<U, std::int64_t>) return DType::int64;
}

}  // namespace detail

// A view of the caller's memory; see hr_tensor. An empty Tensor is an absent one.
struct Tensor : hr_tensor {
  // constexpr keeps GCC 12 from warning of uninitialized optionals in a default-constructed Attention.
  constexpr Tensor() : hr_tensor{} {}
  Tensor(const hr_tensor& view) : hr_tensor(view) {}

  // Contiguous, of a C++ arithmetic type.
  template <typename T>
  Tensor(T* elements, std::initializer_list<std::int64_t> dims) : Tensor(elements, detail::dtype_of<T>(), dims) {}

  // Contiguous, of any dtype (16-bit types have no C++ type here).
  Tensor(const void* elements, DType type, std::span<const std::int64_t> dims)
      : hr_tensor(hr_tensor_contiguous(const_cast<void*>(elements), static_cast<hr_dtype>(type),
                                       static_cast<int>(dims.size()), dims.data())) {}
  Tensor(const void* elements, DType type, std::initializer_list<std::int64_t> dims)
      : Tensor(elements, type, std::span<const std::int64_t>(dims.begin(), dims.size())) {}

  // The same shape and type with other strides (in elements), one for each dimension.
  [[nodiscard]] Tensor with_strides(std::initializer_list<std::int64_t> strides) const {
    if (static_cast<int>(strides.size()) != ndim)
      throw Error(HR_ERROR_VALUE, "with_strides: got " + std::to_string(strides.size()) + " strides for a tensor of " +
                                      std::to_string(ndim) + " dimensions");
    Tensor result = *this;
    int i = 0;
    for (std::int64_t value : strides) result.stride[i++] = value;
    return result;
  }
};

// One attention call: the fields of hr_attention with C++ types and defaults.
struct Attention {
  // Every member has an initializer, so that designated initializers may leave any out without a warning.
  Tensor q{}, k{}, v{}, out{}, lse{};
  Tensor bias{}, mask{}, alibi_slopes{}, sinks{};
  Tensor block_mask{};
  std::int64_t block_q = 0, block_k = 0;
  Tensor cu_seqlens_q{}, cu_seqlens_k{}, seqused_q{}, seqused_k{};
  Tensor dout{}, dlse{}, dq{}, dk{}, dv{}, dbias{}, dsinks{};
  Causal causal = Causal::none;
  std::optional<double> scale{};
  std::optional<std::int64_t> window_left{}, window_right{};
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::uint64_t seed = 0;
  bool deterministic = false;
  bool batch_invariant = false;
  int threads = 0;
  Backend backend = Backend::automatic;
  Device device = Device::cpu;  // where the tensors live
  int device_index = 0;
  void* stream = nullptr;  // CUDA

  [[nodiscard]] hr_attention c() const {
    hr_attention a;
    hr_attention_init(&a);
    a.q = q, a.k = k, a.v = v, a.out = out, a.lse = lse;
    a.bias = bias, a.mask = mask, a.alibi_slopes = alibi_slopes, a.sinks = sinks;
    a.block_mask = block_mask, a.block_q = block_q, a.block_k = block_k;
    a.cu_seqlens_q = cu_seqlens_q, a.cu_seqlens_k = cu_seqlens_k;
    a.seqused_q = seqused_q, a.seqused_k = seqused_k;
    a.dout = dout, a.dlse = dlse, a.dq = dq, a.dk = dk, a.dv = dv, a.dbias = dbias, a.dsinks = dsinks;
    a.causal = static_cast<std::int32_t>(causal);
    a.has_scale = scale.has_value();
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of optionals that are empty
#endif
    if (scale) a.scale = *scale;
    if (window_left) a.window_left = *window_left;
    if (window_right) a.window_right = *window_right;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
    a.softcap = softcap, a.dropout_p = dropout_p, a.seed = seed;
    a.deterministic = deterministic, a.batch_invariant = batch_invariant;
    a.threads = threads, a.backend = static_cast<std::int32_t>(backend);
    a.device = static_cast<std::int32_t>(device), a.device_index = device_index, a.stream = stream;
    return a;
  }
};

// A validated, planned pass; see hr_plan_create and hr_plan_execute. Immutable, cheap to move.
class Plan {
 public:
  Plan(const Attention& attention, Pass pass) {
    const hr_attention a = attention.c();
    hr_plan* plan = nullptr;
    detail::check(hr_plan_create(&a, static_cast<hr_pass>(pass), &plan));
    plan_.reset(plan);
  }

  [[nodiscard]] std::size_t workspace_bytes() const { return hr_plan_workspace_bytes(plan_.get()); }
  void execute(const Attention& attention, std::span<std::byte> workspace) const {
    const hr_attention a = attention.c();
    detail::check(hr_plan_execute(plan_.get(), &a, workspace.data(), workspace.size()));
  }
  [[nodiscard]] std::string_view explain() const { return hr_plan_explain(plan_.get()); }
  [[nodiscard]] std::string_view explain_json() const { return hr_plan_explain_json(plan_.get()); }

 private:
  struct Destroy {
    void operator()(hr_plan* plan) const { hr_plan_destroy(plan); }
  };
  std::unique_ptr<hr_plan, Destroy> plan_;
};

inline void forward(const Attention& attention) {
  const hr_attention a = attention.c();
  detail::check(hr_forward(&a));
}

inline void backward(const Attention& attention) {
  const hr_attention a = attention.c();
  detail::check(hr_backward(&a));
}

inline void merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b,
                         const Tensor& out, const Tensor& lse) {
  detail::check(hr_merge_states(&out_a, &lse_a, &out_b, &lse_b, &out, &lse));
}

inline void dropout_mask(const Tensor& keep, double dropout_p, std::uint64_t seed) {
  detail::check(hr_dropout_mask(&keep, dropout_p, seed));
}

inline std::string_view info() { return hr_info(); }
inline std::string_view version() { return hr_version(); }

}  // namespace headrace
