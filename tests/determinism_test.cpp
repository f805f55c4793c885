// The same bits: from run to run, with any number of threads, and, where asked for, in any company.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>

#include "support/compare.hpp"

namespace headrace::test {
namespace {

using Bits = std::map<std::string, std::vector<std::byte>>;

Bits bits_in(const Call& call) {
  return {{"out", call.out.bytes()},      {"lse", call.lse.bytes()}, {"dq", call.dq.bytes()},
          {"dk", call.dk.bytes()},        {"dv", call.dv.bytes()},   {"dbias", call.dbias.bytes()},
          {"dsinks", call.dsinks.bytes()}};
}

// Runs forward and backward.
Bits bits_of(Call& call) {
  const Outcome outcome = run(call, Backend::cpu);
  EXPECT_EQ(outcome.failure, "") << call.spec.describe();
  return bits_in(call);
}

void expect_same_bits(const Bits& a, const Bits& b, const Spec& spec) {
  for (const auto& [name, bytes] : a) EXPECT_TRUE(bytes == b.at(name)) << name << ": " << spec.describe();
}

void expect_threads_do_not_matter(Spec spec) {
  spec.threads = 1;
  Call one = make_call(spec);
  const Bits expected = bits_of(one);
  for (const int threads : {2, 3, 8}) {
    spec.threads = threads;
    Call call = make_call(spec);
    expect_same_bits(bits_of(call), expected, spec);
  }
}

TEST(Threads, DoNotMatter_OverAllOptions) {
  Rng rng = test_rng();
  for (int n = 0; n < scaled(150) && !HasFailure(); ++n) expect_threads_do_not_matter(random_spec(rng, 1e6));
}

TEST(Threads, DoNotMatter_AcrossTilesAndSplits) {
  Rng rng = test_rng();
  for (int n = 0; n < scaled(12) && !HasFailure(); ++n) expect_threads_do_not_matter(random_large_spec(rng, 2e7));
}

TEST(Threads, DoNotMatter_ForFewRowsOverLongKeys) {
  Rng rng = test_rng();
  for (int repeat = 0; repeat < scaled(12); ++repeat) {
    Spec spec{.seed = rng.bits(), .head_dim = 64, .value_dim = 64};
    spec.dtype = rng.pick({DType::float32, DType::bfloat16});
    spec.group = rng.pick<std::int64_t>({1, 8});
    spec.seqlen_q = rng.pick<std::int64_t>({1, 3, 20});
    spec.seqlen_k = rng.integer(6000, 9000) / (spec.seqlen_q == 20 ? 2 : 1);
    spec.causal = Causal::bottom_right;
    spec.sinks = Sinks::normal;
    spec.dsinks = spec.dlse = true;
    spec.bias.present = spec.dbias = true;
    spec.bias.full = {false, true, false, true};
    expect_threads_do_not_matter(spec);
  }
}

TEST(Threads, DoNotMatter_ForSharedBiasGradients) {
  // Every broadcast of the bias: its gradient then sums over batch, heads, queries or keys.
  Rng rng = test_rng();
  for (unsigned full = 0; full < 16; ++full) {
    Spec spec{.seed = rng.bits(), .batch = 3, .heads_kv = 2, .group = 2, .seqlen_q = 90, .seqlen_k = 130};
    spec.bias.present = spec.dbias = true;
    for (unsigned dim = 0; dim < 4; ++dim) spec.bias.full[dim] = (full >> dim & 1) != 0;
    expect_threads_do_not_matter(spec);
  }
}

// Many threads on few cores: they are interrupted anywhere.
TEST(Runs, GiveTheSameBitsEachTime) {
  Rng rng = test_rng();
  for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
    for (const bool causal : {false, true}) {
      for (const bool ragged : {false, true}) {
        Spec spec{.seed = rng.bits(), .dtype = dtype, .batch = 2, .heads_kv = 1, .group = 4};
        spec.head_dim = spec.value_dim = 32;
        spec.seqlen_q = spec.seqlen_k = 200;
        if (ragged) {
          spec.ragged = true;
          spec.lengths_q = spec.lengths_k = {170, 97};
        }
        if (causal) {
          spec.causal = Causal::bottom_right;
          spec.window_left = 100;
        }
        spec.threads = 8;
        spec.deterministic = true;
        Call call = make_call(spec);
        const Bits expected = bits_of(call);
        for (int n = 1; n < scaled(25) && !HasFailure(); ++n) expect_same_bits(bits_of(call), expected, spec);
      }
    }
  }
}

// One plan, executed by several threads at a time, each with tensors and a workspace of its own.
TEST(Plans, MayBeExecutedBySeveralThreads) {
  Rng rng = test_rng();
  Spec spec{.seed = rng.bits(), .dtype = DType::bfloat16, .batch = 2, .heads_kv = 2, .group = 2};
  spec.seqlen_q = spec.seqlen_k = 100;
  spec.bias.present = spec.dbias = true;
  spec.bias.full = {false, true, true, true};
  spec.sinks = Sinks::normal;
  spec.dsinks = true;
  spec.threads = 2;
  Call first = make_call(spec);
  const Bits expected = bits_of(first);
  const Plan forward_plan(first.attention(Backend::cpu), Pass::forward);
  const Plan backward_plan(first.attention(Backend::cpu), Pass::backward);
  const std::size_t bytes = std::max(forward_plan.workspace_bytes(), backward_plan.workspace_bytes());

  std::vector<Bits> results(4);
  std::vector<std::thread> threads;
  for (Bits& result : results) {
    threads.emplace_back([&] {
      Call call = make_call(spec);
      std::vector<std::byte> memory(bytes + 64);
      const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
      const std::span<std::byte> workspace(memory.data() + (64 - address % 64) % 64, bytes);
      for (int n = 0; n < scaled(10); ++n) {
        forward_plan.execute(call.attention(Backend::cpu), workspace);
        backward_plan.execute(call.attention(Backend::cpu), workspace);
      }
      result = bits_in(call);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Bits& result : results) expect_same_bits(result, expected, spec);
}

// ---- batch invariance ----

// One sequence whose rows are to have the same bits wherever they are computed.
struct Sequence {
  std::int64_t length_q, length_k, heads_q, heads_kv, dim;
  std::vector<double> q, k, v, dout;  // [length, heads, dim]
  std::vector<double> slopes, sinks;  // [heads], or empty
};

// Its rows from `first` on, in a call.
void place(Call& call, Array Call::*tensor, const std::vector<double>& rows, std::int64_t token) {
  std::vector<double> values = (call.*tensor).values();
  const Shape shape = (call.*tensor).shape();
  const std::int64_t row = shape[shape.size() - 1] * shape[shape.size() - 2];
  std::copy(rows.begin(), rows.end(), values.begin() + token * row);
  (call.*tensor).fill(values);
}

struct Rows {
  std::vector<std::byte> out, lse, dq;
  bool operator==(const Rows&) const = default;
};

// Puts the sequence's queries from `first` on at token `at_q` and its keys at `at_k`, runs, and returns
// the bits of its last `count` rows.
Rows rows_in(Call call, const Sequence& sequence, std::int64_t first, std::int64_t at_q, std::int64_t at_k,
             std::int64_t count) {
  const std::int64_t row = sequence.heads_q * sequence.dim, rows = sequence.length_q - first;
  const auto from = [&](const std::vector<double>& values) {
    return std::vector<double>(values.begin() + first * row, values.end());
  };
  place(call, &Call::q, from(sequence.q), at_q);
  place(call, &Call::dout, from(sequence.dout), at_q);
  place(call, &Call::k, sequence.k, at_k);
  place(call, &Call::v, sequence.v, at_k);
  if (call.alibi_slopes.present()) call.alibi_slopes.fill(sequence.slopes);
  if (call.sinks.present()) call.sinks.fill(sequence.sinks);
  bits_of(call);
  const auto part = [&](const Array& array) {
    const std::vector<std::byte> bytes = array.bytes();
    const std::int64_t size = row * size_of(array.dtype()), end = at_q + rows;
    return std::vector<std::byte>(bytes.begin() + (end - count) * size, bytes.begin() + end * size);
  };
  Rows result{part(call.out), {}, part(call.dq)};
  const std::vector<std::byte> lse = call.lse.bytes();
  for (std::int64_t n = at_q + rows - count; n < at_q + rows; ++n)
    for (std::int64_t h = 0; h < sequence.heads_q; ++h) {
      const std::int64_t length = call.spec.ragged ? call.q.shape()[0] : call.spec.seqlen_q;
      const std::int64_t b = call.spec.ragged ? 0 : n / length, i = call.spec.ragged ? n : n % length;
      const std::int64_t at = (b * sequence.heads_q + h) * length + i;
      result.lse.insert(result.lse.end(), lse.begin() + at * 4, lse.begin() + (at + 1) * 4);
    }
  return result;
}

void expect_company_does_not_matter(Spec alone) {
  Rng rng(alone.seed);
  alone.batch_invariant = true;
  alone.batch = 1;
  Call source = make_call(alone);
  const Sequence sequence{
      alone.seqlen_q,       alone.seqlen_k,    alone.heads_q(),   alone.heads_kv,       alone.head_dim,
      source.q.values(),    source.k.values(), source.v.values(), source.dout.values(), source.alibi_slopes.values(),
      source.sinks.values()};
  const std::int64_t all = alone.seqlen_q;
  const Rows expected = rows_in(source, sequence, 0, 0, 0, all);

  Spec batch = alone;
  batch.batch = 5;
  for (const std::int64_t at : {0, 3})
    EXPECT_TRUE(rows_in(make_call(batch), sequence, 0, at * all, at * alone.seqlen_k, all) == expected)
        << "entry " << at << " of " << batch.describe();

  Spec ragged = alone;
  ragged.ragged = true;
  ragged.batch = 4;
  ragged.lengths_q = {rng.integer(0, 40), rng.integer(1, 90), all, rng.integer(0, 300)};
  ragged.lengths_k = {rng.integer(1, 700), rng.integer(0, 40), alone.seqlen_k, rng.integer(0, 300)};
  EXPECT_TRUE(rows_in(make_call(ragged), sequence, 0, ragged.lengths_q[0] + ragged.lengths_q[1],
                      ragged.lengths_k[0] + ragged.lengths_k[1], all) == expected)
      << ragged.describe();

  // Keys in a longer buffer.
  Spec capacity = alone;
  capacity.seqlen_k += 1000;
  capacity.used_k = {alone.seqlen_k};
  EXPECT_TRUE(rows_in(make_call(capacity), sequence, 0, 0, 0, all) == expected) << capacity.describe();

  // The last rows alone: what a decoder computes that has the keys of the others already.
  for (const std::int64_t count : {std::int64_t{1}, (all + 1) / 2}) {
    Spec last = alone;
    last.seqlen_q = count;
    const Rows some = rows_in(make_call(last), sequence, all - count, 0, 0, count);
    EXPECT_TRUE(some == rows_in(source, sequence, 0, 0, 0, count)) << last.describe();
  }

  for (const int threads : {1, 8}) {
    Spec other = batch;
    other.threads = threads;
    EXPECT_TRUE(rows_in(make_call(other), sequence, 0, all, alone.seqlen_k, all) == expected) << other.describe();
  }
}

TEST(BatchInvariant, RowsHaveTheSameBitsInAnyCompany) {
  Rng rng = test_rng();
  for (int n = 0; n < scaled(16) && !HasFailure(); ++n) {
    Spec spec{.seed = rng.bits()};
    spec.dtype = rng.pick({DType::float32, DType::bfloat16, DType::float16, DType::float64});
    spec.heads_kv = rng.integer(1, 2);
    spec.group = rng.pick<std::int64_t>({1, 2, 4});
    spec.head_dim = spec.value_dim = rng.pick<std::int64_t>({16, 33, 64});
    spec.seqlen_q = rng.integer(1, 150);
    spec.seqlen_k = spec.seqlen_q + rng.pick<std::int64_t>({0, 5, 100, 600});
    spec.causal = rng.pick({Causal::none, Causal::bottom_right});
    if (rng.chance(0.3)) spec.window_left = rng.integer(0, 200);
    if (rng.chance(0.3)) spec.softcap = 5.0;
    if (rng.chance(0.3)) spec.alibi = Alibi::heads;
    if (rng.chance(0.3)) spec.sinks = Sinks::normal;
    spec.threads = static_cast<int>(rng.integer(1, 4));
    expect_company_does_not_matter(spec);
  }
}

TEST(BatchInvariant, FewRowsOverLongKeysToo) {
  Rng rng = test_rng();
  for (const std::int64_t seqlen_q : {1, 7}) {
    Spec spec{.seed = rng.bits(), .heads_kv = 1, .group = 4, .head_dim = 64, .value_dim = 64};
    spec.seqlen_q = seqlen_q;
    spec.seqlen_k = rng.integer(3000, 5000);
    spec.causal = Causal::bottom_right;
    spec.threads = 4;
    expect_company_does_not_matter(spec);
  }
}

}  // namespace
}  // namespace headrace::test
