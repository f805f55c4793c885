#include "cuda/launch/pack_rows_source.hpp"

namespace headrace::cuda {

KernelSource pack_rows_source(int element_bytes) {
  return {.entry = "pack_rows", .file = "pack_rows.cuh", .constants = {{"ELEMENT_BYTES", element_bytes}}};
}

std::vector<KernelSource> pack_rows_standard_set() { return {pack_rows_source(2), pack_rows_source(4)}; }

}  // namespace headrace::cuda
