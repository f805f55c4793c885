#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "describe/problem.hpp"
#include "describe/tensor_view.hpp"

namespace headrace {
namespace {

enum class Role {
  input,
  result,    // out and lse: written by forward, read by backward
  metadata,  // copied into the plan, not read again
  backward_input,
  gradient
};

struct Field {
  const char* name;
  hr_tensor hr_attention::*tensor;
  Role role;

  [[nodiscard]] bool used(Pass pass) const {
    return pass == Pass::backward || (role != Role::backward_input && role != Role::gradient);
  }
  [[nodiscard]] bool written(Pass pass) const {
    return role == Role::gradient || (role == Role::result && pass == Pass::forward);
  }
};

#define HEADRACE_FIELD(name, role) \
  Field { #name, &hr_attention::name, Role::role }
constexpr std::array fields = {
    HEADRACE_FIELD(q, input),
    HEADRACE_FIELD(k, input),
    HEADRACE_FIELD(v, input),
    HEADRACE_FIELD(out, result),
    HEADRACE_FIELD(lse, result),
    HEADRACE_FIELD(bias, input),
    HEADRACE_FIELD(mask, input),
    HEADRACE_FIELD(alibi_slopes, input),
    HEADRACE_FIELD(sinks, input),
    HEADRACE_FIELD(block_mask, input),
    HEADRACE_FIELD(cu_seqlens_q, metadata),
    HEADRACE_FIELD(cu_seqlens_k, metadata),
    HEADRACE_FIELD(seqused_q, metadata),
    HEADRACE_FIELD(seqused_k, metadata),
    HEADRACE_FIELD(dout, backward_input),
    HEADRACE_FIELD(dlse, backward_input),
    HEADRACE_FIELD(dq, gradient),
    HEADRACE_FIELD(dk, gradient),
    HEADRACE_FIELD(dv, gradient),
    HEADRACE_FIELD(dbias, gradient),
    HEADRACE_FIELD(dsinks, gradient),
};
#undef HEADRACE_FIELD

template <typename T>
void same(const char* name, T value, T planned) {
  if (value != planned)
    throw Failure(HR_ERROR_VALUE,
                  fmt::format("{}: is {}, but the plan was made for {}; make a new plan", name, value, planned));
}

void same_options(const hr_attention& a, const hr_attention& planned) {
  same("struct_size", a.struct_size, planned.struct_size);
  same("block_q", a.block_q, planned.block_q);
  same("block_k", a.block_k, planned.block_k);
  same("causal", a.causal, planned.causal);
  same("has_scale", a.has_scale != 0, planned.has_scale != 0);
  if (planned.has_scale != 0) same("scale", a.scale, planned.scale);
  same("window_left", a.window_left, planned.window_left);
  same("window_right", a.window_right, planned.window_right);
  same("softcap", a.softcap, planned.softcap);
  same("dropout_p", a.dropout_p, planned.dropout_p);
  same("seed", a.seed, planned.seed);
  same("deterministic", a.deterministic != 0, planned.deterministic != 0);
  same("batch_invariant", a.batch_invariant != 0, planned.batch_invariant != 0);
  same("threads", a.threads, planned.threads);
  same("backend", a.backend, planned.backend);
  same("device", a.device, planned.device);
  same("device_index", a.device_index, planned.device_index);
}

void same_tensor(const char* name, const hr_tensor& t, const hr_tensor& planned) {
  if (is_present(t) != is_present(planned))
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: is {}, but the plan was made with it {}; make a new plan", name,
                                              is_present(t) ? "given" : "absent", is_present(t) ? "absent" : "given"));
  if (!is_present(t)) return;
  if (t.dtype != planned.dtype)
    throw Failure(HR_ERROR_TYPE, fmt::format("{}: dtype is {}, but the plan was made for {}; make a new plan", name,
                                             dtype_name(t.dtype), dtype_name(planned.dtype)));
  if (t.ndim != planned.ndim)
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: ndim is {}, but the plan was made for {}; make a new plan", name,
                                              t.ndim, planned.ndim));
  if (!std::equal(t.shape, t.shape + t.ndim, planned.shape))
    throw Failure(HR_ERROR_VALUE, fmt::format("{}: shape is {}, but the plan was made for {}; make a new plan", name,
                                              shape_text(t), shape_text(planned)));
  for (int i = 0; i < t.ndim; ++i) {
    if (t.stride[i] != planned.stride[i] && stride_of(t, i) != stride_of(planned, i))
      throw Failure(HR_ERROR_VALUE, fmt::format("{}: stride {} is {}, but the plan was made for {}; make a new plan",
                                                name, i, t.stride[i], planned.stride[i]));
  }
}

void outputs_apart(const hr_attention& a, Pass pass) {
  struct Used {
    const Field* field;
    Span span;
  };
  std::array<Used, fields.size()> used;
  std::size_t count = 0;
  for (const Field& field : fields) {
    if (field.used(pass) && field.role != Role::metadata && is_present(a.*field.tensor))
      used[count++] = {&field, Span(a.*field.tensor)};
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (!used[i].field->written(pass)) continue;
    for (std::size_t j = 0; j < count; ++j)
      if (i != j && used[i].span.shares_memory_with(used[j].span))
        throw Failure(HR_ERROR_VALUE, fmt::format("{}: shares memory with {}; an output must have memory of its own",
                                                  used[i].field->name, used[j].field->name));
  }
}

}  // namespace

Buffers bind(const hr_attention& planned, const hr_attention& attention, Pass pass) {
  same_options(attention, planned);
  for (const Field& field : fields) {
    if (!field.used(pass)) continue;
    const hr_tensor& tensor = attention.*field.tensor;
    same_tensor(field.name, tensor, planned.*field.tensor);
    if (is_present(tensor) && field.role != Role::metadata) check_data(field.name, tensor);
  }
  outputs_apart(attention, pass);

  const auto data = [&](const hr_tensor& t) -> void* { return is_present(t) && !is_empty(t) ? t.data : nullptr; };
  Buffers b;
  b.q = data(attention.q);
  b.k = data(attention.k);
  b.v = data(attention.v);
  b.out = data(attention.out);
  b.lse = data(attention.lse);
  b.bias = data(attention.bias);
  b.mask = static_cast<const std::uint8_t*>(data(attention.mask));
  b.alibi_slopes = static_cast<const float*>(data(attention.alibi_slopes));
  b.sinks = static_cast<const float*>(data(attention.sinks));
  b.block_mask = static_cast<const std::uint8_t*>(data(attention.block_mask));
  b.stream = attention.stream;
  if (pass == Pass::backward) {
    b.dout = data(attention.dout);
    b.dlse = data(attention.dlse);
    b.dq = data(attention.dq);
    b.dk = data(attention.dk);
    b.dv = data(attention.dv);
    b.dbias = data(attention.dbias);
    b.dsinks = static_cast<float*>(data(attention.dsinks));
  }
  return b;
}

}  // namespace headrace
