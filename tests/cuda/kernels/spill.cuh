// More values than 1024 threads have registers for: ptxas must spill.
extern "C" __global__ void __launch_bounds__(1024) spill(float* x, int count) {
  float values[100];
  for (int i = 0; i < 100; ++i) values[i] = x[i * 1024 + threadIdx.x];
  for (int j = 0; j < count; ++j)
    for (int i = 0; i < 100; ++i) values[i] = values[i] * values[(i * 7 + 1) % 100] + x[j];
  for (int i = 0; i < 100; ++i) x[i * 1024 + threadIdx.x] = values[i];
}
