#include "rounded_attention.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "describe/element.hpp"

namespace headrace::tool {
namespace {

// One head as float32 rows.
using Rows = std::vector<std::vector<float>>;

class Heads {
 public:
  explicit Heads(const Array& like) : batch_(like.shape[0]), seqlen_(like.shape[1]), heads_(like.shape[2]) {}

  [[nodiscard]] Rows load(const Array& array, std::int64_t b, std::int64_t h) const {
    Rows rows(static_cast<std::size_t>(seqlen_));
    const std::int64_t dim = array.shape[3];
    for (std::int64_t i = 0; i < seqlen_; ++i)
      for (std::int64_t c = 0; c < dim; ++c)
        rows[static_cast<std::size_t>(i)].push_back(
            static_cast<float>(array.at(((b * seqlen_ + i) * heads_ + h) * dim + c)));
    return rows;
  }
  void store(const Rows& rows, Array& array, std::int64_t b, std::int64_t h) const {
    const std::int64_t dim = array.shape[3];
    for (std::int64_t i = 0; i < seqlen_; ++i)
      for (std::int64_t c = 0; c < dim; ++c)
        array.set(((b * seqlen_ + i) * heads_ + h) * dim + c,
                  static_cast<double>(rows[static_cast<std::size_t>(i)][static_cast<std::size_t>(c)]));
  }

 private:
  std::int64_t batch_, seqlen_, heads_;
};

float dot(const std::vector<float>& a, const std::vector<float>& b) {
  float sum = 0.0f;
  for (std::size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

void add(std::vector<float>& sum, float factor, const std::vector<float>& row) {
  for (std::size_t c = 0; c < row.size(); ++c) sum[c] += factor * row[c];
}

}  // namespace

Tensors rounded_attention(const Tensors& tensors, bool causal) {
  const Array& q_all = tensors.at("q");
  const DType dtype = q_all.dtype;
  const Heads heads(q_all);
  const std::int64_t batch = q_all.shape[0], seqlen = q_all.shape[1], count = q_all.shape[2];
  const auto n = static_cast<std::size_t>(seqlen), dim = static_cast<std::size_t>(q_all.shape[3]);
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  Array cell(dtype, {1});
  const auto rounded = [&](float value) {
    cell.set(0, static_cast<double>(value));
    return static_cast<float>(cell.at(0));
  };

  Tensors result;
  for (const char* name : {"out", "dq", "dk", "dv"}) result[name] = Array(dtype, q_all.shape);
  for (const char* name : {"lse", "peak"}) result[name] = Array(DType::float32, {batch, count, seqlen});
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < count; ++h) {
      const Rows q = heads.load(q_all, b, h), k = heads.load(tensors.at("k"), b, h);
      const Rows v = heads.load(tensors.at("v"), b, h), dout = heads.load(tensors.at("dout"), b, h);
      const Rows zeros(n, std::vector<float>(dim, 0.0f));
      Rows out = zeros, dq = zeros, dk = zeros, dv = zeros;
      for (std::size_t i = 0; i < n; ++i) {
        const std::size_t visible = causal ? i + 1 : n;
        std::vector<float> p(visible);
        for (std::size_t j = 0; j < visible; ++j) p[j] = scale * dot(q[i], k[j]);
        const float most = *std::ranges::max_element(p);
        float sum = 0.0f;
        for (float& x : p) sum += x = std::exp(x - most);
        for (float& x : p) x /= sum;
        for (std::size_t j = 0; j < visible; ++j) add(out[i], rounded(p[j]), v[j]);
        for (float& x : out[i]) x = rounded(x);
        const std::int64_t row = (b * count + h) * seqlen + static_cast<std::int64_t>(i);
        result["lse"].set(row, static_cast<double>(most + std::log(sum)));
        result["peak"].set(row, static_cast<double>(1.0f / sum));

        const float delta = dot(dout[i], out[i]);
        for (std::size_t j = 0; j < visible; ++j) {
          const float ds = rounded(p[j] * (dot(dout[i], v[j]) - delta));
          add(dq[i], scale * ds, k[j]);
          add(dk[j], scale * ds, q[i]);
          add(dv[j], rounded(p[j]), dout[i]);
        }
      }
      heads.store(out, result["out"], b, h);
      heads.store(dq, result["dq"], b, h);
      heads.store(dk, result["dk"], b, h);
      heads.store(dv, result["dv"], b, h);
    }
  }
  return result;
}

}  // namespace headrace::tool
