// What a cubin, the ELF file of a compiled kernel, says of itself.
#pragma once

#include <string>
#include <string_view>

namespace headrace::cuda {

struct CubinReport {
  int registers = 0;       // of a thread
  int stack_bytes = 0;     // local memory of a thread: spilled registers, arrays with dynamic indices
  int static_shared = 0;   // bytes of a block, with the 1024 that the hardware keeps for itself from sm_90 on
  int dynamic_shared = 0;  // bytes of a block: the kernel's dynamic_shared_bytes (kernel_source.hpp); 0 without it
};

// Throws Failure if it is no cubin with this entry.
CubinReport inspect_cubin(std::string_view cubin, const std::string& entry);

}  // namespace headrace::cuda
