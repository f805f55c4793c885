# The CUDA part of the build. It needs no CUDA: the sources of the kernels are embedded as text, and compiled here
# with NVRTC if there is one, else at run time.
# An instrumented library is not what kernels are measured with, and the set takes minutes: such builds do without.
if(HEADRACE_SANITIZE)
  set(precompile_default OFF)
else()
  set(precompile_default ON)
endif()
option(HEADRACE_PRECOMPILE "Compile the standard set of GPU kernels with NVRTC and embed it" ${precompile_default})

# headrace_embed_sources(OUTPUT FUNCTION NAME=PATH...): writes the C++ file OUTPUT, which defines FUNCTION in
# headrace::cuda: the text of the files, each under the name that an #include calls it.
function(headrace_embed_sources output function)
  set(paths ${ARGN})
  list(TRANSFORM paths REPLACE "^[^=]*=" "")
  add_custom_command(OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -D OUTPUT=${output} -D FUNCTION=${function} -D "FILES=${ARGN}"
            -P ${PROJECT_SOURCE_DIR}/cmake/EmbedSources.cmake
    DEPENDS ${paths} ${PROJECT_SOURCE_DIR}/cmake/EmbedSources.cmake
    COMMENT "Embedding sources of GPU kernels"
    VERBATIM)
  # A file may be longer than the 64 KiB that every compiler must take.
  set_source_files_properties(${output} PROPERTIES COMPILE_OPTIONS -Wno-overlength-strings)
endfunction()

# Everything that device code may include. A file of src/cuda/kernels that is not listed here cannot be used.
set(kernel_files
  exact_rows.cuh
  element.cuh
  forward_pipeline.cuh
  forward_scores.cuh
  forward_tiles.cuh
  hopper_backward.cuh
  hopper_backward_keys.cuh
  hopper_backward_queries.cuh
  hopper_backward_params.hpp
  backward_statistics.cuh
  backward_convert.cuh
  backward_gradient.cuh
  backward_pipeline.cuh
  backward_scores.cuh
  backward_steps.cuh
  backward_store.cuh
  backward_bias_zeros.cuh
  backward_sinks.cuh
  options.cuh
  hopper_forward.cuh
  hopper_forward_params.hpp
  hopper_split_forward.cuh
  hopper_split_forward_params.hpp
  pack_rows.cuh
  pack_rows_params.hpp
  ptx/math.cuh
  ptx/mbarrier.cuh
  ptx/mma.cuh
  ptx/sync.cuh
  ptx/tma.cuh
  ptx/turns.cuh
  ptx/wgmma.cuh
  ptx/wgmma_shapes.cuh
  split_rows.cuh)
set(device_sources
  describe/dropout.hpp=${PROJECT_SOURCE_DIR}/src/describe/dropout.hpp
  headrace/streaming.hpp=${PROJECT_SOURCE_DIR}/include/headrace/streaming.hpp
  tiling/tiling.hpp=${PROJECT_SOURCE_DIR}/src/tiling/tiling.hpp)
foreach(file IN LISTS kernel_files)
  list(APPEND device_sources ${file}=${PROJECT_SOURCE_DIR}/src/cuda/kernels/${file})
endforeach()
set(embedded_sources ${PROJECT_BINARY_DIR}/cuda/embedded_sources.cpp)
headrace_embed_sources(${embedded_sources} embedded_sources ${device_sources})

# What the library and headrace_precompile share; compiled for each, so that the tool waits for nothing else.
set(cuda_compile_sources
  src/cuda/driver/digest.cpp
  src/cuda/driver/driver.cpp
  src/cuda/driver/kernel_source.cpp
  src/cuda/driver/nvrtc.cpp
  src/cuda/driver/precompiled.cpp
  src/cuda/launch/backward_source.cpp
  src/cuda/launch/forward_constants.cpp
  src/cuda/launch/hopper_forward_source.cpp
  src/cuda/launch/hopper_split_forward_source.cpp
  src/cuda/launch/pack_rows_source.cpp
  src/cuda/launch/tma_rows.cpp
  src/cuda/standard_set.cpp
  ${embedded_sources})

# NVRTC: where scripts/setup.sh puts it, or a toolkit's.
find_file(HEADRACE_NVRTC_LIBRARY NAMES libnvrtc.so.13 libnvrtc.so.12
  HINTS ${PROJECT_SOURCE_DIR}/build/tools/nvidia-cuda-nvrtc/nvidia/cu13/lib ENV CUDA_HOME ENV CUDA_PATH
  PATHS /usr/local/cuda /usr/local/cuda-13 /usr/local/cuda-12 /opt/cuda
  PATH_SUFFIXES lib64 lib
  DOC "The libnvrtc.so that compiles the standard set of GPU kernels")

# The standard set, as an object of its own: what stands in it changes without anything being compiled anew.
if(HEADRACE_PRECOMPILE AND HEADRACE_NVRTC_LIBRARY AND NOT CMAKE_CROSSCOMPILING)
  add_executable(headrace_precompile src/cuda/precompile/main.cpp src/cuda/precompile/precompile.cpp
                 ${cuda_compile_sources})
  target_include_directories(headrace_precompile PRIVATE include src)
  find_package(Threads REQUIRED)
  target_link_libraries(headrace_precompile PRIVATE headrace_flags ${headrace_fmt} Threads::Threads
                                                    ${CMAKE_DL_LIBS})
  set(pack ${PROJECT_BINARY_DIR}/cuda/standard_set.pack)
  # What the store has already is not compiled again.
  add_custom_command(OUTPUT ${pack}
    COMMAND ${CMAKE_COMMAND} -E env HEADRACE_NVRTC=${HEADRACE_NVRTC_LIBRARY}
            $<TARGET_FILE:headrace_precompile> ${PROJECT_BINARY_DIR}/cuda/store ${pack}
    DEPENDS headrace_precompile ${HEADRACE_NVRTC_LIBRARY}
    COMMENT "Compiling the standard set of GPU kernels"
    VERBATIM)
  set(pack_template cmake/standard_set.cpp.in)
else()
  message(STATUS "headrace: GPU kernels are not precompiled (HEADRACE_PRECOMPILE=${HEADRACE_PRECOMPILE}, "
                 "NVRTC: ${HEADRACE_NVRTC_LIBRARY})")
  set(pack)
  set(pack_template cmake/no_standard_set.cpp.in)
endif()
set(pack_source ${PROJECT_BINARY_DIR}/cuda/standard_set_pack.cpp)
configure_file(${pack_template} ${pack_source} @ONLY)
add_library(headrace_standard_set OBJECT ${pack_source})
target_include_directories(headrace_standard_set PRIVATE src)
target_link_libraries(headrace_standard_set PRIVATE headrace_flags)
if(pack)
  set_source_files_properties(${pack_source} PROPERTIES OBJECT_DEPENDS ${pack})
endif()
