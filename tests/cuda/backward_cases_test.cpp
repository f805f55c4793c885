// Faults of gradients that users of attention libraries met, as small calls whose right result is known: what
// tests/cases has for the CPU, backward, on the GPU.
#include <algorithm>
#include <cmath>

#include "accuracy.hpp"
#include "cases/cases.hpp"
#include "launches.hpp"

namespace headrace::test {
namespace {

constexpr double tolerance = 8e-3;  // of bfloat16

bool all_are(const std::vector<double>& values, double x) {
  return std::all_of(values.begin(), values.end(), [=](double y) { return y == x; });
}

class BackwardCases : public OnGpu {
 protected:
  static Spec spec(std::int64_t batch, std::int64_t heads_kv, std::int64_t group, std::int64_t seqlen_q,
                   std::int64_t seqlen_k, std::int64_t dim) {
    Spec s = dense_spec(DType::bfloat16, seqlen_q, seqlen_k, dim);
    s.batch = batch, s.heads_kv = heads_kv, s.group = group;
    return s;
  }
  static std::vector<Spec> in_every_type(const Spec& s) {
    std::vector<Spec> all;
    for (const DType dtype : dtypes) all.push_back(s), all.back().dtype = dtype;
    return all;
  }
  static Results run(Call& call) { return run_and_expect_exact_on_gpu(call, Passes::both); }
  static void run(const Spec& s) {
    Call call = make_call(s);
    run(call);
  }
  static void run_all(const std::vector<Spec>& specs) {
    in_parallel(specs.size(),
                [&](std::size_t n) { EXPECT_EQ(check_on_gpu(specs[n], Passes::both), "") << specs[n].describe(); });
  }

  // The boolean mask [1, 1, q, k] of a call.
  template <typename Visible>
  static void set_mask(Call& call, Visible&& visible) {
    call.spec.mask.present = true;
    call.spec.mask.full = {false, false, true, true};
    call.mask = Array(DType::boolean, {1, 1, call.spec.seqlen_q, call.spec.seqlen_k});
    std::vector<double> values;
    for (std::int64_t i = 0; i < call.spec.seqlen_q; ++i)
      for (std::int64_t j = 0; j < call.spec.seqlen_k; ++j) values.push_back(visible(i, j) ? 1.0 : 0.0);
    call.mask.fill(values);
  }

  // A deterministic call gives the same bits with this tensor in another layout.
  static void expect_layouts_do_not_matter(Call& plain, Array Call::*tensor, std::initializer_list<Layout> layouts) {
    plain.spec.deterministic = true;
    const Outcome expected = run_on_gpu(plain, Passes::both);
    ASSERT_EQ(expected.failure, "") << plain.spec.describe();
    Rng rng(plain.spec.seed);
    for (const Layout layout : layouts) {
      const bool scalars = tensor == &Call::lse || tensor == &Call::dlse;
      Call call = plain;
      call.*tensor = Array((plain.*tensor).dtype(), (plain.*tensor).shape(), layout,
                           scalars ? Elements::scalars : Elements::vectors, rng);
      (call.*tensor).fill((plain.*tensor).values());
      SCOPED_TRACE(name_of(layout));
      expect_same(run_on_gpu(call, Passes::both), expected.results, call.spec.describe());
    }
  }
  static void expect_same(const Outcome& outcome, const Results& expected, const std::string& what) {
    EXPECT_EQ(outcome.failure, "") << what;
    for (std::vector<double> Results::*member :
         {&Results::out, &Results::lse, &Results::dq, &Results::dk, &Results::dv})
      EXPECT_TRUE(outcome.results.*member == expected.*member) << what;
  }
};

// -- rows without keys --

TEST_F(BackwardCases, RowsThatAMaskHidesHaveNoPart) {
  for (const std::int64_t seqlen : {8, 150}) {
    for (const std::int64_t dim : {16, 128}) {
      Spec s = spec(1, 2, 1, seqlen, seqlen, dim);
      s.deterministic = true;
      Call call = make_call(s);
      set_mask(call, [](std::int64_t i, std::int64_t) { return i != 3; });
      const Results results = run(call);
      for (int h = 0; h < 2; ++h) {
        EXPECT_EQ(lse_of(call, results)(0, h, 3), -infinity);
        EXPECT_TRUE(all_are(dq_of(call, results).row(0, 3, h), 0.0)) << s.describe();
      }
      // Whatever the row holds.
      const auto row = static_cast<std::size_t>(2 * dim);
      std::vector<double> q = call.q.values(), dout = call.dout.values();
      std::fill_n(q.begin() + static_cast<std::ptrdiff_t>(3 * row), row, 1e4);
      std::fill_n(dout.begin() + static_cast<std::ptrdiff_t>(3 * row), row, -1e4);
      call.q.fill(q);
      call.dout.fill(dout);
      const Outcome other = run_on_gpu(call, Passes::both);
      EXPECT_EQ(other.failure, "");
      EXPECT_TRUE(other.results.dk == results.dk && other.results.dv == results.dv && other.results.dq == results.dq)
          << s.describe();
    }
  }
}

TEST_F(BackwardCases, ABatchEntryThatAMaskHidesGetsZeros) {
  for (const std::int64_t dim : {16, 64, 256}) {
    Spec s = spec(2, 2, 1, 8, 8, dim);
    s.mask.present = true;
    s.mask.full = {true, false, true, true};
    s.mask.hide_batch = true;
    s.dlse = true;  // of rows with lse = -inf: ignored
    Call call = make_call(s);
    const Results results = run(call);
    for (const std::vector<double>* values : {&results.dq, &results.dk, &results.dv})
      EXPECT_TRUE(all_are({values->begin(), values->begin() + static_cast<std::ptrdiff_t>(8 * 2 * dim)}, 0.0))
          << s.describe();
  }
}

TEST_F(BackwardCases, CausalMasksAreAligned) {
  for (const std::int64_t dim : {64, 128, 256}) {
    std::vector<Spec> specs;
    for (const auto& [seqlen_q, seqlen_k] : {std::pair<std::int64_t, std::int64_t>{2, 6},
                                             {6, 2},
                                             {1, 5},
                                             {5, 1},
                                             {5, 2},
                                             {129, 64},
                                             {64, 129},
                                             {200, 200},
                                             {400, 130}}) {
      for (const Causal causal : {Causal::bottom_right, Causal::top_left}) {
        specs.push_back(spec(1, 2, 2, seqlen_q, seqlen_k, dim));
        specs.back().causal = causal;
        specs.back().dlse = true;
      }
    }
    run_all(specs);
  }
  // Rows 0 to 2 of 5 see none of 2 keys.
  Spec s = spec(1, 1, 1, 5, 2, 64);
  s.causal = Causal::bottom_right;
  Call call = make_call(s);
  const Results results = run(call);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(lse_of(call, results)(0, 0, i), -infinity);
    EXPECT_TRUE(all_are(dq_of(call, results).row(0, i, 0), 0.0));
  }
}

TEST_F(BackwardCases, WindowsAreExactToTheirSign) {
  constexpr std::int64_t far = std::int64_t{1} << 40;
  std::vector<Spec> specs;
  for (const std::int64_t seqlen : {16, 300}) {
    for (const auto& [left, right] : {std::pair<std::int64_t, std::int64_t>{3, 0},
                                      {7, -8},
                                      {far, -1},
                                      {-1, far},
                                      {32, 32},
                                      {0, 0},
                                      {-5, 9},
                                      {70, -66},
                                      {-66, 70},
                                      {far, -far},
                                      {1, 1}}) {
      specs.push_back(spec(1, 1, 2, seqlen, seqlen, 64));
      specs.back().window_left = left;
      specs.back().window_right = right;
    }
  }
  run_all(specs);
}

// -- nothing to do, or almost --

TEST_F(BackwardCases, NoBatchNoHeadsNoQueriesNoKeys) {
  std::vector<Spec> specs;
  for (const DType dtype : dtypes) {
    for (const std::int64_t dim : {64, 256}) {
      Spec s = spec(2, 1, 4, 50, 87, dim);
      s.dtype = dtype;
      s.dlse = true;
      s.sinks = Sinks::normal;  // a row without keys gives it its dlse
      s.dsinks = true;
      s.bias.present = s.dbias = true;
      s.bias.full = {true, true, false, false};
      specs.push_back(s);
    }
  }
  load_variants(specs, Passes::both);
  for (const Spec& full : specs) {
    for (int empty = 0; empty < 4; ++empty) {
      for (const bool through_plan : {false, true}) {
        Spec s = full;
        s.through_plan = through_plan;
        if (empty == 0) s.batch = 0;
        if (empty == 1) s.heads_kv = 0;
        if (empty == 2) s.seqlen_q = 0;
        if (empty == 3) s.seqlen_k = 0;
        Call call = make_call(s);
        const Results results = run(call);
        for (const std::vector<double>* values : {&results.dq, &results.dk, &results.dv, &results.dbias})
          EXPECT_TRUE(all_are(*values, 0.0)) << s.describe();
      }
    }
    run(full);  // nothing was left behind
  }
}

// -- what is not finite shows --

TEST_F(BackwardCases, NotANumberInAQueryShows) {
  for (const DType dtype : dtypes) {
    Spec s = spec(1, 1, 1, 4, 8, 16);
    s.dtype = dtype;
    s.deterministic = true;
    Call call = make_call(s);
    const Results clean = run(call);
    std::vector<double> q = call.q.values();
    std::fill_n(q.begin() + 2 * 16, 16, std::nan(""));
    call.q.fill(q);
    const Results results = run(call);
    for (int i = 0; i < 4; ++i) {
      const std::vector<double> row = dq_of(call, results).row(0, i, 0);
      if (i == 2) {
        EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](double x) { return std::isnan(x); })) << s.describe();
      } else {
        // In float32 the forward pass computes the rows of such a tile in another way: out may differ in its last bit.
        const std::vector<double> expected = dq_of(call, clean).row(0, i, 0);
        EXPECT_LE(relative_difference(row, expected), dtype == DType::float32 ? 1e-5 : 0.0)
            << "row " << i << ": " << s.describe();
      }
    }
    for (const std::vector<double>* values : {&results.dk, &results.dv})
      EXPECT_TRUE(std::all_of(values->begin(), values->end(), [](double x) { return std::isnan(x); })) << s.describe();
  }
}

TEST_F(BackwardCases, NotANumberInVisibleInputsShows) {
  Spec plain = spec(1, 1, 2, 5, 70, 8);
  plain.bias.present = plain.dbias = plain.dlse = true;
  plain.bias.full = {false, true, true, true};
  const std::vector<Spec> specs = in_every_type(plain);
  load_variants(specs, Passes::both);
  for (const Spec& s : specs) {
    for (Array Call::*input : {&Call::q, &Call::k, &Call::v, &Call::dout, &Call::bias, &Call::dlse}) {
      Call call = make_call(s);
      std::vector<double> values = (call.*input).values();
      values[values.size() / 2] = std::nan("");
      (call.*input).fill(values);
      const Results results = run(call);  // the same elements are NaN
      EXPECT_TRUE(std::any_of(results.dq.begin(), results.dq.end(), [](double x) { return std::isnan(x); }))
          << s.describe();
    }
  }
}

// What lies in tiles outside the window is never read: NaN there changes nothing.
TEST_F(BackwardCases, TilesOutsideTheWindowAreNotRead) {
  Spec s = spec(1, 1, 1, 1200, 1200, 128);
  s.window_left = s.window_right = 10;
  s.deterministic = true;
  Call call = make_call(s);
  const Results clean = run(call);
  std::vector<double> q = call.q.values(), k = call.k.values(), dout = call.dout.values();
  constexpr std::size_t row = 128;
  for (std::vector<double>* values : {&q, &k, &dout})
    std::fill(values->begin() + 900 * row, values->end(), std::nan(""));
  call.q.fill(q);
  call.k.fill(k);
  call.dout.fill(dout);
  const Outcome poisoned = run_on_gpu(call, Passes::both);
  EXPECT_EQ(poisoned.failure, "");
  // No tile of theirs reaches a row beyond 890, whatever its size up to 256.
  for (std::vector<double> Results::*member : {&Results::dq, &Results::dk, &Results::dv})
    for (std::size_t n = 0; n < 500 * row && poisoned.failure.empty(); ++n)
      ASSERT_EQ((poisoned.results.*member)[n], (clean.*member)[n]) << n / row;
}

// -- strides --

TEST_F(BackwardCases, GradientOfTheOutputInAnyLayout) {
  Call plain = make_call(spec(2, 1, 4, 32, 32, 128));
  expect_layouts_do_not_matter(
      plain, &Call::dout, {Layout::transposed, Layout::padded, Layout::aligned, Layout::permuted, Layout::reversed});
}

TEST_F(BackwardCases, GradientOfTheOutputAsOneExpandedVector) {
  for (const DType dtype : dtypes) {
    Spec s = spec(2, 1, 4, 32, 32, 128);
    s.dtype = dtype;
    s.deterministic = true;
    Call call = make_call(s);
    call.dout.fill(constant(call.dout, 1.0));  // what out.sum().backward() hands over
    const Results expected = run(call);
    for (const Shape& shape : {Shape{1, 1, 1, 128}, Shape{2, 1, 1, 128}, Shape{1, 32, 1, 128}}) {
      Call expanded = call;
      expanded.dout = Array(dtype, shape);
      expanded.dout.fill(constant(expanded.dout, 1.0));
      expanded.dout = expanded.dout.expanded({2, 32, 4, 128});
      expect_same(run_on_gpu(expanded, Passes::both), expected, s.describe());
    }
  }
}

TEST_F(BackwardCases, EveryHeadDimHonoursStrides) {
  for (const DType dtype : dtypes) {
    for (const std::int64_t dim : {8, 64, 72, 96, 128, 192, 256}) {
      for (const std::int64_t seqlen : {8, 300}) {
        Spec s = spec(1, seqlen == 8 ? 32 : 2, 1, seqlen, seqlen, dim);
        s.dtype = dtype;
        Call plain = make_call(s);
        for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v})
          expect_layouts_do_not_matter(plain, tensor, {Layout::transposed});
        for (const Layout layout : {Layout::transposed, Layout::padded}) {  // of dq, dk and dv
          Spec other = plain.spec;
          other.gradient_layout = layout;
          Call call = make_call(other);
          for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout})
            (call.*tensor).fill((plain.*tensor).values());
          expect_same(run_on_gpu(call, Passes::both), run_on_gpu(plain, Passes::both).results, other.describe());
        }
      }
    }
  }
}

TEST_F(BackwardCases, TransposedInputsOfLongSequences) {
  for (const auto& [heads, seqlen] : {std::pair<std::int64_t, std::int64_t>{32, 1024}, {4, 8192}}) {
    Spec s = spec(1, heads, 1, seqlen, seqlen, 64);
    s.deterministic = true;
    Call plain = make_call(s);
    const Outcome expected = run_on_gpu(plain, Passes::both);
    EXPECT_EQ(expected.failure, "") << s.describe();
    s.q_layout = s.k_layout = s.v_layout = s.dout_layout = s.gradient_layout = Layout::transposed;
    Call call = make_call(s);
    for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout})
      (call.*tensor).fill((plain.*tensor).values());
    expect_same(run_on_gpu(call, Passes::both), expected.results, s.describe());
  }
}

TEST_F(BackwardCases, ExpandedKeyHeadsActLikeCopies) {
  for (const std::int64_t dim : {64, 256}) {
    for (const std::int64_t seqlen : {33, 65, 97, 961}) {
      Spec s = spec(1, 8, 1, std::min<std::int64_t>(seqlen, 97), seqlen, dim);
      s.mask.present = true;
      s.mask.full = {false, false, true, true};
      s.mask.hidden = 0.3;
      s.deterministic = true;
      Call copied = make_call(s), expanded = copied;
      for (Array Call::*tensor : {&Call::k, &Call::v}) {
        Array one(s.dtype, {1, seqlen, 1, dim});
        const std::vector<double> values = (copied.*tensor).values();
        one.fill({values.begin(), values.begin() + static_cast<std::ptrdiff_t>(seqlen * dim)});
        expanded.*tensor = one.expanded({1, seqlen, 8, dim});
        (copied.*tensor).fill((expanded.*tensor).values());
      }
      const Results expected = run(copied);
      expect_same(run_on_gpu(expanded, Passes::both), expected, s.describe());
    }
  }
}

TEST_F(BackwardCases, LseInAnyLayout) {
  for (const std::int64_t seqlen_q : {1, 70}) {
    Spec s = spec(2, 2, 4, seqlen_q, 150, 64);
    s.dlse = true;
    Call plain = make_call(s);
    for (Array Call::*tensor : {&Call::lse, &Call::dlse})
      expect_layouts_do_not_matter(plain, tensor, {Layout::transposed, Layout::permuted, Layout::padded});
    run(plain.spec);
  }
}

TEST_F(BackwardCases, PackedQueriesKeysAndValues) {
  Spec s = spec(2, 2, 3, 133, 133, 64);
  s.deterministic = true;
  Call plain = make_call(s);
  const Results expected = run(plain);
  s.packed_qkv = true;  // and dq, dk and dv
  Call packed = make_call(s);
  for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout})
    (packed.*tensor).fill((plain.*tensor).values());
  expect_same(run_on_gpu(packed, Passes::both), expected, s.describe());
}

// -- numerics --

TEST_F(BackwardCases, VeryNegativeLseKeepsGradientsFinite) {
  std::vector<Spec> specs;
  for (const auto& [seqlen_q, seqlen_k, dim] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{704, 704, 64},
                                                {64, 64, 64},
                                                {192, 192, 128},
                                                {1, 128, 64},
                                                {100, 130, 256}}) {
    for (Spec s : in_every_type(spec(1, 1, 1, seqlen_q, seqlen_k, dim))) {
      s.mask.present = true;
      s.mask.full = {false, false, true, true};
      specs.push_back(s);
      s.bias.present = true;
      specs.push_back(s);
    }
  }
  load_variants(specs, Passes::both);
  for (std::size_t n = 0; n < specs.size(); n += 2) {
    const Spec& s = specs[n];
    const std::int64_t dim = s.head_dim;
    Call call = changed(s, Change([=](Values& q, Values& k, Values&) {
                          multiply(q, 0.1), multiply(k, 0.1);
                          set_first(q, dim, 1.0), set_first(k, dim, -120.0 * std::sqrt(static_cast<double>(dim)));
                        }));
    Results results = run(call);
    EXPECT_LT(results.lse[0], -100.0);

    // A constant added to all logits changes lse alone.
    Call raised = make_call(specs[n + 1]);
    raised.bias.fill({120.0});
    for (Array Call::*tensor : {&Call::q, &Call::k, &Call::v, &Call::dout})
      (raised.*tensor).fill((call.*tensor).values());
    Results other = run(raised);
    EXPECT_GT(other.lse[0], -10.0);
    // dq along the large dimension of the keys is a sum that cancels: its error is that of its terms.
    for (Results* r : {&results, &other}) set_first(r->dq, dim, 0.0);
    const double of_scores = 120.0 * 0x1p-20;
    for (std::vector<double> Results::*member : {&Results::out, &Results::dq, &Results::dk, &Results::dv})
      EXPECT_LE(relative_difference(results.*member, other.*member), 6.0 * contract_of(s.dtype) + of_scores)
          << s.describe();
  }
}

// -- options --

TEST_F(BackwardCases, GroupedHeadsSumTheirGradients) {
  for (const std::int64_t dim : {64, 256}) {
    constexpr std::int64_t batch = 3, heads = 6, heads_kv = 2, group = 3, seqlen = 65;
    Call grouped = make_call(spec(batch, heads_kv, group, seqlen, seqlen, dim));
    const Results results = run(grouped);

    // Every query head with keys and values of its own.
    Call alone = make_call(spec(batch, heads, 1, seqlen, seqlen, dim));
    alone.q.fill(grouped.q.values());
    alone.dout.fill(grouped.dout.values());
    for (Array Call::*tensor : {&Call::k, &Call::v}) {
      const Grid values((grouped.*tensor).values(), {batch, seqlen, heads_kv, dim});
      std::vector<double> repeated;
      for (int b = 0; b < batch; ++b)
        for (int j = 0; j < seqlen; ++j)
          for (int h = 0; h < heads; ++h) {
            const std::vector<double> row = values.row(b, j, h / group);
            repeated.insert(repeated.end(), row.begin(), row.end());
          }
      (alone.*tensor).fill(repeated);
    }
    const Results each = run(alone);
    EXPECT_LE(relative_difference(results.dq, each.dq), tolerance);
    for (std::vector<double> Results::*member : {&Results::dk, &Results::dv}) {
      std::vector<double> sums((results.*member).size(), 0.0);
      const auto d = static_cast<std::size_t>(dim);
      for (std::size_t n = 0; n < (each.*member).size(); ++n)
        sums[(n / d / heads * heads_kv + n / d % heads / group) * d + n % d] += (each.*member)[n];
      EXPECT_LE(relative_difference(results.*member, sums), tolerance) << "dim " << dim;
    }
  }
}

// Two caps in a row; logits from -100 to 100, whose derivative is about 0 at both ends; the mask comes after the cap.
TEST_F(BackwardCases, SoftcapsAndMasks) {
  Spec row = spec(1, 1, 1, 1, 81, 32);
  row.scale = 1.0;
  row.softcap = 1.0;
  Spec masked = spec(1, 2, 1, 100, 200, 64);
  masked.softcap = 1.0;
  masked.inputs = Inputs::large_logits;
  masked.mask.present = masked.bias.present = masked.dbias = true;
  masked.mask.full = masked.bias.full = {false, true, true, true};
  masked.mask.hidden = masked.bias.hidden = 0.3;
  masked.mask.hide_rows = true;
  std::vector<Spec> specs = in_every_type(row);
  for (const Spec& s : in_every_type(masked)) specs.push_back(s);
  load_variants(specs, Passes::both);
  for (Spec s : specs) {
    for (const double cap : {1.0, 15.0, 50.0, 1.0}) {
      s.softcap = cap;
      Call call = make_call(s);
      if (s.seqlen_q == 1) {
        std::vector<double> q = constant(call.q, 0.0), k = constant(call.k, 0.0);
        q[0] = 1.0;
        for (std::size_t j = 0; j < 81; ++j) k[j * 32] = -100.0 + 2.5 * static_cast<double>(j);
        call.q.fill(q);
        call.k.fill(k);
      }
      const Results results = run(call);
      if (s.seqlen_q > 1 || cap > 1.0) continue;
      for (const double x : dk_of(call, results).row(0, 80, 0)) EXPECT_NEAR(x, 0.0, 1e-5);
    }
  }
}

// The thread that loads looks long for a step of a key tile of which nothing is visible; the others must not go on
// without it.
TEST_F(BackwardCases, KeyTilesThatABlockMaskHides) {
  for (const auto& [dim, seqlen_k] :
       {std::pair(64, 700), std::pair(64, 2300), std::pair(128, 700), std::pair(256, 700)}) {
    for (const bool deterministic : {false, true}) {
      Spec s = spec(1, 1, 4, 300, seqlen_k, dim);
      s.deterministic = deterministic;
      s.blocks.present = true;
      s.blocks.block_q = 16, s.blocks.block_k = 128;
      Call call = make_call(s);
      std::vector<double> mask;
      for (std::int64_t i = 0; i < s.seqlen_q; i += 16)
        for (std::int64_t j = 0; j < s.seqlen_k; j += 128) mask.push_back(j % 256 == 0 ? 1.0 : 0.0);
      call.block_mask.fill(mask);
      run(call);
    }
  }
}

// What is stored as it lies in shared memory, and element by element; zeros where no tile is visited.
TEST_F(BackwardCases, GradientOfABiasOfEveryScore) {
  std::vector<Spec> specs;
  for (const std::int64_t dim : {64, 96, 128})
    for (const std::int64_t seqlen_k : {264, 301, 2304})
      for (const Causal causal : {Causal::none, Causal::bottom_right})
        for (const bool of_input_dtype : {false, true})
          for (const bool blocks : {false, true}) {
            Spec s = spec(2, 2, 2, 130, seqlen_k, dim);
            if (seqlen_k > 2000) s.batch = 1, s.heads_kv = 1;
            s.causal = causal;
            s.deterministic = dim == 64;
            s.bias.present = s.dbias = true;
            s.bias.full = {true, true, true, true};
            s.bias.of_input_dtype = of_input_dtype;
            s.blocks.present = blocks;
            s.blocks.block_q = 128, s.blocks.block_k = 64;
            s.blocks.hidden = 0.6;
            specs.push_back(s);
          }
  load_variants(specs, Passes::both);
  run_all(specs);
}

TEST_F(BackwardCases, SinksTakeWeightOnce) {
  const std::vector<double> sinks{-infinity, -5.0, 0.0, 5.0, 90.0, 1e4, -1e4, 2.0};
  Spec plain = spec(2, 2, 4, 40, 30, 64);
  plain.causal = Causal::bottom_right;  // rows 0 to 9 see no key: they give dsinks their dlse
  plain.sinks = Sinks::normal;
  plain.dsinks = plain.dlse = true;
  const std::vector<Spec> specs = in_every_type(plain);
  load_variants(specs, Passes::both);
  for (const Spec& s : specs) {
    Call call = make_call(s);
    call.sinks.fill(sinks);
    const Results results = run(call);
    for (int h = 0; h < 8; ++h)
      for (int i = 0; i < 10; ++i) EXPECT_TRUE(all_are(dq_of(call, results).row(0, i, h), 0.0)) << s.describe();
    EXPECT_EQ(results.dsinks[0], 0.0) << s.describe();
    // A sink of -inf is no sink.
    call.sinks.fill(std::vector<double>(8, -infinity));
    const Results absent = run(call);
    EXPECT_TRUE(all_are(absent.dsinks, 0.0)) << s.describe();
    // A sink that takes all the weight leaves none.
    call.sinks.fill(std::vector<double>(8, 1e4));
    const Results taken = run(call);
    EXPECT_TRUE(all_are(taken.dv, 0.0)) << s.describe();
  }
}

TEST_F(BackwardCases, DropoutIsThatOfTheForwardPass) {
  std::vector<Spec> specs;
  for (const std::int64_t dim : {64, 128, 256}) {
    specs.push_back(spec(1, 2, 2, 130, 200, dim));
    specs.back().dropout_p = 0.5;
  }
  load_variants(specs, Passes::both);
  for (Spec s : specs) {
    for (const double p : {0.001, 0.1, 0.5, 0.9}) {
      s.dropout_p = p;
      s.dropout_seed = s.seed;
      Call call = make_call(s);
      run(call);
      // Queries 0: dv is the mean of the rows of dout that kept the key.
      call.q.fill(constant(call.q, 0.0));
      call.dout.fill(constant(call.dout, 1.0));
      const Results results = run(call);
      std::vector<std::uint8_t> keep(4 * 130 * 200);
      dropout_mask({keep.data(), DType::boolean, {1, 4, 130, 200}}, p, s.dropout_seed);
      for (std::size_t j = 0; j < 200; j += 7) {
        double kept = 0.0;
        for (std::size_t h = 0; h < 2; ++h)
          for (std::size_t i = 0; i < 130; ++i) kept += keep[(h * 130 + i) * 200 + j];
        const double expected = kept / 200.0 / (1.0 - p);
        EXPECT_NEAR(dv_of(call, results)(0, j, 0, 0), expected, 2e-2 * expected) << "key " << j << ": " << s.describe();
      }
    }
  }
}

// Options of a call must not be taken for those of another where everything else is the same.
TEST_F(BackwardCases, EachCallHasItsOwnOptions) {
  const ContextScope scope(0);
  const GpuStream stream;
  Spec spec = launch_spec(DType::bfloat16, 200, 64, Causal::none);
  spec.deterministic = true;
  Launch launch(spec, stream, Pass::backward);
  const auto with_scale = [&](double scale) {
    launch.attention().scale = scale;
    return launch.run();
  };
  const std::vector<std::byte> one = with_scale(1.0), half = with_scale(0.5), again = with_scale(1.0);
  EXPECT_FALSE(one == half);
  EXPECT_EQ(bits_that_differ(again, one), "");
}

}  // namespace
}  // namespace headrace::test
