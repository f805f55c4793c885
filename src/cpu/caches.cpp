#include "cpu/caches.hpp"

#include <unistd.h>

namespace headrace::cpu {

Index l2_cache_bytes() {
  static const Index bytes = [] {
    const long size = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return size > 0 ? static_cast<Index>(size) : Index{512} << 10;
  }();
  return bytes;
}

}  // namespace headrace::cpu
