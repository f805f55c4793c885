// Plans: what they report, against a count of every element, and that they forget nothing of a call.
#include "plan/plan.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "headrace/headrace.hpp"
#include "plan/io_model.hpp"
#include "plan/tile_counts.hpp"
#include "support/random.hpp"

namespace headrace {
namespace {

using test::Rng;
using Json = nlohmann::json;

// A call without data but for what planning reads.
struct Described {
  hr_attention a;
  std::vector<std::uint8_t> blocks;
  std::vector<std::vector<std::int32_t>> metadata;

  Described() { hr_attention_init(&a); }
  Described(const Described&) = delete;

  static hr_tensor shaped(hr_dtype dtype, const std::vector<std::int64_t>& shape) {
    return hr_tensor_contiguous(nullptr, dtype, static_cast<int>(shape.size()), shape.data());
  }
  hr_tensor integers(std::vector<std::int32_t> values) {
    metadata.push_back(std::move(values));
    hr_tensor t = shaped(HR_INT32, {static_cast<std::int64_t>(metadata.back().size())});
    t.data = metadata.back().data();
    return t;
  }
  void dense(std::int64_t batch, std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t heads_q,
             std::int64_t heads_kv, std::int64_t dim) {
    a.q = a.out = shaped(HR_FLOAT32, {batch, seqlen_q, heads_q, dim});
    a.k = a.v = shaped(HR_FLOAT32, {batch, seqlen_k, heads_kv, dim});
  }
};

void describe_randomly(Described& d, Rng& rng) {
  const std::int64_t batch = rng.integer(0, 3), heads_kv = rng.integer(1, 2), heads_q = heads_kv * rng.integer(1, 3);
  std::int64_t longest_q = rng.integer(0, 40), longest_k = rng.integer(0, 40);
  if (rng.chance(0.4)) {
    std::vector<std::int32_t> begin_q = {0}, begin_k = {0};
    longest_q = longest_k = 0;
    for (std::int64_t b = 0; b < batch; ++b) {
      begin_q.push_back(begin_q.back() + static_cast<std::int32_t>(rng.integer(0, 30)));
      begin_k.push_back(begin_k.back() + static_cast<std::int32_t>(rng.integer(0, 30)));
      longest_q = std::max<std::int64_t>(longest_q, begin_q.back() - begin_q[begin_q.size() - 2]);
      longest_k = std::max<std::int64_t>(longest_k, begin_k.back() - begin_k[begin_k.size() - 2]);
    }
    d.a.q = d.a.out = Described::shaped(HR_FLOAT32, {begin_q.back() + rng.integer(0, 2), heads_q, 8});
    d.a.k = d.a.v = Described::shaped(HR_FLOAT32, {begin_k.back() + rng.integer(0, 2), heads_kv, 8});
    d.a.cu_seqlens_q = d.integers(begin_q);
    d.a.cu_seqlens_k = d.integers(begin_k);
  } else {
    d.dense(batch, longest_q, longest_k, heads_q, heads_kv, 8);
    if (rng.chance(0.3)) {
      std::vector<std::int32_t> used;
      for (std::int64_t b = 0; b < batch; ++b) used.push_back(static_cast<std::int32_t>(rng.integer(0, longest_k)));
      d.a.seqused_k = d.integers(used);
    }
  }
  d.a.causal = static_cast<std::int32_t>(rng.integer(0, 2));
  if (rng.chance(0.4)) d.a.window_left = rng.integer(-10, 30);
  if (rng.chance(0.4)) d.a.window_right = rng.integer(-10, 30);
  if (rng.chance(0.5)) {
    d.a.block_q = rng.integer(1, 20);
    d.a.block_k = rng.integer(1, 20);
    const std::vector<std::int64_t> shape = {rng.chance(0.5) ? 1 : batch, rng.chance(0.5) ? 1 : heads_q,
                                             ceil_div(longest_q, d.a.block_q), ceil_div(longest_k, d.a.block_k)};
    d.a.block_mask = Described::shaped(HR_BOOL, shape);
    d.blocks.resize(static_cast<std::size_t>(shape[0] * shape[1] * shape[2] * shape[3] + 1));
    const double density = rng.pick({0.2, 0.6, 1.0});
    for (std::uint8_t& bit : d.blocks) bit = rng.chance(density) ? 1 : 0;
    d.a.block_mask.data = d.blocks.data();
  }
}

// By looking at every element.
TileCounts count_elements(const Problem& p, const std::uint8_t* block_mask, Index tile_q, Index tile_k) {
  TileCounts counts;
  Buffers buffers;
  buffers.block_mask = block_mask;
  for (Index b = 0; b < p.batch; ++b) {
    for (Index h = 0; h < p.heads_q; ++h) {
      const Visibility v = visibility(p, buffers, b, h);
      for (Index i0 = 0; i0 < v.seqlen_q; i0 += tile_q) {
        for (Index j0 = 0; j0 < v.seqlen_k; j0 += tile_k) {
          const Index rows = std::min(tile_q, v.seqlen_q - i0), keys = std::min(tile_k, v.seqlen_k - j0);
          Index seen = 0;
          for (Index i = i0; i < i0 + rows; ++i)
            for (Index j = j0; j < j0 + keys; ++j) seen += v.visible(i, j) ? 1 : 0;
          // What is visited is what classify says, tested in tiling_test; here it is counted one by one.
          const TileKind kind = v.classify({i0, i0 + rows}, {j0, j0 + keys});
          counts.total += 1;
          counts.visited += kind == TileKind::hidden ? 0 : 1;
          counts.edge += kind == TileKind::edge ? 1 : 0;
          counts.pairs += static_cast<double>(rows * keys);
          counts.visible_pairs += static_cast<double>(seen);
        }
      }
    }
  }
  return counts;
}

TEST(Explain, CountsMatchEveryElement) {
  Rng rng = test::test_rng();
  for (int n = 0; n < 3000; ++n) {
    Described d;
    describe_randomly(d, rng);
    const Problem p = validate(d.a, Pass::forward);
    const std::uint8_t* blocks = p.has_block_mask ? d.blocks.data() : nullptr;
    const Index tile_q = rng.pick<Index>({1, 3, 8, 16, 64}), tile_k = rng.pick<Index>({1, 5, 8, 32, 1000});
    const TileCounts expected = count_elements(p, blocks, tile_q, tile_k);
    const TileCounts found = count_tiles(p, blocks, tile_q, tile_k, 1 << 30);
    ASSERT_TRUE(found.exact);
    ASSERT_EQ(found.total, expected.total);
    ASSERT_EQ(found.visited, expected.visited);
    ASSERT_EQ(found.edge, expected.edge);
    ASSERT_EQ(found.pairs, expected.pairs);
    ASSERT_EQ(found.visible_pairs, expected.visible_pairs);
  }
}

TEST(Explain, HugeProblemsAreExtrapolatedInBoundedTime) {
  // Half of 2^39 x 2^39 pairs; walking the rows of tiles one by one would take minutes.
  constexpr std::int64_t length = std::int64_t{1} << 39;
  Described d;
  d.dense(1, length, length, 2, 1, 1);
  d.a.causal = HR_CAUSAL_BOTTOM_RIGHT;
  const Problem p = validate(d.a, Pass::forward);
  const TileCounts counts = count_tiles(p, nullptr, 64, 256);
  EXPECT_FALSE(counts.exact);
  const double all = std::ldexp(2.0, 78);
  EXPECT_NEAR(counts.visible_pairs / all, 0.5, 1e-9);
  EXPECT_NEAR(counts.visited / counts.total, 0.5, 1e-3);
  // A sample agrees with the whole where both can be had.
  Described small;
  small.dense(1, 100000, 100000, 1, 1, 1);
  small.a.window_left = 5000;
  const Problem q = validate(small.a, Pass::forward);
  const TileCounts exact = count_tiles(q, nullptr, 64, 256), sample = count_tiles(q, nullptr, 64, 256, 100);
  EXPECT_TRUE(exact.exact);
  EXPECT_FALSE(sample.exact);
  EXPECT_NEAR(sample.visited / exact.visited, 1, 0.01);
  EXPECT_NEAR(sample.edge / exact.edge, 1, 0.05);
}

TEST(Explain, ABlockMaskWithoutDataCountsAsSet) {
  Described d;
  d.dense(1, 100, 100, 1, 1, 8);
  d.a.block_q = d.a.block_k = 10;
  d.a.block_mask = Described::shaped(HR_BOOL, {1, 1, 10, 10});
  d.a.backend = HR_BACKEND_REFERENCE;
  hr_plan* plan = nullptr;
  ASSERT_EQ(hr_plan_create(&d.a, HR_FORWARD, &plan), HR_OK) << hr_last_error();
  const Json json = Json::parse(hr_plan_explain_json(plan));
  EXPECT_EQ(json["visible_pairs"], 10000);
  EXPECT_EQ(json["tiles_exact"], false);
  EXPECT_NE(json["notes"][0].get<std::string>().find("block_mask"), std::string::npos);
  hr_plan_destroy(plan);
}

TEST(Explain, JsonAndTextHoldTheWholeReport) {
  Described d;
  d.dense(2, 100, 300, 4, 2, 16);
  d.a.causal = HR_CAUSAL_BOTTOM_RIGHT;
  d.a.window_left = 50;
  d.a.softcap = 30;
  for (const hr_backend backend : {HR_BACKEND_AUTO, HR_BACKEND_REFERENCE}) {
    d.a.backend = backend;
    for (const hr_pass pass : {HR_FORWARD, HR_BACKWARD}) {
      if (pass == HR_BACKWARD) {
        d.a.lse = Described::shaped(HR_FLOAT32, {2, 4, 100});
        d.a.dout = d.a.dq = d.a.q;
        d.a.dk = d.a.dv = d.a.k;
      }
      hr_plan* plan = nullptr;
      ASSERT_EQ(hr_plan_create(&d.a, pass, &plan), HR_OK) << hr_last_error();
      const Json json = Json::parse(hr_plan_explain_json(plan));
      for (const char* key : {"kernel",          "backend",        "pass",        "dtype",           "batch",
                              "heads_q",         "heads_kv",       "head_dim",    "value_dim",       "seqlen_q",
                              "seqlen_k",        "options",        "tile_q",      "tile_k",          "tiles_total",
                              "tiles_visited",   "tiles_edge",     "tiles_exact", "visible_pairs",   "flops",
                              "bytes_streaming", "bytes_standard", "intensity",   "workspace_bytes", "fast_bytes",
                              "splits",          "tasks",          "threads",     "limit",           "notes"})
        EXPECT_TRUE(json.contains(key)) << key;
      EXPECT_EQ(json["backend"], backend == HR_BACKEND_REFERENCE ? "reference" : "cpu");
      EXPECT_EQ(json["pass"], pass == HR_FORWARD ? "forward" : "backward");
      EXPECT_EQ(json["dtype"], "float32");
      EXPECT_EQ(json["seqlen_k"], 300);
      // 51 keys a row, in 8 sequences of heads.
      EXPECT_EQ(json["visible_pairs"], 8 * 100 * 51);
      EXPECT_EQ(json["flops"], 8 * 100 * 51 * (pass == HR_FORWARD ? 4 * 16 : 10 * 16));
      EXPECT_EQ(json["workspace_bytes"], hr_plan_workspace_bytes(plan));
      EXPECT_EQ(json["options"], (Json{"causal bottom-right", "window (50, unbounded)", "softcap 30"}));
      const std::string text = hr_plan_explain(plan);
      for (const std::string& part : {json["kernel"].get<std::string>(), std::string("window (50, unbounded)"),
                                      std::string("visible pairs"), std::string("standard attention")})
        EXPECT_NE(text.find(part), std::string::npos) << part << " in:\n" << text;
      hr_plan_destroy(plan);
    }
  }
}

TEST(Explain, TrafficFollowsTheFormulas) {
  Described d;
  d.dense(1, 4096, 4096, 1, 1, 64);
  const Problem p = validate(d.a, Pass::forward);
  const IoModel model = io_model(p, count_tiles(p, nullptr, 64, 256), 64, 256, 1);
  constexpr double n = 4096, dim = 64;
  EXPECT_EQ(model.flops, 4 * n * n * dim);
  EXPECT_EQ(model.bytes_streaming, 2 * n * dim * 4 + n / 64 * n * 2 * dim * 4);
  EXPECT_EQ(model.bytes_standard, 4 * n * dim * 4 + 4 * n * n * 4);
  // Nothing to do is no traffic and no division by zero.
  Described none;
  none.dense(0, 10, 10, 1, 1, 8);
  const Problem empty = validate(none.a, Pass::forward);
  const IoModel nothing = io_model(empty, count_tiles(empty, nullptr, 64, 256), 64, 256, 1);
  EXPECT_EQ(nothing.flops, 0);
  EXPECT_EQ(nothing.bytes_standard, 0);
  EXPECT_EQ(nothing.intensity(), 0);
}

TEST(Info, IsJson) {
  const Json json = Json::parse(hr_info());
  EXPECT_EQ(json["version"], hr_version());
  EXPECT_TRUE(json["simd"].contains("chosen") && json["simd"]["available"].is_array());
  EXPECT_GE(json["threads"].get<int>(), 1);
  EXPECT_GE(json["openmp"].get<int>(), 201107);
  EXPECT_TRUE(json["gpu"]["driver_found"].is_boolean() && json["gpu"]["devices"].is_array());
}

// ---- plans remember the whole call ----

// Two calls with the same shapes and one option apart must not share anything: a cache of plans that is keyed by shape
// alone returned the first one's results.
TEST(Plans, EveryOptionIsPartOfThePlan) {
  constexpr std::int64_t seqlen = 9, dim = 4;
  std::vector<double> q(seqlen * dim), k(q.size()), v(q.size());
  Rng rng = test::test_rng();
  for (std::vector<double>* values : {&q, &k, &v})
    for (double& x : *values) x = rng.normal();
  std::vector<double> bias(seqlen * seqlen, 0.5);
  bias[3] = -2;
  std::vector<float> slopes = {0.3f}, sinks = {0.7f};
  std::vector<std::uint8_t> mask(seqlen * seqlen, 1), blocks = {1, 0, 1, 0, 1, 1, 1, 1, 1};
  mask[5] = 0;
  std::vector<double> out_double(q.size());
  const auto run = [&](const std::function<void(Attention&)>& change) {
    std::vector<double> out(q.size(), std::nan(""));
    Attention a;
    a.q = {q.data(), {1, seqlen, 1, dim}};
    a.k = {k.data(), {1, seqlen, 1, dim}};
    a.v = {v.data(), {1, seqlen, 1, dim}};
    a.out = {out.data(), {1, seqlen, 1, dim}};
    change(a);
    forward(a);
    return out;
  };
  const std::vector<std::function<void(Attention&)>> options = {
      [](Attention& a) { a.scale = 1; },
      [](Attention& a) { a.scale = 0.25; },
      [](Attention& a) { a.softcap = 1; },
      [](Attention& a) { a.softcap = 2; },
      [](Attention& a) { a.causal = Causal::bottom_right; },
      [](Attention& a) { a.window_left = 2; },
      [](Attention& a) { a.window_right = 1; },
      [](Attention& a) { a.dropout_p = 0.5; },
      [](Attention& a) { a.dropout_p = 0.5, a.seed = 1; },
      [&](Attention& a) {
        a.bias = {bias.data(), {1, 1, seqlen, seqlen}};
      },
      [&](Attention& a) {
        a.alibi_slopes = {slopes.data(), {1}};
      },
      [&](Attention& a) {
        a.sinks = {sinks.data(), {1}};
      },
      [&](Attention& a) {
        a.mask = {mask.data(), DType::boolean, {1, 1, seqlen, seqlen}};
      },
      [&](Attention& a) {
        a.block_mask = {blocks.data(), DType::boolean, {1, 1, 3, 3}}, a.block_q = a.block_k = 3;
      },
  };
  for (const Backend backend : {Backend::automatic, Backend::reference}) {
    const std::vector<double> plain = run([&](Attention& a) { a.backend = backend; });
    std::vector<std::vector<double>> results = {plain};
    for (const auto& option : options) {
      const std::vector<double> result = run([&](Attention& a) { option(a), a.backend = backend; });
      for (const auto& other : results) EXPECT_NE(result, other) << "option " << results.size() - 1;
      results.push_back(result);
      EXPECT_EQ(run([&](Attention& a) { a.backend = backend; }), plain) << "after option " << results.size() - 2;
    }
  }
}

TEST(Plans, HoldTheirMetadata) {
  // cu_seqlens is read when planning; the caller may reuse its memory.
  std::vector<std::int32_t> begins = {0, 2, 5};
  std::vector<float> q(5 * 4, 0.0f), v(q.size()), out(q.size());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 4);
  Attention a;
  a.q = a.k = {q.data(), {5, 1, 4}};
  a.v = {v.data(), {5, 1, 4}};
  a.out = {out.data(), {5, 1, 4}};
  a.cu_seqlens_q = a.cu_seqlens_k = {begins.data(), {3}};
  a.backend = Backend::reference;
  const Plan plan(a, headrace::Pass::forward);
  begins = {77, -1, 1000};
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> workspace(plan.workspace_bytes() / 64 + 1);
  plan.execute(a, {workspace[0].bytes, workspace.size() * 64});
  EXPECT_FLOAT_EQ(out[0], 0.5f);   // the mean of tokens 0 and 1
  EXPECT_FLOAT_EQ(out[4 * 4], 3);  // of 2, 3, 4
}

}  // namespace
}  // namespace headrace
