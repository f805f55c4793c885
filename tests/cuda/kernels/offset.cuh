#pragma once

inline float offset(long long i) { return static_cast<float>(i % 7); }
