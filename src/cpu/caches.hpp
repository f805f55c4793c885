// The caches of a core of this machine: they decide how much work shares one packing of keys.
#pragma once

#include "tiling/tiling.hpp"

namespace headrace::cpu {

// Read once; where the system does not tell, what almost every core has at least.
Index l2_cache_bytes();

}  // namespace headrace::cpu
