/* Causal attention of four heads over a sequence, from C. */
#include <stdio.h>

#include "headrace/headrace.h"

enum { batch = 1, seqlen = 256, heads = 4, dim = 64 };
static float q[batch * seqlen * heads * dim], k[batch * seqlen * heads * dim];
static float v[batch * seqlen * heads * dim], out[batch * seqlen * heads * dim];

int main(void) {
  const int64_t shape[4] = {batch, seqlen, heads, dim};
  for (size_t i = 0; i < sizeof v / sizeof v[0]; ++i) v[i] = 0.5f;

  hr_attention attention;
  hr_attention_init(&attention);
  attention.q = hr_tensor_contiguous(q, HR_FLOAT32, 4, shape);
  attention.k = hr_tensor_contiguous(k, HR_FLOAT32, 4, shape);
  attention.v = hr_tensor_contiguous(v, HR_FLOAT32, 4, shape);
  attention.out = hr_tensor_contiguous(out, HR_FLOAT32, 4, shape);
  attention.causal = HR_CAUSAL_BOTTOM_RIGHT;
  if (hr_forward(&attention) != HR_OK) {
    fprintf(stderr, "%s\n", hr_last_error());
    return 1;
  }
  printf("out[0] = %g\n", (double)out[0]); /* the mean of equal values: 0.5 */
  return 0;
}
