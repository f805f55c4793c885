# What `cmake --install` puts in place: headers, library, CMake package, pkg-config file.
include(CMakePackageConfigHelpers)

install(DIRECTORY include/headrace TYPE INCLUDE FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(TARGETS headrace EXPORT headraceTargets)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/headrace)
install(EXPORT headraceTargets NAMESPACE headrace:: DESTINATION ${package_dir})
configure_package_config_file(cmake/headraceConfig.cmake.in headraceConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(headraceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/headraceConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/headraceConfigVersion.cmake
        DESTINATION ${package_dir})

# pkg-config finds the prefix from the place of the file itself, so that the installed tree can move.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(pc_prefix ${CMAKE_INSTALL_PREFIX})
  set(pc_libdir ${CMAKE_INSTALL_FULL_LIBDIR})
  set(pc_includedir ${CMAKE_INSTALL_FULL_INCLUDEDIR})
else()
  file(RELATIVE_PATH up /prefix/${pc_dir} /prefix)
  string(REGEX REPLACE "/$" "" up "${up}")
  set(pc_prefix "\${pcfiledir}/${up}")
  set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
  set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
# A static library brings its dependencies to whoever links it; a shared one has linked them itself.
set(pc_private_libs "${OpenMP_CXX_FLAGS} -lstdc++ -lm -l${CMAKE_DL_LIBS}")
if(BUILD_SHARED_LIBS)
  set(pc_libs "-L\${libdir} -lheadrace")
else()
  set(pc_libs "-L\${libdir} -lheadrace ${pc_private_libs}")
endif()
configure_file(cmake/headrace.pc.in headrace.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/headrace.pc DESTINATION ${pc_dir})
