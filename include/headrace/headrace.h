/* Headrace: exact, IO-aware attention. The C interface (C11).
 *
 * One struct, hr_attention, describes a call: tensors and options. A call then is
 *
 *     describe (fill hr_attention)  ->  hr_plan_create  ->  hr_plan_execute
 *
 * or hr_forward / hr_backward, which plan, allocate the workspace and execute. Every function that
 * can fail returns an hr_status; hr_last_error() then holds one sentence that names the argument,
 * what it was and what is allowed. When a call fails nothing has been written to any tensor.
 *
 * All functions may be called from any thread. A plan is immutable: several threads may execute one
 * plan at a time, each with a workspace of its own.
 */
#ifndef HEADRACE_HEADRACE_H_
#define HEADRACE_HEADRACE_H_

#include <stddef.h>
#include <stdint.h>

#define HEADRACE_VERSION_MAJOR 0
#define HEADRACE_VERSION_MINOR 1
#define HEADRACE_VERSION_PATCH 0

#if defined(_WIN32)
#define HR_API
#else
#define HR_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum hr_status {
  HR_OK = 0,
  HR_ERROR_TYPE = 1,        /* a wrong dtype                                (Python: TypeError) */
  HR_ERROR_VALUE = 2,       /* a shape, stride, range, pointer or metadata  (ValueError) */
  HR_ERROR_UNSUPPORTED = 3, /* a combination that the backend refuses       (NotImplementedError) */
  HR_ERROR_RUNTIME = 4      /* memory or a device failed                    (RuntimeError) */
} hr_status;

typedef enum hr_dtype {
  HR_FLOAT32 = 0,
  HR_FLOAT16 = 1,
  HR_BFLOAT16 = 2,
  HR_FLOAT64 = 3,
  HR_BOOL = 4, /* one byte, 0 or 1 */
  HR_INT32 = 5,
  HR_INT64 = 6 /* accepted nowhere; named so that the error can say so */
} hr_dtype;

/* A view of memory that the caller owns. Strides count elements. A tensor with ndim 0 is absent.
 * Inputs may have strides 0 and negative strides (data then points at element [0, 0, ...]); where a
 * tensor holds vectors (q, k, v, out and their gradients) the last dimension must be contiguous.
 * Elements of an output must not share memory with one another or with any input. */
typedef struct hr_tensor {
  void* data;
  int64_t shape[4];
  int64_t stride[4];
  int32_t ndim;  /* 0 to 4 */
  int32_t dtype; /* hr_dtype */
} hr_tensor;

/* A contiguous (row-major) tensor over data. ndim > 4 gives a tensor that every call refuses. */
HR_API hr_tensor hr_tensor_contiguous(void* data, hr_dtype dtype, int ndim, const int64_t* shape);

/* Causal: query i sees the keys j <= i + shift, with shift = seqlen_k - seqlen_q for BOTTOM_RIGHT and 0 for
 * TOP_LEFT. The window uses the same shift, and seqlen_k - seqlen_q where causal is NONE. */
typedef enum hr_causal { HR_CAUSAL_NONE = 0, HR_CAUSAL_BOTTOM_RIGHT = 1, HR_CAUSAL_TOP_LEFT = 2 } hr_causal;

typedef enum hr_backend {
  HR_BACKEND_AUTO = 0,
  HR_BACKEND_CPU = 1,
  HR_BACKEND_REFERENCE = 2, /* the float64 oracle: plain, slow, for checking */
  HR_BACKEND_CUDA = 3       /* what AUTO means where the tensors are on a CUDA device */
} hr_backend;

/* Where the tensors of a call live, all of them. */
typedef enum hr_device { HR_DEVICE_CPU = 0, HR_DEVICE_CUDA = 1 } hr_device;

typedef enum hr_pass { HR_FORWARD = 0, HR_BACKWARD = 1 } hr_pass;

/* A window bound that is not given. */
#define HR_UNBOUNDED INT64_MAX

/* Everything that describes an attention call. Always start from hr_attention_init.
 *
 * With i a query and j a key of one sequence and h a query head, in this order:
 *   s = scale * (q_i . k_j);  softcap: s = c * tanh(s / c);  s += bias;  s -= slope * |i + seqlen_k - seqlen_q - j|
 *   every mask that is given must agree that j is visible, else s = -inf
 *   lse_i = log(sum_j exp(s_ij) [+ exp(sink_h)]);  p = exp(s - lse);  dropout;  out_i = sum_j p_ij v_j
 * A row that sees no key: out 0, lse -inf (with a sink: lse = sink), no gradient to q, k, v, bias.
 *
 * T is the dtype of q: float32, float16, bfloat16 or float64. "1|n" means 1 (broadcast) or n. */
typedef struct hr_attention {
  size_t struct_size; /* set by hr_attention_init; tells a library of another version apart */

  /* Forward. Dense: [batch, seqlen, heads, dim]. Ragged (cu_seqlens given): [total, heads, dim]. */
  hr_tensor q;   /* [batch, seqlen_q, heads_q, head_dim] T */
  hr_tensor k;   /* [batch, seqlen_k, heads_kv, head_dim] T; heads_q is a multiple of heads_kv */
  hr_tensor v;   /* [batch, seqlen_k, heads_kv, value_dim] T */
  hr_tensor out; /* [batch, seqlen_q, heads_q, value_dim] T; written by forward, read by backward */
  hr_tensor lse; /* [batch, heads_q, seqlen_q], ragged [heads_q, total_q]; float32 (or float64 where T
                    is float64); natural logarithm; optional in forward, read by backward */

  /* Optional inputs of both passes. */
  hr_tensor bias;           /* [1|batch, 1|heads_q, 1|seqlen_q, 1|seqlen_k] float32 or T, any strides;
                               -inf hides a key */
  hr_tensor mask;           /* the same shapes, bool, any strides; true = visible */
  hr_tensor alibi_slopes;   /* [heads_q] or [batch, heads_q] float32 */
  hr_tensor sinks;          /* [heads_q] float32; -inf = none */
  hr_tensor block_mask;     /* [1|batch, 1|heads_q, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)] bool */
  int64_t block_q, block_k; /* rows and keys of a block of block_mask, >= 1 */

  /* Ragged batches, read on the host when planning and copied into the plan. int32, contiguous.
   * cu_seqlens [batch + 1]: non-decreasing, first 0, last <= total; both or neither.
   * seqused [batch] (optional, dense or ragged): how many tokens of each sequence count.
   * In ragged batches bias and mask are indexed inside each sequence, their full dimensions being at
   * least the longest sequence; block_mask likewise. Tokens of no sequence: out 0, lse -inf,
   * gradients 0. */
  hr_tensor cu_seqlens_q, cu_seqlens_k;
  hr_tensor seqused_q, seqused_k;

  /* Backward. */
  hr_tensor dout;   /* as out, T, input */
  hr_tensor dlse;   /* as lse, optional input: the gradient that reaches lse; ignored where lse = -inf */
  hr_tensor dq;     /* as q, output */
  hr_tensor dk;     /* as k, output */
  hr_tensor dv;     /* as v, output */
  hr_tensor dbias;  /* shape and dtype of bias, optional output: summed over broadcast dimensions */
  hr_tensor dsinks; /* [heads_q] float32, optional output */

  /* Options. */
  int32_t causal;                    /* hr_causal */
  int32_t has_scale;                 /* 0: scale = 1 / sqrt(head_dim) */
  double scale;                      /* any finite value */
  int64_t window_left, window_right; /* visible: i + shift - left <= j <= i + shift + right; negative
                                        bounds are honoured; HR_UNBOUNDED = no bound */
  double softcap;                    /* 0 = none, else > 0 */
  double dropout_p;                  /* 0 <= p < 1 */
  uint64_t seed;                     /* of the dropout mask (Philox4x32-10) */
  int32_t deterministic;             /* bitwise the same result every run; the CPU always is */
  int32_t batch_invariant;           /* the bits of a row do not depend on the rest of the batch, nor on splits */
  int32_t threads;                   /* 0 = what OpenMP would use; else 1 to 1024. Results do not depend on it */
  int32_t backend;                   /* hr_backend */

  /* Where. On CUDA a call works in the context of that device that is current, else in its primary one; it
   * queues its work on the stream and returns, and a stream capture may record it. The metadata (cu_seqlens,
   * seqused) is on the host on every device.
   * CUDA, at present: forward; float32, float16 and bfloat16; head_dim and value_dim up to 256; Hopper GPUs; dense
   * batches without seqused. Anything else is HR_ERROR_UNSUPPORTED. In 16 bits P is rounded to T before P V, products
   * q . k must fit float32 before the scale too, and NaN in a masked key may reach other rows of its tile.
   * float32 needs a workspace for float16 parts of q, k and v. So do 16-bit q, k or v whose data or stride is no
   * multiple of 16 bytes, or a stride negative or 2^40 bytes or more: that tensor is copied first. */
  int32_t device;       /* hr_device */
  int32_t device_index; /* of the CUDA device, from 0 */
  void* stream;         /* CUDA: CUstream or cudaStream_t; NULL is the default stream. Not part of a plan */
} hr_attention;

/* Every tensor absent, every option at its default. */
HR_API void hr_attention_init(hr_attention* attention);

/* A validated call with its kernel, tiles, splits and workspace chosen. */
typedef struct hr_plan hr_plan;

/* Validates attention and plans a pass. Shapes, strides, dtypes, options and the metadata (cu_seqlens,
 * seqused) are read, and block_mask if its data is there, to count tiles for hr_plan_explain; every other
 * data pointer may still be NULL: on CUDA it then counts as aligned to 16 bytes. On failure *plan is NULL. */
HR_API hr_status hr_plan_create(const hr_attention* attention, hr_pass pass, hr_plan** plan);
HR_API void hr_plan_destroy(hr_plan* plan); /* NULL is fine */

/* Bytes of scratch memory that hr_plan_execute needs, aligned to 64 bytes, on the device of the tensors. May be 0. */
HR_API size_t hr_plan_workspace_bytes(const hr_plan* plan);

/* Runs the plan on the tensors of attention, which must have the shapes, strides, dtypes and options
 * planned for; only the data pointers may differ (and the contents, those of the planned cu_seqlens and
 * seqused excepted); on CUDA q, k, v, dout, bias and dbias must be aligned to 16 bytes where they were when planning.
 * Allocates nothing. workspace must not be shared with a running call. */
HR_API hr_status hr_plan_execute(const hr_plan* plan, const hr_attention* attention, void* workspace,
                                 size_t workspace_bytes);

/* What the plan does and why: kernel, tiles, visited tiles, FLOPs, bytes moved against standard
 * attention, workspace, and why a faster kernel was not chosen. As text, and as a JSON object. The
 * string lives as long as the plan. */
HR_API const char* hr_plan_explain(const hr_plan* plan);
HR_API const char* hr_plan_explain_json(const hr_plan* plan);

/* Plan, allocate and execute in one call. */
HR_API hr_status hr_forward(const hr_attention* attention);
HR_API hr_status hr_backward(const hr_attention* attention);

/* Merges attention over two disjoint sets of keys: lse = log(exp(lse_a) + exp(lse_b)),
 * out = softmax-weighted sum. out_* [batch, seqlen_q, heads, value_dim] T; lse_* [batch, heads,
 * seqlen_q] float32 (or float64 where T is float64); any strides. Where one lse is -inf the other
 * side is returned bit for bit; both -inf gives (0, -inf). out and lse may be the tensors of side a. */
HR_API hr_status hr_merge_states(const hr_tensor* out_a, const hr_tensor* lse_a, const hr_tensor* out_b,
                                 const hr_tensor* lse_b, const hr_tensor* out, const hr_tensor* lse);

/* The dropout mask that every backend applies: keep [batch, heads_q, seqlen_q, seqlen_k] bool, true =
 * kept. In a ragged batch, batch is the index of the sequence and positions count inside it. */
HR_API hr_status hr_dropout_mask(const hr_tensor* keep, double dropout_p, uint64_t seed);

/* What this machine offers, as a JSON object: version, simd (chosen and available targets), threads,
 * gpu (driver, devices, compiler, precompiled kernels, cache). The string is static. */
HR_API const char* hr_info(void);

HR_API const char* hr_version(void); /* "0.1.0" */

/* The message of the last failed call of this thread; "" if none failed. */
HR_API const char* hr_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* HEADRACE_HEADRACE_H_ */
