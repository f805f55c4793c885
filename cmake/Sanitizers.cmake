# HEADRACE_SANITIZE instruments everything that this project compiles, tests and GoogleTest included.
if(HEADRACE_SANITIZE)
  add_compile_options(-fsanitize=${HEADRACE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${HEADRACE_SANITIZE})
  if(HEADRACE_SANITIZE MATCHES "thread" AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(WARNING "ThreadSanitizer does not understand GCC's libgomp and will report races that are none; "
                    "use Clang with libomp (cmake --preset tsan)")
  endif()
  # GCC below 13.2 stores vectors as if the frames that AddressSanitizer keeps apart, to see their use after a return,
  # were aligned like a stack (GCC bug 110027).
  if(HEADRACE_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set_source_files_properties(src/cpu/forward.cpp src/cpu/backward.cpp
                                PROPERTIES COMPILE_OPTIONS --param=asan-use-after-return=0)
  endif()
endif()
