// The part of XLA's foreign function interface that the handler uses: the binary layout that XLA keeps stable
// (openxla/xla, xla/ffi/api/c_api.h, major version 0), declared here so that building needs no JAX. A test compares it
// with the header of the JAX that is installed.
#ifndef HEADRACE_PYTHON_JAX_FFI_XLA_FFI_HPP_
#define HEADRACE_PYTHON_JAX_FFI_XLA_FFI_HPP_

#include <cstddef>
#include <cstdint>

namespace headrace::xla {

struct Extension {
  std::size_t struct_size;
  int type;
  Extension* next;
};
inline constexpr int extension_metadata = 1;

struct ApiVersion {
  std::size_t struct_size;
  Extension* extensions;
  int major_version;
  int minor_version;
};
inline constexpr int api_major = 0, api_minor = 1;  // all that is declared here is in 0.1

struct Metadata {
  std::size_t struct_size;
  ApiVersion api_version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum class ErrorCode : int { invalid_argument = 3, unimplemented = 12, internal = 13 };

struct Error;

struct ErrorCreateArgs {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

struct StreamGetArgs {
  std::size_t struct_size;
  Extension* extensions;
  void* context;
  void* stream;  // on a GPU a CUstream
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  ApiVersion api_version;
  const void* internal;
  Error* (*error_create)(ErrorCreateArgs*);
  void (*error_get_message)();  // what is not called is not declared further
  void (*error_destroy)();
  Error* (*handler_register)();
  Error* (*stream_get)(StreamGetArgs*);
};

struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  int dtype;
  void* data;
  std::int64_t rank;
  std::int64_t* dims;
};

// Arguments and results: `items` are Buffer*.
struct Buffers {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  int* types;
  void** items;
};

struct ByteSpan {
  const char* data;
  std::size_t size;
};

struct Array {
  int dtype;
  std::size_t size;
  void* data;
};

// Sorted by name.
struct Attributes {
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  int* types;
  ByteSpan** names;
  void** items;
};
inline constexpr int attribute_array = 1;

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  void* context;
  int stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
};

}  // namespace headrace::xla

#endif  // HEADRACE_PYTHON_JAX_FFI_XLA_FFI_HPP_
