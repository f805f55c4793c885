// The machine code of a cubin, as NVIDIA's disassembler prints it.
#pragma once

#include <string>
#include <string_view>

namespace headrace::cuda {

struct SassReport {
  int instructions = 0;
  int tensor_instructions = 0;  // HGMMA, IGMMA, QGMMA: what wgmma becomes
  int local_accesses = 0;       // LDL, STL: spilled registers and arrays with dynamic indices
  int tensor_loops = 0;         // innermost loops with tensor instructions
  int loop_local_accesses = 0;  // accesses to local memory in those
};

SassReport count_instructions(std::string_view sass);

// Throws std::runtime_error if nvdisasm fails. Its path is what the build found, or HEADRACE_NVDISASM; empty if there
// is none.
std::string nvdisasm_path();
std::string disassemble(const std::string& cubin);

}  // namespace headrace::cuda
