/* The C interface from C11: what a caller without C++ sees. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "headrace/headrace.h"

static int failures = 0;

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      printf("%s:%d: %s; last error: %s\n", __FILE__, __LINE__, #condition, hr_last_error()); \
      ++failures;                                                                             \
    }                                                                                         \
  } while (0)

enum { batch = 1, seqlen = 4, heads = 2, dim = 8, elements = batch * seqlen * heads * dim };

struct call {
  float q[elements], k[elements], v[elements], out[elements], lse[heads * seqlen];
  float dout[elements], dq[elements], dk[elements], dv[elements];
  hr_attention attention;
};

/* q = 0: every row is the mean of the values it sees, and lse the logarithm of their number. */
static void describe(struct call* c) {
  const int64_t shape[4] = {batch, seqlen, heads, dim};
  const int64_t lse_shape[3] = {batch, heads, seqlen};
  memset(c, 0, sizeof(*c));
  for (int i = 0; i < elements; ++i) {
    c->k[i] = 1.0f;
    c->v[i] = (float)(i / (heads * dim)); /* the position */
    c->dout[i] = 1.0f;
  }
  memset(c->out, 0xCB, sizeof(c->out));
  memset(c->lse, 0xCB, sizeof(c->lse));
  hr_attention_init(&c->attention);
  hr_attention* a = &c->attention;
  a->q = hr_tensor_contiguous(c->q, HR_FLOAT32, 4, shape);
  a->k = hr_tensor_contiguous(c->k, HR_FLOAT32, 4, shape);
  a->v = hr_tensor_contiguous(c->v, HR_FLOAT32, 4, shape);
  a->out = hr_tensor_contiguous(c->out, HR_FLOAT32, 4, shape);
  a->lse = hr_tensor_contiguous(c->lse, HR_FLOAT32, 3, lse_shape);
  a->dout = hr_tensor_contiguous(c->dout, HR_FLOAT32, 4, shape);
  a->dq = hr_tensor_contiguous(c->dq, HR_FLOAT32, 4, shape);
  a->dk = hr_tensor_contiguous(c->dk, HR_FLOAT32, 4, shape);
  a->dv = hr_tensor_contiguous(c->dv, HR_FLOAT32, 4, shape);
  a->causal = HR_CAUSAL_BOTTOM_RIGHT;
  a->backend = HR_BACKEND_REFERENCE;
}

static int near(float value, double expected) { return fabs((double)value - expected) < 1e-6; }

static void defaults(void) {
  hr_attention a;
  memset(&a, 0xCB, sizeof(a));
  hr_attention_init(&a);
  CHECK(a.struct_size == sizeof(hr_attention));
  CHECK(a.window_left == HR_UNBOUNDED && a.window_right == HR_UNBOUNDED);
  CHECK(a.q.ndim == 0 && a.dsinks.ndim == 0 && a.has_scale == 0 && a.causal == HR_CAUSAL_NONE);
  CHECK(a.backend == HR_BACKEND_AUTO && a.threads == 0 && a.block_q == 0);
  hr_attention_init(NULL);

  const int64_t shape[3] = {2, 3, 5};
  const hr_tensor t = hr_tensor_contiguous(&a, HR_FLOAT16, 3, shape);
  CHECK(t.data == &a && t.ndim == 3 && t.dtype == HR_FLOAT16 && t.shape[2] == 5);
  CHECK(t.stride[0] == 15 && t.stride[1] == 5 && t.stride[2] == 1);
}

static void one_call(void) {
  struct call c;
  describe(&c);
  CHECK(hr_forward(&c.attention) == HR_OK);
  for (int i = 0; i < seqlen; ++i) {
    CHECK(near(c.out[i * heads * dim], i / 2.0)); /* the mean of 0 ... i */
    CHECK(near(c.lse[i], log(i + 1.0)));
  }
  CHECK(hr_backward(&c.attention) == HR_OK);
  for (int j = 0; j < seqlen; ++j) {
    double expected = 0; /* key j has weight 1 / (i + 1) in row i */
    for (int i = j; i < seqlen; ++i) expected += 1.0 / (i + 1);
    CHECK(near(c.dv[j * heads * dim], expected));
  }
}

static void plans(void) {
  struct call c;
  describe(&c);
  /* A plan needs shapes only. */
  hr_attention shapes = c.attention;
  shapes.q.data = shapes.k.data = shapes.v.data = shapes.out.data = shapes.lse.data = NULL;
  hr_plan* plan = NULL;
  CHECK(hr_plan_create(&shapes, HR_FORWARD, &plan) == HR_OK && plan != NULL);
  const size_t bytes = hr_plan_workspace_bytes(plan);
  void* workspace = aligned_alloc(64, (bytes + 64) / 64 * 64);
  for (int run = 0; run < 3; ++run) { /* other data each time */
    struct call other;
    describe(&other);
    for (int i = 0; i < elements; ++i) other.v[i] += (float)run;
    CHECK(hr_plan_execute(plan, &other.attention, workspace, bytes) == HR_OK);
    CHECK(near(other.out[elements - 1], 1.5 + run));
  }
  CHECK(hr_plan_execute(plan, &shapes, workspace, bytes) == HR_ERROR_VALUE);
  CHECK(strcmp(hr_last_error(), "q: data is NULL; a tensor of shape [1, 4, 2, 8] needs memory") == 0);
  CHECK(strstr(hr_plan_explain(plan), "reference") != NULL);
  CHECK(strstr(hr_plan_explain_json(plan), "\"pass\":\"forward\"") != NULL);
  free(workspace);
  hr_plan_destroy(plan);

  hr_plan_destroy(NULL);
  CHECK(hr_plan_workspace_bytes(NULL) == 0);
  CHECK(strcmp(hr_plan_explain(NULL), "") == 0 && strcmp(hr_plan_explain_json(NULL), "{}") == 0);

  const int wrong = 2; /* an enum of C holds any int */
  hr_pass pass;
  memcpy(&pass, &wrong, sizeof(pass));
  plan = (hr_plan*)&c;
  CHECK(hr_plan_create(&c.attention, pass, &plan) == HR_ERROR_VALUE && plan == NULL);
  CHECK(strcmp(hr_last_error(), "pass: is 2; it must be 0 (forward) or 1 (backward)") == 0);
}

static void* other_thread(void* result) {
  const int clean = strcmp(hr_last_error(), "") == 0; /* this thread has not failed */
  const int failed = hr_forward(NULL) == HR_ERROR_VALUE;
  *(int*)result = clean && failed && strcmp(hr_last_error(), "attention: is NULL") == 0;
  return NULL;
}

static void messages(void) {
  struct call c;
  describe(&c);
  c.attention.threads = -5;
  CHECK(hr_forward(&c.attention) == HR_ERROR_VALUE);
  const char* expected = "threads: is -5; it must be 0 (all) to 1024";
  CHECK(strcmp(hr_last_error(), expected) == 0);
  pthread_t thread;
  int ok = 0;
  CHECK(pthread_create(&thread, NULL, other_thread, &ok) == 0);
  pthread_join(thread, NULL);
  CHECK(ok);
  CHECK(strcmp(hr_last_error(), expected) == 0); /* untouched by the other thread */
  c.attention.threads = 1;
  CHECK(hr_forward(&c.attention) == HR_OK);
  CHECK(strcmp(hr_last_error(), expected) == 0); /* and by success */
}

static void small_functions(void) {
  float a[2] = {1.0f, 2.0f}, b[2] = {3.0f, 6.0f}, lse_a = 0.0f, lse_b = 0.0f;
  const int64_t shape[4] = {1, 1, 1, 2}, lse_shape[3] = {1, 1, 1};
  const hr_tensor out_a = hr_tensor_contiguous(a, HR_FLOAT32, 4, shape);
  const hr_tensor out_b = hr_tensor_contiguous(b, HR_FLOAT32, 4, shape);
  const hr_tensor side_a = hr_tensor_contiguous(&lse_a, HR_FLOAT32, 3, lse_shape);
  const hr_tensor side_b = hr_tensor_contiguous(&lse_b, HR_FLOAT32, 3, lse_shape);
  CHECK(hr_merge_states(&out_a, &side_a, &out_b, &side_b, &out_a, &side_a) == HR_OK); /* in place */
  CHECK(near(a[0], 2.0) && near(a[1], 4.0) && near(lse_a, log(2.0)));

  uint8_t keep[6];
  memset(keep, 0xCB, sizeof(keep));
  const int64_t keep_shape[4] = {1, 1, 2, 3};
  const hr_tensor mask = hr_tensor_contiguous(keep, HR_BOOL, 4, keep_shape);
  CHECK(hr_dropout_mask(&mask, 0.0, 7) == HR_OK);
  for (int i = 0; i < 6; ++i) CHECK(keep[i] == 1);

  char version[32];
  snprintf(version, sizeof(version), "%d.%d.%d", HEADRACE_VERSION_MAJOR, HEADRACE_VERSION_MINOR,
           HEADRACE_VERSION_PATCH);
  CHECK(strcmp(hr_version(), version) == 0);
  CHECK(strstr(hr_info(), version) != NULL && strstr(hr_info(), "\"simd\"") != NULL && hr_info() == hr_info());
}

int main(void) {
  CHECK(strcmp(hr_last_error(), "") == 0);
  defaults();
  one_call();
  plans();
  messages();
  small_functions();
  printf("%s\n", failures == 0 ? "passed" : "failed");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
