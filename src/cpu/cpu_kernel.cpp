#include "plan/kernel.hpp"
namespace headrace {
std::unique_ptr<Kernel> make_cpu_kernel(const Problem&) { throw Failure(HR_ERROR_UNSUPPORTED, "cpu: not built yet"); }
}  // namespace headrace
