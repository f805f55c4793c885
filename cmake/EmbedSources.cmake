# cmake -D OUTPUT=... -D FUNCTION=... -D "FILES=NAME=PATH;..." -P EmbedSources.cmake; see headrace_embed_sources.
set(text "// Written by EmbedSources.cmake.\n#include \"cuda/driver/kernel_source.hpp\"\n\n"
         "namespace headrace::cuda {\n\nstd::span<const SourceFile> ${FUNCTION}();\n\n"
         "std::span<const SourceFile> ${FUNCTION}() {\n  static constexpr SourceFile files[] = {\n")
foreach(file IN LISTS FILES)
  string(REGEX MATCH "^([^=]*)=(.*)$" matched "${file}")
  set(name ${CMAKE_MATCH_1})
  file(READ ${CMAKE_MATCH_2} contents)
  if(contents MATCHES "\\)headrace\"")
    message(FATAL_ERROR "${file} contains the end of a raw string")
  endif()
  string(APPEND text "      {\"${name}\", R\"headrace(" "${contents}" ")headrace\"},\n")
endforeach()
string(APPEND text "  };\n  return files;\n}\n\n}  // namespace headrace::cuda\n")
file(WRITE ${OUTPUT} "${text}")
