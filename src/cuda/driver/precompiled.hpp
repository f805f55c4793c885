// Kernels that the build has compiled and that are part of the library: a pack, a list of cubins by digest.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace headrace::cuda {

// The library's own pack, of the standard set (cuda/standard_set.hpp); empty if the build had no NVRTC. Defined in a
// file that the build writes.
std::string_view embedded_pack();

// A pack of cubins, each under its digest (digest_of in kernel_source.hpp).
std::string write_pack(const std::map<std::string, std::string>& cubins);

// Makes the cubins of a pack known, which must stay where it is as long as the process lives: those of tests. Throws
// Failure if it is none.
void add_pack(std::string_view pack);

std::optional<std::string_view> find_precompiled(const std::string& digest);

struct PrecompiledSize {
  std::size_t kernels = 0, bytes = 0;
};
PrecompiledSize precompiled_size();

}  // namespace headrace::cuda
