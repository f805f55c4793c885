// headrace_precompile STORE PACK: compiles the standard set and writes it as a pack; a step of the build.
#include <cstdio>
#include <exception>

#include "cuda/driver/precompiled.hpp"
#include "cuda/precompile/precompile.hpp"
#include "cuda/standard_set.hpp"

namespace headrace::cuda {

// This program makes the pack and has none.
std::string_view embedded_pack() { return {}; }

}  // namespace headrace::cuda

int main(int argc, char** argv) try {
  if (argc != 3) {
    std::fputs("usage: headrace_precompile STORE PACK\n", stderr);
    return 2;
  }
  headrace::cuda::precompile(headrace::cuda::standard_set(), argv[1], argv[2]);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "headrace_precompile: %s\n", error.what());
  return 1;
}
