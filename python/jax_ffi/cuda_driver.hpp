// The little that the handlers for GPUs ask of NVIDIA's driver, which is opened when the first of them runs.
#ifndef HEADRACE_PYTHON_JAX_FFI_CUDA_DRIVER_HPP_
#define HEADRACE_PYTHON_JAX_FFI_CUDA_DRIVER_HPP_

#include <cstddef>

namespace headrace::xla {

// The index of the device of a stream. Throws std::runtime_error if the driver fails, as the next does.
int device_of(void* stream);

// Copies from the memory of a device to that of the host, behind what is queued on the stream, and waits for it.
void copy_to_host(void* to, const void* from, std::size_t bytes, void* stream);

}  // namespace headrace::xla

#endif  // HEADRACE_PYTHON_JAX_FFI_CUDA_DRIVER_HPP_
