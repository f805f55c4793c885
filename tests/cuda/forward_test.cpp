// Random forward passes on the GPU against the float64 reference.
#include "cross_check.hpp"

namespace headrace::test {
namespace {

constexpr double max_cost = 2.5e7;

class ForwardRandom : public OnGpu {};

TEST_F(ForwardRandom, EveryOptionAgreesWithReference) {
  Rng numbers = test_rng();
  std::vector<Variant> variants;
  for (int index = 0; index < scaled(24); ++index) variants.push_back(random_variant(numbers.bits(), index));
  cross_check(variants, 20, Passes::forward, max_cost);
}

TEST_F(ForwardRandom, PlainKernelsAgreeWithReference) {
  Rng numbers = test_rng();
  std::vector<Variant> variants;
  for (int tile = 0; tile < 5; ++tile)
    for (const int multiprocessors : {few, many})
      for (const DType dtype : {DType::bfloat16, DType::float16, DType::float32})
        for (const bool banded : {false, true})
          variants.push_back(plain_variant(numbers.bits(), tile, multiprocessors, dtype, banded));
  cross_check(variants, static_cast<std::size_t>(scaled(25)), Passes::forward, max_cost);
}

}  // namespace
}  // namespace headrace::test
