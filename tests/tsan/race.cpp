// OpenMP code with a race: the threads add to one number without agreeing on an order.
#include <cstdio>

int main() {
  long sum = 0;
#pragma omp parallel for num_threads(4)
  for (long i = 0; i < 100000; ++i) sum += i;
  std::printf("%ld\n", sum);
}
