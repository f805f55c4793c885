# 64-bit Arm from a Debian or Ubuntu x86-64 machine: the cross compiler of the distribution, programs
# run under qemu-user. The libraries used here are header-only (Highway, {fmt}, CLI11, nlohmann-json), so
# the headers of the build machine serve; GoogleTest is built from its sources (package googletest).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc-12)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++-12)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)

# Only the headers of the build machine's {fmt} are used, so its package for another processor will do.
file(GLOB fmt_DIR /usr/lib/*-linux-gnu/cmake/fmt)
set(HEADRACE_GOOGLETEST_SOURCE /usr/src/googletest)
