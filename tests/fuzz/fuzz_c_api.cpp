// libFuzzer target on the arguments of the C interface. From the input's bytes it describes an attention call (merge,
// dropout mask), valid more often than not, breaks it in up to three places, and demands:
//
//   - no crash, no undefined behaviour, no access outside a tensor: each lies in a block of exactly its span
//   - a call that fails says why, and leaves every byte as it was
//   - a call that succeeds writes every element of its outputs, no byte between them, and no input
//
//   fuzz_c_api [-max_total_time=60] [corpus directory | input file to repeat]
#include <fuzzer/FuzzedDataProvider.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "describe/tensor_view.hpp"
#include "headrace/headrace.h"

namespace {

constexpr std::int64_t largest_block = 1 << 16;  // bytes of one tensor
constexpr std::int64_t largest_shape = 1 << 14;  // rows, heads, batch entries of a call that is planned
constexpr double largest_work = 3e5;             // (query, key) pairs of a call that is executed
// As a floating-point number of any type a NaN that neither the inputs below nor arithmetic make.
constexpr unsigned char poison = 0xFF;

#define DEMAND(condition, what)                                                             \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "%s (%s); last error: %s\n", what, #condition, hr_last_error()); \
      std::abort();                                                                         \
    }                                                                                       \
  } while (0)

enum class Role { input, output, ignored };

// A tensor and the block that holds exactly its elements and the gaps between them.
struct Slot {
  const char* name;
  hr_tensor* tensor;
  Role role = Role::input;
  std::unique_ptr<unsigned char[]> memory;
  std::size_t bytes = 0;
  std::vector<unsigned char> before;

  // Offsets of the elements in the block; called where there is a block.
  template <typename Visit>
  void for_each(Visit&& visit) const {
    const auto size = static_cast<std::size_t>(headrace::dtype_size(tensor->dtype));
    std::array<std::int64_t, 4> index{};
    for (;;) {
      std::int64_t offset = 0;
      for (int i = 0; i < tensor->ndim; ++i)
        offset += index[static_cast<std::size_t>(i)] * (tensor->shape[i] > 1 ? tensor->stride[i] : 0);
      auto* element = static_cast<unsigned char*>(tensor->data) + offset * static_cast<std::int64_t>(size);
      visit(static_cast<std::size_t>(element - memory.get()), size);
      int i = tensor->ndim - 1;
      while (i >= 0 && ++index[static_cast<std::size_t>(i)] == tensor->shape[i])
        index[static_cast<std::size_t>(i--)] = 0;
      if (i < 0) return;
    }
  }
};

class Fuzz {
 public:
  Fuzz(const std::uint8_t* data, std::size_t size) : input_(data, size) {}

  void run() {
    switch (pick({0, 0, 0, 0, 0, 0, 1, 2})) {
      case 0:
        return attention();
      case 1:
        return merge();
      default:
        return dropout();
    }
  }

 private:
  // ---- bytes of the input ----
  bool flip() { return input_.ConsumeBool(); }
  bool rarely(int n) { return input_.ConsumeIntegralInRange(0, n - 1) == 1; }
  std::int64_t in(std::int64_t lo, std::int64_t hi) { return input_.ConsumeIntegralInRange(lo, hi); }
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + input_.ConsumeIntegralInRange<std::size_t>(0, values.size() - 1));
  }
  std::int64_t odd_number() {
    return pick<std::int64_t>({0, 1, -1, 2, 3, 5, 16, 17, 64, 512, 513, -7, std::int64_t{1} << 31,
                               std::int64_t{1} << 33, (std::int64_t{1} << 40) - 1, std::int64_t{1} << 40,
                               std::int64_t{1} << 61, std::numeric_limits<std::int64_t>::max(),
                               std::numeric_limits<std::int64_t>::min()});
  }
  double odd_double() {
    return pick({0.0, -0.0, 1.0, -1.0, 0.5, 1e-3, 30.0, 1e300, 1e-300, -1e30, std::numeric_limits<double>::infinity(),
                 -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN(),
                 std::numeric_limits<double>::denorm_min(), 0.999999999999});
  }
  std::int32_t odd_dtype() { return pick<std::int32_t>({0, 1, 2, 3, 4, 5, 6, 7, -1, 1000}); }

  // ---- tensors ----

  // Contiguous, or with exchanged dimensions, gaps, and for inputs stride 0 and negative strides.
  hr_tensor shaped(std::int32_t dtype, std::initializer_list<std::int64_t> shape, bool vectors, bool is_input) {
    hr_tensor t{};
    t.dtype = dtype;
    t.ndim = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    std::array<int, 4> order = {0, 1, 2, 3};
    const bool plain = flip();
    if (!plain && t.ndim > 2 && flip()) std::swap(order[0], order[1]);
    if (!plain && t.ndim > 3 && flip()) std::swap(order[1], order[2]);
    if (!plain && !vectors && t.ndim > 1 && flip()) std::swap(order[0], order[static_cast<std::size_t>(t.ndim - 1)]);
    std::int64_t stride = 1;
    for (int n = t.ndim - 1; n >= 0; --n) {
      const int i = order[static_cast<std::size_t>(n)];
      t.stride[i] = stride;
      stride *= std::max<std::int64_t>(t.shape[i], 1);
      if (!plain) stride += in(0, 2);
    }
    if (!plain && is_input) {
      for (int i = 0; i < t.ndim - (vectors ? 1 : 0); ++i) {
        if (rarely(5)) t.stride[i] = 0;
        if (rarely(5)) t.stride[i] = -t.stride[i];
      }
    }
    return t;
  }

  hr_tensor integers(const std::vector<std::int32_t>& values) {
    integers_.push_back(values);
    hr_tensor t{};
    t.dtype = HR_INT32;
    t.ndim = 1;
    t.shape[0] = static_cast<std::int64_t>(values.size());
    t.stride[0] = 1;
    t.data = integers_.back().data();  // copied into the block by give_memory
    return t;
  }

  // x + by, with a wrap at the ends.
  static std::int64_t shifted(std::int64_t x, std::int64_t by) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(x) + static_cast<std::uint64_t>(by));
  }

  // Breaks a tensor in one place.
  void damage(hr_tensor& t) {
    const int i = static_cast<int>(in(0, 3));
    switch (in(0, 5)) {
      case 0:
        t.ndim = static_cast<std::int32_t>(in(-1, 5));
        break;
      case 1:
        t.dtype = odd_dtype();
        break;
      case 2:
        t.shape[i] = odd_number();
        break;
      case 3:
        t.shape[i] = shifted(t.shape[i], in(-1, 1));
        break;
      case 4:
        t.stride[i] = odd_number();
        break;
      default:
        t.stride[i] = shifted(t.stride[i], in(-2, 2));
    }
  }

  // A block of exactly the tensor's span, filled; NULL where that is too large or the shape is none.
  void give_memory(Slot& slot) {
    hr_tensor& t = *slot.tensor;
    const void* content = t.data;
    t.data = nullptr;
    if (t.ndim < 1 || t.ndim > 4) return;
    std::int64_t below = 0, above = 1, elements = 1;
    for (int i = 0; i < t.ndim; ++i) {
      if (t.shape[i] < 1 || t.shape[i] > largest_block) return;
      elements *= t.shape[i];
      if (elements > largest_block) return;
      const std::int64_t stride = t.shape[i] > 1 ? t.stride[i] : 0;
      if (stride < -largest_block || stride > largest_block) return;
      (stride < 0 ? below : above) += (t.shape[i] - 1) * stride;
    }
    const std::int64_t size = headrace::dtype_size(t.dtype);
    if ((above - below) * size > largest_block) return;
    slot.bytes = static_cast<std::size_t>((above - below) * size);
    slot.memory = std::make_unique<unsigned char[]>(slot.bytes);
    t.data = slot.memory.get() - below * size;
    std::memset(slot.memory.get(), poison, slot.bytes);
    if (content != nullptr) {
      for (const std::vector<std::int32_t>& v : integers_) {
        if (v.data() == content) std::memcpy(slot.memory.get(), v.data(), std::min(slot.bytes, v.size() * 4));
      }
    } else if (slot.role == Role::input) {
      fill(slot);
    }
    if (size > 1 && rarely(200)) t.data = static_cast<unsigned char*>(t.data) + 1;  // misaligned
    if (rarely(200)) t.data = nullptr;
  }

  // Finite numbers of moderate size, sometimes with infinities and NaN among them.
  void fill(const Slot& slot) {
    const bool special = rarely(8);
    std::uint64_t state = seed_ = seed_ * 6364136223846793005u + 1442695040888963407u;
    slot.for_each([&](std::size_t at, std::size_t size) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const auto n = static_cast<std::uint32_t>(state >> 40);
      const double value = static_cast<double>(n % 4096) / 512.0 - 4.0;
      unsigned char* element = slot.memory.get() + at;
      const bool odd = special && n % 16 == 0;
      switch (slot.tensor->dtype) {
        case HR_FLOAT32: {
          const float x = odd ? std::array{INFINITY, -INFINITY, NAN, 1e38f}[n / 16 % 4] : static_cast<float>(value);
          std::memcpy(element, &x, sizeof(x));
          break;
        }
        case HR_FLOAT64: {
          const double x = odd ? -std::numeric_limits<double>::infinity() : value;
          std::memcpy(element, &x, sizeof(x));
          break;
        }
        case HR_FLOAT16:
        case HR_BFLOAT16: {  // exponents around that of 1
          const int one = slot.tensor->dtype == HR_FLOAT16 ? 0x3c00 : 0x3f80;
          const auto x = static_cast<std::uint16_t>(
              odd ? n & 0xFFFEu : static_cast<unsigned>(one) + n % 512 - 256 + (n & 1u) * 0x8000u);
          std::memcpy(element, &x, sizeof(x));
          break;
        }
        case HR_BOOL:
          *element = odd ? static_cast<unsigned char>(n) : static_cast<unsigned char>(n % 4 != 0);
          break;
        default:
          std::memset(element, 0, size);
      }
    });
  }

  void remember() {
    for (Slot& slot : slots_) slot.before.assign(slot.memory.get(), slot.memory.get() + slot.bytes);
  }

  void demand_unchanged() const {
    for (const Slot& slot : slots_)
      DEMAND(slot.bytes == 0 || std::memcmp(slot.memory.get(), slot.before.data(), slot.bytes) == 0, slot.name);
  }

  // After success: outputs whole, gaps and inputs as before.
  void demand_written() const {
    for (const Slot& slot : slots_) {
      if (slot.bytes == 0) continue;
      if (slot.role != Role::output) {
        DEMAND(std::memcmp(slot.memory.get(), slot.before.data(), slot.bytes) == 0, slot.name);
        continue;
      }
      std::vector<unsigned char> gaps(slot.memory.get(), slot.memory.get() + slot.bytes);
      slot.for_each([&](std::size_t at, std::size_t size) {
        std::array<unsigned char, 8> untouched;
        untouched.fill(poison);
        DEMAND(std::memcmp(slot.memory.get() + at, untouched.data(), size) != 0, slot.name);
        std::memset(gaps.data() + at, poison, size);
      });
      DEMAND(std::all_of(gaps.begin(), gaps.end(), [](unsigned char byte) { return byte == poison; }), slot.name);
    }
  }

  void demand_failure(hr_status status) const {
    DEMAND(status >= HR_ERROR_TYPE && status <= HR_ERROR_RUNTIME, "an unknown status");
    DEMAND(std::strlen(hr_last_error()) > 5, "a failure without a message");
    demand_unchanged();
  }

  // ---- attention ----

  void describe() {
    hr_attention_init(&a_);
    const std::int32_t dtype = pick<std::int32_t>({HR_FLOAT32, HR_FLOAT16, HR_BFLOAT16, HR_FLOAT64});
    const std::int64_t batch = in(0, 3), heads_kv = in(0, 3), heads_q = heads_kv * in(0, 3);
    const std::int64_t dim = rarely(6) ? in(1, 140) : in(1, 20), value_dim = rarely(6) ? in(1, 140) : in(1, 20);
    const bool ragged = rarely(3), long_ones = rarely(6);
    const std::int64_t longest = long_ones ? 300 : 12;
    std::int64_t seqlen_q = in(0, longest), seqlen_k = in(0, longest);  // of bias and masks: the longest
    std::int64_t rows_q = seqlen_q, rows_k = seqlen_k;
    std::vector<std::int32_t> lengths_q(static_cast<std::size_t>(batch), static_cast<std::int32_t>(seqlen_q));
    std::vector<std::int32_t> lengths_k(static_cast<std::size_t>(batch), static_cast<std::int32_t>(seqlen_k));
    if (ragged) {
      const auto begins = [&](std::vector<std::int32_t>& lengths, std::int64_t& most, std::int64_t& rows) {
        std::vector<std::int32_t> begin = {0};
        const std::int64_t limit = most;
        most = 0;
        for (std::int32_t& length : lengths) {
          length = static_cast<std::int32_t>(in(0, limit));
          most = std::max<std::int64_t>(most, length);
          begin.push_back(begin.back() + length);
        }
        rows = begin.back() + in(0, 2);
        if (rarely(30)) begin[static_cast<std::size_t>(in(0, batch))] += static_cast<std::int32_t>(in(-3, 3));
        return integers(begin);
      };
      a_.cu_seqlens_q = begins(lengths_q, seqlen_q, rows_q);
      a_.cu_seqlens_k = begins(lengths_k, seqlen_k, rows_k);
    }
    const auto rows = [&](std::int64_t length, std::int64_t heads, std::int64_t size, bool is_input) {
      return ragged ? shaped(dtype, {length, heads, size}, true, is_input)
                    : shaped(dtype, {batch, length, heads, size}, true, is_input);
    };
    const std::int32_t lse_dtype = dtype == HR_FLOAT64 && flip() ? HR_FLOAT64 : HR_FLOAT32;
    const auto statistics = [&](bool is_input) {
      return ragged ? shaped(lse_dtype, {heads_q, rows_q}, false, is_input)
                    : shaped(lse_dtype, {batch, heads_q, rows_q}, false, is_input);
    };
    pass_ = flip() ? HR_FORWARD : HR_BACKWARD;
    const bool backward = pass_ == HR_BACKWARD;
    a_.q = rows(rows_q, heads_q, dim, true);
    a_.k = rows(rows_k, heads_kv, dim, true);
    a_.v = rows(rows_k, heads_kv, value_dim, true);
    a_.out = rows(rows_q, heads_q, value_dim, backward);
    if (backward || flip()) a_.lse = statistics(backward);
    const auto used = [&](std::vector<std::int32_t> lengths) {
      for (std::int32_t& length : lengths) length = static_cast<std::int32_t>(in(0, length));
      return integers(lengths);
    };
    if (rarely(4)) a_.seqused_q = used(lengths_q);
    if (rarely(4)) a_.seqused_k = used(lengths_k);
    const auto pairs = [&](std::int32_t type, bool is_input) {
      return shaped(type, {flip() ? 1 : batch, flip() ? 1 : heads_q, flip() ? 1 : seqlen_q, flip() ? 1 : seqlen_k},
                    false, is_input);
    };
    if (rarely(3)) a_.bias = pairs(flip() ? HR_FLOAT32 : dtype, true);
    if (rarely(3)) a_.mask = pairs(HR_BOOL, true);
    if (rarely(3))
      a_.alibi_slopes =
          flip() ? shaped(HR_FLOAT32, {heads_q}, false, true) : shaped(HR_FLOAT32, {batch, heads_q}, false, true);
    if (rarely(3)) a_.sinks = shaped(HR_FLOAT32, {heads_q}, false, true);
    if (rarely(3)) {
      a_.block_q = in(1, 20), a_.block_k = in(1, 20);
      a_.block_mask = shaped(HR_BOOL,
                             {flip() ? 1 : batch, flip() ? 1 : heads_q, (seqlen_q + a_.block_q - 1) / a_.block_q,
                              (seqlen_k + a_.block_k - 1) / a_.block_k},
                             false, true);
    }
    if (backward || rarely(4)) {  // given in a forward pass, they are ignored
      a_.dout = rows(rows_q, heads_q, value_dim, true);
      if (flip()) a_.dlse = statistics(true);
      a_.dq = rows(rows_q, heads_q, dim, false);
      a_.dk = rows(rows_k, heads_kv, dim, false);
      a_.dv = rows(rows_k, heads_kv, value_dim, false);
      if (a_.bias.ndim != 0 && flip())
        a_.dbias = shaped(a_.bias.dtype, {a_.bias.shape[0], a_.bias.shape[1], a_.bias.shape[2], a_.bias.shape[3]},
                          false, false);
      if (a_.sinks.ndim != 0 && flip()) a_.dsinks = shaped(HR_FLOAT32, {heads_q}, false, false);
    }
    a_.causal = static_cast<std::int32_t>(in(0, 2));
    if (rarely(4)) a_.window_left = rarely(4) ? odd_number() : in(-20, 20);
    if (rarely(4)) a_.window_right = rarely(4) ? odd_number() : in(-20, 20);
    if (rarely(4)) a_.has_scale = 1, a_.scale = odd_double();
    if (rarely(4)) a_.softcap = rarely(2) ? odd_double() : 5.0;
    if (rarely(4)) a_.dropout_p = rarely(4) ? odd_double() : 0.5;
    a_.seed = static_cast<std::uint64_t>(in(0, 3));
    a_.deterministic = flip() ? 1 : 0;
    a_.batch_invariant = flip() ? 1 : 0;
    a_.threads = static_cast<std::int32_t>(in(1, 2));
    a_.backend = pick<std::int32_t>({HR_BACKEND_AUTO, HR_BACKEND_CPU, HR_BACKEND_CPU, HR_BACKEND_REFERENCE});
  }

  void name_slots() {
    const bool backward = pass_ == HR_BACKWARD;
    const Role result = backward ? Role::input : Role::output, gradient = backward ? Role::output : Role::ignored;
    const auto add = [&](const char* name, hr_tensor& t, Role role) {
      Slot slot;
      slot.name = name;
      slot.tensor = &t;
      slot.role = role;
      slots_.push_back(std::move(slot));
    };
    add("q", a_.q, Role::input);
    add("k", a_.k, Role::input);
    add("v", a_.v, Role::input);
    add("out", a_.out, result);
    add("lse", a_.lse, result);
    add("bias", a_.bias, Role::input);
    add("mask", a_.mask, Role::input);
    add("alibi_slopes", a_.alibi_slopes, Role::input);
    add("sinks", a_.sinks, Role::input);
    add("block_mask", a_.block_mask, Role::input);
    add("cu_seqlens_q", a_.cu_seqlens_q, Role::input);
    add("cu_seqlens_k", a_.cu_seqlens_k, Role::input);
    add("seqused_q", a_.seqused_q, Role::input);
    add("seqused_k", a_.seqused_k, Role::input);
    add("dout", a_.dout, backward ? Role::input : Role::ignored);
    add("dlse", a_.dlse, backward ? Role::input : Role::ignored);
    add("dq", a_.dq, gradient);
    add("dk", a_.dk, gradient);
    add("dv", a_.dv, gradient);
    add("dbias", a_.dbias, gradient);
    add("dsinks", a_.dsinks, gradient);
  }

  void damage_option(hr_attention& a) {
    switch (in(0, 12)) {
      case 0:
        a.struct_size = static_cast<std::size_t>(odd_number());
        break;
      case 1:
        a.causal = static_cast<std::int32_t>(in(-1, 4));
        break;
      case 2:
        a.has_scale = 1, a.scale = odd_double();
        break;
      case 3:
        a.window_left = odd_number();
        break;
      case 4:
        a.window_right = odd_number();
        break;
      case 5:
        a.softcap = odd_double();
        break;
      case 6:
        a.dropout_p = odd_double();
        break;
      case 7:
        a.threads = pick<std::int32_t>({-1, 0, 1, 3, 1025});
        break;
      case 8:
        a.backend = static_cast<std::int32_t>(in(-1, 4));
        break;
      case 9:
        a.block_q = odd_number();
        break;
      case 10:
        a.block_k = odd_number();
        break;
      case 11:
        a.seed += 1;
        break;
      default:
        a.deterministic ^= 1;
    }
  }

  void damage_call() {
    if (rarely(3)) {
      damage_option(a_);
    } else {
      damage(*slots_[static_cast<std::size_t>(in(0, static_cast<std::int64_t>(slots_.size()) - 1))].tensor);
    }
  }

  // Shapes with stride 0 or no elements can be huge without memory; then even a list of their tiles is.
  [[nodiscard]] bool is_small() const {
    for (const hr_tensor* t : {&a_.q, &a_.k, &a_.v, &a_.out}) {
      for (int i = 0; i < std::clamp(t->ndim, 0, 4); ++i) {
        if (t->shape[i] > largest_shape) return false;
      }
    }
    if (a_.q.ndim == 4 && a_.k.ndim == 4) {
      double work = 1;
      for (int i = 0; i < 3; ++i) work *= static_cast<double>(std::max<std::int64_t>(a_.q.shape[i], 1));
      return work * static_cast<double>(std::max<std::int64_t>(a_.k.shape[1], 1)) <= largest_work;
    }
    if (a_.q.ndim == 3 && a_.k.ndim == 3)
      return static_cast<double>(a_.q.shape[0]) * static_cast<double>(a_.q.shape[1]) *
                 static_cast<double>(a_.k.shape[0]) <=
             largest_work;
    return true;
  }

  void attention() {
    describe();
    name_slots();
    for (int n = flip() ? 0 : static_cast<int>(in(1, 3)); n > 0; --n) damage_call();
    if (!is_small()) return;
    for (Slot& slot : slots_) give_memory(slot);
    remember();
    if (flip()) {
      const hr_status status = pass_ == HR_FORWARD ? hr_forward(&a_) : hr_backward(&a_);
      return status == HR_OK ? demand_written() : demand_failure(status);
    }

    hr_plan* plan = reinterpret_cast<hr_plan*>(this);
    const hr_status status = hr_plan_create(&a_, pass_, &plan);
    if (status != HR_OK) {
      DEMAND(plan == nullptr, "a failed plan that is not NULL");
      return demand_failure(status);
    }
    demand_unchanged();
    DEMAND(std::strstr(hr_plan_explain_json(plan), "\"tiles_visited\":") != nullptr, "a report without tiles");
    DEMAND(std::strlen(hr_plan_explain(plan)) > 100, "a short report");
    hr_attention called = a_;
    if (rarely(4)) {
      if (flip())
        damage_option(called);
      else
        damage(*std::array{&called.q, &called.k, &called.out, &called.bias, &called.lse,
                           &called.dv}[static_cast<std::size_t>(in(0, 5))]);
    }
    const std::size_t needed = hr_plan_workspace_bytes(plan);
    // Exactly as many bytes as asked for, so that the sanitizer sees the first one behind them.
    void* workspace = nullptr;
    if (needed > 0) DEMAND(posix_memalign(&workspace, 64, needed) == 0, "no memory for the workspace");
    if (workspace != nullptr) std::memset(workspace, poison, needed);
    const bool too_small = needed > 0 && rarely(20);
    execute(plan, called, workspace, too_small ? needed - 1 : needed, too_small);
    std::free(workspace);
    hr_plan_destroy(plan);
  }

  void execute(const hr_plan* plan, const hr_attention& called, void* workspace, std::size_t bytes, bool must_fail) {
    const hr_status status = hr_plan_execute(plan, &called, workspace, bytes);
    if (status != HR_OK) return demand_failure(status);
    DEMAND(!must_fail, "executed in too small a workspace");
    demand_written();
  }

  // ---- the smaller functions ----

  void merge() {
    const std::int32_t dtype = pick<std::int32_t>({HR_FLOAT32, HR_FLOAT16, HR_BFLOAT16, HR_FLOAT64});
    const std::int32_t lse_dtype = dtype == HR_FLOAT64 && flip() ? HR_FLOAT64 : HR_FLOAT32;
    const std::int64_t batch = in(0, 3), seqlen = in(0, 5), heads = in(0, 3), dim = in(0, 9);
    std::array<hr_tensor, 6> t;
    constexpr std::array names = {"out_a", "lse_a", "out_b", "lse_b", "out", "lse"};
    for (std::size_t i = 0; i < t.size(); ++i) {
      t[i] = i % 2 == 0 ? shaped(dtype, {batch, seqlen, heads, dim}, false, i < 4)
                        : shaped(lse_dtype, {batch, heads, seqlen}, false, i < 4);
      Slot slot;
      slot.name = names[i];
      slot.tensor = &t[i];
      slot.role = i < 4 ? Role::input : Role::output;
      slots_.push_back(std::move(slot));
    }
    for (int n = flip() ? 0 : 1; n > 0; --n) damage(t[static_cast<std::size_t>(in(0, 5))]);
    for (const hr_tensor& tensor : t) {
      for (int i = 0; i < std::clamp(tensor.ndim, 0, 4); ++i) {
        if (tensor.shape[i] > largest_shape) return;
      }
    }
    for (Slot& slot : slots_) give_memory(slot);
    remember();
    const hr_status status = hr_merge_states(&t[0], &t[1], &t[2], &t[3], &t[4], &t[5]);
    return status == HR_OK ? demand_written() : demand_failure(status);
  }

  void dropout() {
    hr_tensor keep = shaped(HR_BOOL, {in(0, 3), in(0, 3), in(0, 9), in(0, 9)}, false, false);
    if (flip()) damage(keep);
    Slot slot;
    slot.name = "keep";
    slot.tensor = &keep;
    slot.role = Role::output;
    slots_.push_back(std::move(slot));
    give_memory(slots_.back());
    remember();
    const hr_status status = hr_dropout_mask(&keep, odd_double(), static_cast<std::uint64_t>(in(0, 1 << 20)));
    return status == HR_OK ? demand_written() : demand_failure(status);
  }

  FuzzedDataProvider input_;
  hr_attention a_;
  hr_pass pass_ = HR_FORWARD;
  std::deque<std::vector<std::int32_t>> integers_;
  std::vector<Slot> slots_;
  std::uint64_t seed_ = 1;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Fuzz(data, size).run();
  return 0;
}
