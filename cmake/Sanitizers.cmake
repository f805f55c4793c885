# HEADRACE_SANITIZE instruments everything that this project compiles, tests and GoogleTest included.
if(HEADRACE_SANITIZE)
  add_compile_options(-fsanitize=${HEADRACE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${HEADRACE_SANITIZE})
  if(HEADRACE_SANITIZE MATCHES "thread" AND NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(WARNING "ThreadSanitizer does not understand GCC's libgomp and will report races that are none; "
                    "use Clang with libomp (cmake --preset tsan)")
  endif()
endif()
