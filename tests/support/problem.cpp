#include "support/problem.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

namespace headrace::test {
namespace {

std::int64_t longest(const std::vector<std::int64_t>& lengths) {
  return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
}

std::int64_t random_dim(Rng& rng) {
  if (rng.chance(0.3)) return rng.pick<std::int64_t>({32, 64, 128});
  if (rng.chance(0.6)) return rng.integer(1, 48);
  if (rng.chance(0.5))
    return rng.pick<std::int64_t>({63, 65, 72, 80, 96, 127, 129, 160, 192, 255, 256, 257, 384, 511, 512});
  return rng.integer(1, 512);
}

std::int64_t random_length(Rng& rng) {
  if (rng.chance(0.04)) return 0;
  if (rng.chance(0.1)) return 1;
  if (rng.chance(0.7)) return rng.integer(2, 40);
  return rng.integer(41, 150);
}

std::optional<std::int64_t> random_bound(Rng& rng) {
  if (rng.chance(0.35)) return std::nullopt;
  if (rng.chance(0.75)) return rng.integer(-6, 20);
  return rng.pick<std::int64_t>({std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::min() + 1,
                                 std::numeric_limits<std::int64_t>::max() - 1, -(std::int64_t{1} << 40),
                                 std::int64_t{1} << 40, std::int64_t{1} << 31, -(std::int64_t{1} << 31), 0, -150, 150});
}

Layout random_layout(Rng& rng, bool input) {
  if (rng.chance(0.35)) return Layout::contiguous;
  if (!input) return rng.pick({Layout::transposed, Layout::permuted, Layout::padded});
  return rng.pick({Layout::transposed, Layout::permuted, Layout::padded, Layout::reversed, Layout::expanded});
}

PairSpec random_pairs(Rng& rng) {
  PairSpec pairs;
  pairs.present = true;
  for (bool& full : pairs.full) full = rng.chance(0.6);
  pairs.layout = random_layout(rng, true);
  pairs.of_input_dtype = rng.chance(0.5);
  pairs.hidden = rng.pick({0.0, 0.2, 0.6, 0.95});
  pairs.hide_rows = rng.chance(0.3);
  pairs.hide_batch = rng.chance(0.15);
  return pairs;
}

// The options that do not change how much there is to compute.
void draw_options(Rng& rng, Spec& spec) {
  spec.seed = rng.bits();
  spec.dtype = rng.pick({DType::float32, DType::float32, DType::float16, DType::bfloat16, DType::float64});
  spec.lse_float64 = spec.dtype == DType::float64 && rng.chance(0.7);
  spec.causal = rng.pick({Causal::none, Causal::none, Causal::bottom_right, Causal::top_left});
  if (rng.chance(0.35)) {
    spec.window_left = random_bound(rng);
    spec.window_right = random_bound(rng);
  }
  if (rng.chance(0.3)) spec.scale = rng.pick({0.0, 1.0, -0.25, 0.5, -1.0, 1e-3});
  if (rng.chance(0.2)) spec.softcap = rng.pick({0.5, 1.0, 15.0, 50.0});
  if (rng.chance(0.2)) spec.dropout_p = rng.pick({0.001, 0.1, 0.5, 0.9});
  spec.dropout_seed = rng.bits();
  if (rng.chance(0.3)) spec.bias = random_pairs(rng);
  if (rng.chance(0.25)) spec.mask = random_pairs(rng);
  if (rng.chance(0.2)) {
    spec.blocks.present = true;
    spec.blocks.full = {rng.chance(0.5), rng.chance(0.5)};
    spec.blocks.layout = random_layout(rng, true);
    spec.blocks.block_q = rng.pick<std::int64_t>({1, 3, 7, 16, 17, 64, 128, 1000});
    spec.blocks.block_k = rng.pick<std::int64_t>({1, 3, 5, 16, 31, 64, 128, 1000});
    spec.blocks.hidden = rng.pick({0.3, 0.7, 1.0});
  }
  if (rng.chance(0.2)) spec.alibi = rng.pick({Alibi::heads, Alibi::batch_heads});
  if (rng.chance(0.2)) spec.sinks = rng.pick({Sinks::normal, Sinks::large, Sinks::some_absent});
  spec.want_lse = rng.chance(0.7);
  spec.dlse = rng.chance(0.4);
  spec.dbias = spec.bias.present && rng.chance(0.7);
  spec.dsinks = spec.sinks != Sinks::none && rng.chance(0.7);
  spec.deterministic = rng.chance(0.3);
  spec.batch_invariant = rng.chance(0.2);
  spec.through_plan = rng.chance(0.5);
  spec.threads = rng.pick({1, 1, 2, 3, 4});
  if (rng.chance(0.35))
    spec.inputs = rng.pick({Inputs::large_logits, Inputs::one_key, Inputs::offset, Inputs::equal, Inputs::tiny});
  spec.q_layout = random_layout(rng, true);
  spec.k_layout = random_layout(rng, true);
  spec.v_layout = random_layout(rng, true);
  spec.dout_layout = random_layout(rng, true);
  spec.out_layout = random_layout(rng, false);
  spec.lse_layout = random_layout(rng, false);
  spec.gradient_layout = random_layout(rng, false);
  spec.packed_qkv = rng.chance(0.1);
}

void draw_used(Rng& rng, const std::vector<std::int64_t>& lengths, std::vector<std::int64_t>& used) {
  used.clear();
  for (const std::int64_t length : lengths)
    used.push_back(rng.chance(0.15) ? 0 : rng.chance(0.2) ? length : rng.integer(0, length));
}

// Ragged lengths and seqused, from lengths of `draw`.
template <typename Draw>
void draw_lengths(Rng& rng, Spec& spec, Draw&& draw) {
  spec.seqlen_q = draw();
  spec.seqlen_k = rng.chance(0.5) ? spec.seqlen_q : draw();
  spec.ragged = rng.chance(0.3);
  if (spec.ragged) {
    for (std::int64_t b = 0; b < spec.batch; ++b) {
      spec.lengths_q.push_back(draw());
      spec.lengths_k.push_back(rng.chance(0.4) ? spec.lengths_q.back() : draw());
    }
    if (rng.chance(0.4)) spec.slack_q = rng.integer(0, 9);
    if (rng.chance(0.4)) spec.slack_k = rng.integer(0, 9);
  }
}

void draw_seqused(Rng& rng, Spec& spec) {
  const auto batch = static_cast<std::size_t>(spec.batch);
  const std::vector<std::int64_t> all_q(batch, spec.seqlen_q), all_k(batch, spec.seqlen_k);
  if (spec.batch == 0) return;
  if (rng.chance(0.12)) draw_used(rng, spec.ragged ? spec.lengths_q : all_q, spec.used_q);
  if (rng.chance(0.2)) draw_used(rng, spec.ragged ? spec.lengths_k : all_k, spec.used_k);
}

void shrink_to(Spec& spec, double max_cost) {
  const auto halve = [](std::int64_t& x) { x = (x + 1) / 2; };
  const auto halve_q = [&] {
    halve(spec.seqlen_q);
    for (std::int64_t& x : spec.lengths_q) halve(x);
  };
  const auto halve_k = [&] {
    halve(spec.seqlen_k);
    for (std::int64_t& x : spec.lengths_k) halve(x);
  };
  while (spec.cost() > max_cost) {
    if (spec.heads_q() > 4) {
      std::int64_t& larger = spec.group > spec.heads_kv ? spec.group : spec.heads_kv;
      halve(larger);
    } else if (spec.head_dim + spec.value_dim > 2 * spec.longest_k()) {
      halve(spec.head_dim);
      halve(spec.value_dim);
    } else if (spec.longest_q() > spec.longest_k()) {
      halve_q();
    } else {
      halve_k();
    }
  }
}

std::vector<double> normals(Rng& rng, std::int64_t n, double factor = 1.0) {
  std::vector<double> values(static_cast<std::size_t>(n));
  for (double& x : values) x = factor * rng.normal();
  return values;
}

void fill_inputs(Call& call, Rng& rng) {
  const Spec& spec = call.spec;
  std::vector<double> q = normals(rng, call.q.size()), k = normals(rng, call.k.size());
  std::vector<double> v = normals(rng, call.v.size()), dout = normals(rng, call.dout.size());
  const auto d = static_cast<std::size_t>(spec.head_dim);
  const auto times = [](std::vector<double>& values, double factor) {
    for (double& x : values) x *= factor;
  };
  switch (spec.inputs) {
    case Inputs::normal:
      break;
    case Inputs::large_logits:
      times(q, 10.0);
      times(k, 10.0);
      break;
    case Inputs::one_key: {
      // Queries share a direction, and one vector of keys in about twenty points far along it.
      for (double& x : q) x += 1.5;
      for (std::size_t row = 0; row < k.size() / d; ++row) {
        if (!rng.chance(0.05)) continue;
        for (std::size_t c = 0; c < d; ++c) k[row * d + c] += 8.0;
      }
      break;
    }
    case Inputs::offset:
      for (std::size_t at = 0; at < q.size(); at += d) q[at] = 4.0;
      for (std::size_t at = 0; at < k.size(); at += d) k[at] = 2500.0 * std::sqrt(static_cast<double>(d));
      for (double& x : v) x += 100.0;
      break;
    case Inputs::equal:
      std::fill(q.begin(), q.end(), 0.7);
      std::fill(k.begin(), k.end(), 0.3);
      std::fill(v.begin(), v.end(), -1.1);
      break;
    case Inputs::tiny: {
      const double factor = spec.dtype == DType::float16 ? 1e-4 : 1e-8;
      for (std::vector<double>* values : {&q, &k, &v, &dout}) times(*values, factor);
      break;
    }
  }
  call.q.fill(q);
  call.k.fill(k);
  call.v.fill(v);
  call.dout.fill(dout);
}

Shape pair_shape(const Spec& spec, const PairSpec& pairs, Rng& rng) {
  // Ragged: the full dimensions of queries and keys may be longer than the longest sequence.
  const std::int64_t extra_q = spec.ragged ? rng.integer(0, 3) : 0, extra_k = spec.ragged ? rng.integer(0, 3) : 0;
  return {pairs.full[0] ? spec.batch : 1, pairs.full[1] ? spec.heads_q() : 1,
          pairs.full[2] ? spec.longest_q() + extra_q : 1, pairs.full[3] ? spec.longest_k() + extra_k : 1};
}

// true where a pair of the tensor of this shape is to be hidden.
std::vector<bool> hidden_pairs(const PairSpec& pairs, const Shape& shape, Rng& rng) {
  std::vector<bool> hidden;
  for (std::int64_t b = 0; b < shape[0]; ++b)
    for (std::int64_t h = 0; h < shape[1]; ++h)
      for (std::int64_t i = 0; i < shape[2]; ++i) {
        const bool whole_row = (pairs.hide_rows && rng.chance(0.2)) || (pairs.hide_batch && b == 0);
        for (std::int64_t j = 0; j < shape[3]; ++j) hidden.push_back(whole_row || rng.chance(pairs.hidden));
      }
  return hidden;
}

Array int_array(const std::vector<std::int64_t>& values) {
  Array array(DType::int32, {static_cast<std::int64_t>(values.size())});
  array.fill({values.begin(), values.end()});
  return array;
}

std::vector<std::int64_t> cumulated(const std::vector<std::int64_t>& lengths) {
  std::vector<std::int64_t> result{0};
  for (const std::int64_t length : lengths) result.push_back(result.back() + length);
  return result;
}

}  // namespace

const char* name_of(Inputs inputs) {
  switch (inputs) {
    case Inputs::normal:
      return "normal";
    case Inputs::large_logits:
      return "large_logits";
    case Inputs::one_key:
      return "one_key";
    case Inputs::offset:
      return "offset";
    case Inputs::equal:
      return "equal";
    case Inputs::tiny:
      return "tiny";
  }
  return "?";
}

std::int64_t Spec::longest_q() const { return ragged ? longest(lengths_q) : seqlen_q; }
std::int64_t Spec::longest_k() const { return ragged ? longest(lengths_k) : seqlen_k; }

double Spec::cost() const {
  double pairs = 0.0;
  if (ragged) {
    for (std::size_t b = 0; b < lengths_q.size(); ++b)
      pairs += static_cast<double>(lengths_q[b]) * static_cast<double>(lengths_k[b]);
  } else {
    pairs = static_cast<double>(batch * seqlen_q) * static_cast<double>(seqlen_k);
  }
  return pairs * static_cast<double>(heads_q() * (head_dim + value_dim));
}

std::string Spec::describe() const {
  std::ostringstream s;
  const auto list = [](const std::vector<std::int64_t>& values) {
    std::ostringstream text;
    text << '[';
    for (const std::int64_t& value : values) text << (&value == values.data() ? "" : ",") << value;
    text << ']';
    return text.str();
  };
  const auto pairs = [&](const char* name, const PairSpec& p) {
    if (!p.present) return;
    s << ' ' << name << '[' << (p.full[0] ? 'b' : '1') << (p.full[1] ? 'h' : '1') << (p.full[2] ? 'q' : '1')
      << (p.full[3] ? 'k' : '1') << ' ' << name_of(p.layout) << (p.of_input_dtype ? " T" : " f32") << " hidden "
      << p.hidden << (p.hide_rows ? " +rows" : "") << (p.hide_batch ? " +batch0" : "") << ']';
  };
  s << name_of(dtype) << (lse_float64 ? " lse64" : "") << " batch=" << batch << " heads=" << heads_q() << '/'
    << heads_kv << " d=" << head_dim << " dv=" << value_dim;
  if (ragged) {
    s << " ragged q=" << list(lengths_q) << " k=" << list(lengths_k);
    if (slack_q != 0 || slack_k != 0) s << " slack=" << slack_q << ',' << slack_k;
  } else {
    s << " seqlen=" << seqlen_q << ',' << seqlen_k;
  }
  if (!used_q.empty()) s << " used_q=" << list(used_q);
  if (!used_k.empty()) s << " used_k=" << list(used_k);
  if (causal == Causal::bottom_right) s << " causal";
  if (causal == Causal::top_left) s << " causal_top_left";
  if (window_left) s << " window_left=" << *window_left;
  if (window_right) s << " window_right=" << *window_right;
  if (scale) s << " scale=" << *scale;
  if (softcap != 0.0) s << " softcap=" << softcap;
  if (dropout_p != 0.0) s << " dropout=" << dropout_p << '@' << dropout_seed;
  pairs("bias", bias);
  pairs("mask", mask);
  if (blocks.present)
    s << " blocks[" << blocks.block_q << 'x' << blocks.block_k << ' ' << (blocks.full[0] ? 'b' : '1')
      << (blocks.full[1] ? 'h' : '1') << ' ' << name_of(blocks.layout) << " hidden " << blocks.hidden << ']';
  if (alibi != Alibi::none) s << (alibi == Alibi::heads ? " alibi[h]" : " alibi[b,h]");
  if (sinks != Sinks::none)
    s << " sinks=" << (sinks == Sinks::normal ? "normal" : sinks == Sinks::large ? "large" : "some_absent");
  if (!want_lse) s << " no_lse";
  if (dlse) s << " dlse";
  if (dbias) s << " dbias";
  if (dsinks) s << " dsinks";
  if (deterministic) s << " deterministic";
  if (batch_invariant) s << " batch_invariant";
  if (through_plan) s << " plan";
  if (multiprocessors != 0) s << " for " << multiprocessors << " multiprocessors";
  s << " threads=" << threads << " inputs=" << name_of(inputs);
  const auto layout = [&](const char* name, Layout value) {
    if (value != Layout::contiguous) s << ' ' << name << ':' << name_of(value);
  };
  layout("q", q_layout);
  layout("k", k_layout);
  layout("v", v_layout);
  layout("dout", dout_layout);
  layout("out", out_layout);
  layout("lse", lse_layout);
  layout("grads", gradient_layout);
  if (packed_qkv) s << " packed_qkv";
  s << " seed=" << seed;
  return s.str();
}

Spec random_spec(Rng& rng, double max_cost) {
  Spec spec;
  draw_options(rng, spec);
  spec.batch = rng.chance(0.03) ? 0 : rng.integer(1, 3);
  spec.heads_kv = rng.chance(0.02) ? 0 : rng.integer(1, 3);
  spec.group = rng.chance(0.5) ? 1 : rng.integer(2, 8);
  spec.head_dim = random_dim(rng);
  spec.value_dim = rng.chance(0.6) ? spec.head_dim : random_dim(rng);
  if (rng.chance(0.15)) {
    // Around the borders of tiles; thin enough to be allowed such lengths.
    spec.batch = spec.heads_kv = 1;
    spec.group = rng.pick<std::int64_t>({1, 1, 2});
    spec.head_dim = rng.integer(1, 12);
    spec.value_dim = rng.integer(1, 12);
    draw_lengths(rng, spec, [&] { return 64 * rng.pick<std::int64_t>({1, 2, 3, 4, 8}) + rng.integer(-2, 2); });
  } else {
    draw_lengths(rng, spec, [&] { return random_length(rng); });
  }
  shrink_to(spec, max_cost);
  draw_seqused(rng, spec);
  return spec;
}

Spec random_large_spec(Rng& rng, double max_cost) {
  Spec spec;
  draw_options(rng, spec);
  spec.head_dim = rng.pick<std::int64_t>({8, 16, 24, 32, 64, 64, 128, 65});
  spec.value_dim = rng.chance(0.7) ? spec.head_dim : rng.pick<std::int64_t>({8, 33, 64, 128});
  switch (rng.integer(0, 3)) {
    case 0:  // long and square
      draw_lengths(rng, spec, [&] { return rng.integer(300, 1200); });
      break;
    case 1:  // few queries over long keys: the keys of a row are split
      spec.group = rng.integer(1, 4);
      spec.seqlen_q = rng.integer(1, 9);
      spec.seqlen_k = rng.integer(1000, 12000);
      break;
    case 2:  // many heads
      spec.batch = rng.integer(2, 5);
      spec.heads_kv = rng.integer(3, 8);
      spec.group = rng.integer(1, 4);
      draw_lengths(rng, spec, [&] { return rng.integer(40, 260); });
      break;
    default:  // long queries over few keys
      spec.heads_kv = rng.integer(1, 2);
      spec.seqlen_q = rng.integer(500, 4000);
      spec.seqlen_k = rng.integer(1, 150);
      break;
  }
  shrink_to(spec, max_cost);
  draw_seqused(rng, spec);
  return spec;
}

Call make_call(const Spec& spec) {
  Rng rng(spec.seed);
  Call call;
  call.spec = spec;
  const auto total = [](const std::vector<std::int64_t>& lengths, std::int64_t slack) {
    return std::accumulate(lengths.begin(), lengths.end(), slack);
  };
  const std::int64_t heads = spec.heads_q();
  const Shape outer_q = spec.ragged ? Shape{total(spec.lengths_q, spec.slack_q)} : Shape{spec.batch, spec.seqlen_q};
  const Shape outer_k = spec.ragged ? Shape{total(spec.lengths_k, spec.slack_k)} : Shape{spec.batch, spec.seqlen_k};
  const auto vectors = [&](const Shape& outer, std::int64_t h, std::int64_t dim, Layout layout) {
    Shape shape = outer;
    shape.push_back(h);
    shape.push_back(dim);
    return Array(spec.dtype, shape, layout, Elements::vectors, rng);
  };
  if (spec.packed_qkv && spec.head_dim == spec.value_dim && outer_q == outer_k) {
    const std::vector<std::int64_t> split{heads, spec.heads_kv, spec.heads_kv};
    const std::vector<Array> inputs = Array::interleaved(spec.dtype, outer_q, split, spec.head_dim, rng);
    const std::vector<Array> gradients = Array::interleaved(spec.dtype, outer_q, split, spec.head_dim, rng);
    call.q = inputs[0], call.k = inputs[1], call.v = inputs[2];
    call.dq = gradients[0], call.dk = gradients[1], call.dv = gradients[2];
  } else {
    call.q = vectors(outer_q, heads, spec.head_dim, spec.q_layout);
    call.k = vectors(outer_k, spec.heads_kv, spec.head_dim, spec.k_layout);
    call.v = vectors(outer_k, spec.heads_kv, spec.value_dim, spec.v_layout);
    call.dq = vectors(outer_q, heads, spec.head_dim, spec.gradient_layout);
    call.dk = vectors(outer_k, spec.heads_kv, spec.head_dim, spec.gradient_layout);
    call.dv = vectors(outer_k, spec.heads_kv, spec.value_dim, spec.gradient_layout);
  }
  call.out = vectors(outer_q, heads, spec.value_dim, spec.out_layout);
  call.dout = vectors(outer_q, heads, spec.value_dim, spec.dout_layout);
  fill_inputs(call, rng);

  const DType lse_dtype = spec.lse_float64 ? DType::float64 : DType::float32;
  const Shape lse_shape = spec.ragged ? Shape{heads, outer_q[0]} : Shape{spec.batch, heads, spec.seqlen_q};
  call.lse = Array(lse_dtype, lse_shape, spec.lse_layout, Elements::scalars, rng);
  if (spec.dlse) {
    call.dlse = Array(lse_dtype, lse_shape, spec.lse_layout, Elements::scalars, rng);
    call.dlse.fill(normals(rng, call.dlse.size()));
  }

  if (spec.bias.present) {
    const Shape shape = pair_shape(spec, spec.bias, rng);
    const DType dtype = spec.bias.of_input_dtype ? spec.dtype : DType::float32;
    call.bias = Array(dtype, shape, spec.bias.layout, Elements::scalars, rng);
    std::vector<double> values = normals(rng, call.bias.size(), rng.pick({1.0, 10.0}));
    const std::vector<bool> hidden = hidden_pairs(spec.bias, shape, rng);
    for (std::size_t at = 0; at < values.size(); ++at)
      if (hidden[at]) values[at] = -infinity;
    call.bias.fill(values);
    if (spec.dbias) call.dbias = Array(dtype, shape, spec.gradient_layout, Elements::scalars, rng);
  }
  if (spec.mask.present) {
    const Shape shape = pair_shape(spec, spec.mask, rng);
    call.mask = Array(DType::boolean, shape, spec.mask.layout, Elements::scalars, rng);
    std::vector<double> values;
    for (const bool hidden : hidden_pairs(spec.mask, shape, rng)) values.push_back(hidden ? 0.0 : 1.0);
    call.mask.fill(values);
  }
  if (spec.blocks.present) {
    const auto blocks = [](std::int64_t n, std::int64_t size) { return (n + size - 1) / size; };
    const Shape shape{spec.blocks.full[0] ? spec.batch : 1, spec.blocks.full[1] ? heads : 1,
                      blocks(spec.longest_q(), spec.blocks.block_q), blocks(spec.longest_k(), spec.blocks.block_k)};
    call.block_mask = Array(DType::boolean, shape, spec.blocks.layout, Elements::scalars, rng);
    std::vector<double> values;
    for (std::int64_t row = 0; row < shape[0] * shape[1] * shape[2]; ++row) {
      const bool empty_row = rng.chance(0.2);
      for (std::int64_t j = 0; j < shape[3]; ++j)
        values.push_back(empty_row || rng.chance(spec.blocks.hidden) ? 0.0 : 1.0);
    }
    call.block_mask.fill(values);
  }
  if (spec.alibi != Alibi::none) {
    const Shape shape = spec.alibi == Alibi::heads ? Shape{heads} : Shape{spec.batch, heads};
    call.alibi_slopes = Array(DType::float32, shape, rng.pick({Layout::contiguous, Layout::padded, Layout::reversed}),
                              Elements::scalars, rng);
    std::vector<double> values(static_cast<std::size_t>(call.alibi_slopes.size()));
    for (double& x : values) x = rng.chance(0.1) ? 0.0 : std::exp2(-8.0 * rng.uniform());
    call.alibi_slopes.fill(values);
  }
  if (spec.sinks != Sinks::none) {
    call.sinks = Array(DType::float32, {heads}, rng.pick({Layout::contiguous, Layout::padded}), Elements::scalars, rng);
    std::vector<double> values = normals(rng, heads);
    for (double& x : values) {
      if (spec.sinks == Sinks::large) x = rng.pick({-5.0, 5.0, 90.0, 1e4, -1e4});
      if (spec.sinks == Sinks::some_absent && rng.chance(0.5)) x = -infinity;
    }
    call.sinks.fill(values);
    if (spec.dsinks)
      call.dsinks =
          Array(DType::float32, {heads}, rng.pick({Layout::contiguous, Layout::padded}), Elements::scalars, rng);
  }
  if (spec.ragged) {
    call.cu_seqlens_q = int_array(cumulated(spec.lengths_q));
    call.cu_seqlens_k = int_array(cumulated(spec.lengths_k));
  }
  if (!spec.used_q.empty()) call.seqused_q = int_array(spec.used_q);
  if (!spec.used_k.empty()) call.seqused_k = int_array(spec.used_k);

  // What the pass is to write starts as garbage, a NaN more often than not.
  for (Array* output : {&call.out, &call.lse, &call.dq, &call.dk, &call.dv, &call.dbias, &call.dsinks})
    if (output->present()) output->poison(rng.pick<std::uint8_t>({0xFF, 0xFF, 0xCB}));
  return call;
}

Call in_float64(const Call& call) {
  Call wide = call;
  const auto widen = [](const Array& from) {
    if (!from.present()) return Array();
    Array to(DType::float64, from.shape());
    to.fill(from.values());
    return to;
  };
  const auto widened = {&Call::q,  &Call::k,    &Call::v,    &Call::out, &Call::lse, &Call::bias,
                        &Call::dq, &Call::dout, &Call::dlse, &Call::dk,  &Call::dv,  &Call::dbias};
  for (Array Call::*member : widened) wide.*member = widen(call.*member);
  for (Array* output : {&wide.out, &wide.lse, &wide.dq, &wide.dk, &wide.dv, &wide.dbias})
    if (output->present()) output->poison(0xFF);
  if (call.dsinks.present()) {
    wide.dsinks = Array(DType::float32, call.dsinks.shape());
    wide.dsinks.poison(0xFF);
  }
  return wide;
}

Attention Call::attention(Backend backend) const {
  Attention a;
  a.q = q.view(), a.k = k.view(), a.v = v.view(), a.out = out.view(), a.lse = lse.view();
  a.bias = bias.view(), a.mask = mask.view(), a.alibi_slopes = alibi_slopes.view(), a.sinks = sinks.view();
  if (block_mask.present())
    a.block_mask = block_mask.view(), a.block_q = spec.blocks.block_q, a.block_k = spec.blocks.block_k;
  a.cu_seqlens_q = cu_seqlens_q.view(), a.cu_seqlens_k = cu_seqlens_k.view();
  a.seqused_q = seqused_q.view(), a.seqused_k = seqused_k.view();
  a.dout = dout.view(), a.dlse = dlse.view(), a.dq = dq.view(), a.dk = dk.view(), a.dv = dv.view();
  a.dbias = dbias.view(), a.dsinks = dsinks.view();
  a.causal = spec.causal, a.scale = spec.scale;
  a.window_left = spec.window_left, a.window_right = spec.window_right;
  a.softcap = spec.softcap, a.dropout_p = spec.dropout_p, a.seed = spec.dropout_seed;
  a.deterministic = spec.deterministic, a.batch_invariant = spec.batch_invariant;
  a.threads = spec.threads, a.backend = backend;
  return a;
}

}  // namespace headrace::test
