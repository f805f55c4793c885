#include "describe/problem.hpp"
namespace headrace { Problem validate(const hr_attention&, Pass) { return {}; } }
