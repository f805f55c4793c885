/* Attention over two keys with equal scores is the mean of their values. */
#include <headrace/headrace.h>
#include <stdio.h>

int main(void) {
  float q[8], k[2 * 8], v[4] = {1.0f, -2.0f, 3.0f, 6.0f}, out[2] = {0.0f, 0.0f};
  const int64_t q_shape[4] = {1, 1, 1, 8}, k_shape[4] = {1, 2, 1, 8};
  const int64_t v_shape[4] = {1, 2, 1, 2}, out_shape[4] = {1, 1, 1, 2};
  hr_attention attention;
  int i;

  for (i = 0; i < 8; ++i) q[i] = 1.0f;
  for (i = 0; i < 16; ++i) k[i] = 0.5f;
  hr_attention_init(&attention);
  attention.q = hr_tensor_contiguous(q, HR_FLOAT32, 4, q_shape);
  attention.k = hr_tensor_contiguous(k, HR_FLOAT32, 4, k_shape);
  attention.v = hr_tensor_contiguous(v, HR_FLOAT32, 4, v_shape);
  attention.out = hr_tensor_contiguous(out, HR_FLOAT32, 4, out_shape);
  attention.backend = HR_BACKEND_REFERENCE;
  if (hr_forward(&attention) != HR_OK) {
    fprintf(stderr, "C: %s\n", hr_last_error());
    return 1;
  }
  printf("C %s: out = %g %g\n", hr_version(), out[0], out[1]);
  if (out[0] != 2.0f || out[1] != 2.0f) return 2;

  attention.softcap = -1.0;
  if (hr_forward(&attention) != HR_ERROR_VALUE) return 3;
  printf("C error: %s\n", hr_last_error());
  return 0;
}
