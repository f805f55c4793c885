// headrace.jax: XLA calls these handlers for the operations that python/headrace/jax puts into a program.
//
// Python has filled an hr_attention when it traced the program; it comes as the attribute `call`. The attribute
// `places` says for each buffer, arguments first, at which byte of the hr_attention its address goes. Only a seed is
// read: its place is that of the seed itself.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "headrace/headrace.h"
#include "xla_ffi.hpp"

namespace {

using namespace headrace::xla;

Error* make_error(const CallFrame& frame, ErrorCode code, const char* message) {
  ErrorCreateArgs arguments{sizeof arguments, nullptr, message, code};
  return frame.api->error_create(&arguments);
}

ErrorCode code_of(hr_status status) {
  switch (status) {
    case HR_ERROR_UNSUPPORTED:
      return ErrorCode::unimplemented;
    case HR_ERROR_TYPE:
    case HR_ERROR_VALUE:
      return ErrorCode::invalid_argument;
    default:
      return ErrorCode::internal;
  }
}

const Array* attribute(const CallFrame& frame, std::string_view name) {
  const Attributes& all = frame.attributes;
  for (std::int64_t i = 0; i < all.size; ++i)
    if (all.types[i] == attribute_array && std::string_view(all.names[i]->data, all.names[i]->size) == name)
      return static_cast<const Array*>(all.items[i]);
  return nullptr;
}

// XLA asks once for the version that a handler was written for.
bool answer_metadata(const CallFrame& frame) {
  if (!frame.extensions || frame.extensions->type != extension_metadata) return false;
  Metadata& metadata = *reinterpret_cast<MetadataExtension*>(frame.extensions)->metadata;
  metadata.api_version.major_version = api_major;
  metadata.api_version.minor_version = api_minor;
  metadata.traits = 0;
  return true;
}

Error* run(const CallFrame& frame, hr_status (*function)(const hr_attention*)) {
  const Array* call = attribute(frame, "call");
  const Array* places = attribute(frame, "places");
  const auto buffers = static_cast<std::size_t>(frame.arguments.size + frame.results.size);
  if (!call || call->size != sizeof(hr_attention) || !places || places->size != buffers)
    return make_error(frame, ErrorCode::internal,
                      "headrace: the library and the Python package are of different versions");

  hr_attention attention;
  std::memcpy(&attention, call->data, sizeof attention);
  const auto* place = static_cast<const std::int64_t*>(places->data);
  for (const Buffers* group : {&frame.arguments, &frame.results})
    for (std::int64_t i = 0; i < group->size; ++i, ++place) {
      void* const data = static_cast<const Buffer*>(group->items[i])->data;
      const auto offset = static_cast<std::size_t>(*place);
      char* const target = reinterpret_cast<char*>(&attention) + offset;
      if (offset == offsetof(hr_attention, seed))
        std::memcpy(target, data, sizeof attention.seed);
      else
        std::memcpy(target, &data, sizeof data);
    }
  const hr_status status = function(&attention);
  return status == HR_OK ? nullptr : make_error(frame, code_of(status), hr_last_error());
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
Error* headrace_jax_forward(CallFrame* frame) { return answer_metadata(*frame) ? nullptr : run(*frame, hr_forward); }
Error* headrace_jax_backward(CallFrame* frame) { return answer_metadata(*frame) ? nullptr : run(*frame, hr_backward); }
}
#pragma GCC visibility pop
