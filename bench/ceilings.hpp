// What this machine's cores and memory can do at most: the yardsticks of attention_cpu.
#pragma once

#include <cstddef>
#include <span>

namespace headrace::bench {

// Runs multiply-adds of float32 on each thread, in as many independent chains as the widest registers hold; returns
// how many floating-point operations those were.
double run_fma(int threads);

// Whether run_pairs has instructions to run.
bool has_pairs();

// The same with dot products of pairs of bfloat16 (AVX-512 BF16): four operations a lane.
double run_pairs(int threads);

// Reads all of memory, each thread a part of its own.
void read_all(std::span<const std::byte> memory, int threads);

}  // namespace headrace::bench
