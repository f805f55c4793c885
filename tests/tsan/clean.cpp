// OpenMP code without a race: its barriers, reductions and dynamic schedules must draw no report.
#include <cstddef>
#include <vector>

int main() {
  constexpr std::ptrdiff_t size = 1000;
  std::vector<long> values(size);
  long sum = 0;
#pragma omp parallel num_threads(4)
  for (int round = 0; round < 20; ++round) {
#pragma omp for
    for (std::ptrdiff_t i = 0; i < size; ++i) values[static_cast<std::size_t>(i)] += i;
#pragma omp for schedule(dynamic) reduction(+ : sum)
    for (std::ptrdiff_t i = 0; i < size; ++i) sum += values[static_cast<std::size_t>(size - 1 - i)];
  }
  return sum == 210L * (size * (size - 1) / 2) ? 0 : 1;
}
