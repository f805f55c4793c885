#include "plan/kernel.hpp"
namespace headrace {
std::unique_ptr<Kernel> make_reference_kernel(const Problem&) { throw Failure(HR_ERROR_UNSUPPORTED, "reference: not built yet"); }
}  // namespace headrace
