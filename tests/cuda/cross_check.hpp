// Random calls on the GPU against the float64 reference, element by element, many for each kernel.
//
//   HEADRACE_TEST_SEED, HEADRACE_TEST_SCALE: see support/random.hpp
//   HEADRACE_TEST_PROBLEM=v:p  runs only this problem of a test; a failure prints its numbers
#pragma once

#include <cstdint>
#include <vector>

#include "on_gpu.hpp"

namespace headrace::test {

// The largest (head_dim, value_dim) of each size of tile.
constexpr std::int64_t tile_dims[5][2] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}};

// Multiprocessors that the tiles are chosen for: few get large tiles in pairs, many get small ones.
constexpr int few = 1, many = 1 << 20;

// What kernels are compiled for.
struct Variant {
  std::uint64_t number = 0;  // of the generator that drew it
  DType dtype = DType::bfloat16;
  int tile = 0;
  int multiprocessors = 0;
  bool banded = false;  // causal or window
  bool positive_scale = true, softcap = false, alibi = false, mask = false, blocks = false, sinks = false,
       dropout = false;
  int bias = 0;  // 1: of the dtype of q, 2: float32
  // Of the backward pass.
  bool dbias = false, deterministic = false;
};

Variant plain_variant(std::uint64_t number, int tile, int multiprocessors, DType dtype, bool banded);

// The first variants, by `index`, have one option each, the others any.
Variant random_variant(std::uint64_t number, int index);

// Runs `problems` problems of every variant, of at most `max_cost` multiply-adds of a forward pass each. The kernels
// are compiled first, on all processors.
void cross_check(const std::vector<Variant>& variants, std::size_t problems, Passes passes, double max_cost);

}  // namespace headrace::test
