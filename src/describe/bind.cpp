#include "describe/problem.hpp"
namespace headrace { Buffers bind(const hr_attention&, const hr_attention&, Pass) { return {}; } }
