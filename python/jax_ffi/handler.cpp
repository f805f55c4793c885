// headrace.jax: XLA calls these handlers for the operations that python/headrace/jax puts into a program.
//
// Python has filled an hr_attention when it traced the program; it comes as the attribute `call`. The attribute
// `places` says for each buffer, arguments first, at which byte of the hr_attention its address goes. Only metadata is
// read, on a GPU from a copy: cu_seqlens, and the seed, whose place is that of the seed itself.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <list>
#include <string_view>
#include <vector>

#include "cuda_driver.hpp"
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

// Metadata, which the library reads on the host: the seed itself, and cu_seqlens.
std::size_t host_bytes(const hr_attention& attention, std::size_t place) {
  if (place == offsetof(hr_attention, seed)) return sizeof attention.seed;
  for (const hr_tensor* lengths : {&attention.cu_seqlens_q, &attention.cu_seqlens_k})
    if (place ==
        static_cast<std::size_t>(reinterpret_cast<const char*>(lengths) - reinterpret_cast<const char*>(&attention)))
      return static_cast<std::size_t>(lengths->shape[0]) * sizeof(std::int32_t);
  return 0;
}

using Function = hr_status(const hr_attention*);

Error* run_on(const CallFrame& frame, Function* function, hr_device device) {
  const Array* call = attribute(frame, "call");
  const Array* places = attribute(frame, "places");
  const auto buffers = static_cast<std::size_t>(frame.arguments.size + frame.results.size);
  if (!call || call->size != sizeof(hr_attention) || !places || places->size != buffers)
    return make_error(frame, ErrorCode::internal,
                      "headrace: the library and the Python package are of different versions");

  hr_attention attention;
  std::memcpy(&attention, call->data, sizeof attention);
  attention.device = device;
  if (device == HR_DEVICE_CUDA) {
    StreamGetArgs stream{sizeof stream, nullptr, frame.context, nullptr};
    if (Error* const error = frame.api->stream_get(&stream)) return error;
    attention.stream = stream.stream;
    attention.device_index = device_of(stream.stream);
  }
  std::list<std::vector<char>> metadata;  // until the library has read it
  const auto* place = static_cast<const std::int64_t*>(places->data);
  for (const Buffers* group : {&frame.arguments, &frame.results})
    for (std::int64_t i = 0; i < group->size; ++i, ++place) {
      const void* data = static_cast<const Buffer*>(group->items[i])->data;
      const auto offset = static_cast<std::size_t>(*place);
      const std::size_t bytes = host_bytes(attention, offset);
      if (bytes > 0 && device == HR_DEVICE_CUDA) {
        std::vector<char>& copy = metadata.emplace_back(bytes);
        copy_to_host(copy.data(), data, bytes, attention.stream);
        data = copy.data();
      }
      char* const target = reinterpret_cast<char*>(&attention) + offset;
      if (offset == offsetof(hr_attention, seed))
        std::memcpy(target, data, bytes);
      else
        std::memcpy(target, &data, sizeof data);
    }
  const hr_status status = function(&attention);
  return status == HR_OK ? nullptr : make_error(frame, code_of(status), hr_last_error());
}

Error* handle(const CallFrame* frame, Function* function, hr_device device) noexcept {
  if (answer_metadata(*frame)) return nullptr;
  try {
    return run_on(*frame, function, device);
  } catch (const std::exception& error) {  // no memory, or no driver
    return make_error(*frame, ErrorCode::internal, error.what());
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {
Error* headrace_jax_forward_cpu(CallFrame* frame) { return handle(frame, hr_forward, HR_DEVICE_CPU); }
Error* headrace_jax_backward_cpu(CallFrame* frame) { return handle(frame, hr_backward, HR_DEVICE_CPU); }
Error* headrace_jax_forward_cuda(CallFrame* frame) { return handle(frame, hr_forward, HR_DEVICE_CUDA); }
Error* headrace_jax_backward_cuda(CallFrame* frame) { return handle(frame, hr_backward, HR_DEVICE_CUDA); }
}
#pragma GCC visibility pop
