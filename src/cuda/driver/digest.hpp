// SHA-256 (FIPS 180-4): names cached and precompiled kernels after all that went into them.
#pragma once

#include <string>
#include <string_view>

namespace headrace::cuda {

// 64 hexadecimal digits.
std::string sha256(std::string_view bytes);

}  // namespace headrace::cuda
