// Random forward and backward passes on the GPU against the float64 reference.
#include "cross_check.hpp"

namespace headrace::test {
namespace {

constexpr double max_cost = 1e7;

class BackwardRandom : public OnGpu {};

TEST_F(BackwardRandom, EveryOptionAgreesWithReference) {
  Rng numbers = test_rng();
  std::vector<Variant> variants;
  for (int index = 0; index < scaled(24); ++index) variants.push_back(random_variant(numbers.bits(), index));
  cross_check(variants, 20, Passes::both, max_cost);
}

TEST_F(BackwardRandom, PlainKernelsAgreeWithReference) {
  Rng numbers = test_rng();
  std::vector<Variant> variants;
  for (int tile = 0; tile < 5; ++tile)
    for (const bool deterministic : {false, true})
      for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32})
        for (const bool banded : {false, true}) {
          variants.push_back(plain_variant(numbers.bits(), tile, deterministic ? few : many, dtype, banded));
          variants.back().deterministic = deterministic;
        }
  cross_check(variants, static_cast<std::size_t>(scaled(20)), Passes::both, max_cost);
}

// Its gradient is summed over the dimensions in which the bias broadcasts, whichever they are.
TEST_F(BackwardRandom, BiasesOfEveryShape) {
  std::vector<Spec> specs;
  Rng rng = test_rng();
  for (unsigned full = 0; full < 16; ++full) {
    for (const bool of_input_dtype : {false, true}) {
      Spec spec = dense_spec(rng.pick({DType::bfloat16, DType::float16, DType::float32}), rng.integer(1, 300),
                             rng.integer(1, 300), rng.pick({64, 128}));
      spec.seed = rng.bits();
      spec.batch = 3, spec.heads_kv = 2, spec.group = 2;
      spec.bias.present = spec.dbias = true;
      for (unsigned dim = 0; dim < 4; ++dim) spec.bias.full[dim] = (full >> dim & 1) != 0;
      spec.bias.of_input_dtype = of_input_dtype;
      spec.bias.hidden = rng.pick({0.0, 0.3});
      spec.gradient_layout = rng.pick({Layout::contiguous, Layout::permuted, Layout::padded});
      spec.deterministic = rng.chance(0.5);
      if (rng.chance(0.3)) spec.causal = Causal::bottom_right;
      if (rng.chance(0.3)) {  // many of the tiles are visited by nobody
        spec.blocks.present = true;
        spec.blocks.full = {rng.chance(0.5), rng.chance(0.5)};
        spec.blocks.block_q = spec.blocks.block_k = rng.pick<std::int64_t>({64, 128});
        spec.blocks.hidden = 0.6;
      }
      if (rng.chance(0.2)) spec.dropout_p = 0.3;
      specs.push_back(spec);
    }
  }
  in_parallel(specs.size(),
              [&](std::size_t n) { EXPECT_EQ(check_on_gpu(specs[n], Passes::both), "") << specs[n].describe(); });
}

}  // namespace
}  // namespace headrace::test
