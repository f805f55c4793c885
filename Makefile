# The everyday commands; `make help` lists them. On Debian and Ubuntu, demo and test install what they miss.
SHELL := /bin/bash
ccache := $(shell command -v ccache)
ifneq ($(ccache),)
export CMAKE_C_COMPILER_LAUNCHER ?= $(ccache)
export CMAKE_CXX_COMPILER_LAUNCHER ?= $(ccache)
endif
sources = $(shell git ls-files '*.c' '*.cpp' '*.h' '*.hpp' '*.cuh')

.PHONY: help
help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

.PHONY: demo
demo: build ## attention of a real transformer on this machine; report in build/demo.html
	build/release/tools/headrace/headrace demo --report build/demo.html
	@echo "The report: $(CURDIR)/build/demo.html"

.PHONY: test
test: setup build/release/build.ninja ## build and run every test
	cmake --build --preset release
	ctest --preset release -j $(shell nproc)

.PHONY: build
build: setup build/release/build.ninja ## build library and command line (build/release)
	cmake --build --preset release --target headrace headrace_command

.PHONY: setup
setup: ## install what is missing to build and test
	@scripts/setup.sh build test

# Ninja runs CMake again by itself when a CMakeLists.txt changes.
build/release/build.ninja: CMakePresets.json
	cmake --preset release

.PHONY: install
install: build ## install to PREFIX (/usr/local)
	cmake --install build/release --prefix $(or $(PREFIX),/usr/local)

.PHONY: wheel
wheel: ## build the Python wheel (build/wheel)
	@scripts/setup.sh build wheel
	scripts/build_wheel.sh

.PHONY: format
format: ## format all sources
	clang-format-14 -i $(sources)

.PHONY: lint
lint: ## check format, clang-tidy, headers, scripts
	scripts/lint.sh

.PHONY: ci
ci: ## everything that CI runs (installs its tools; about half an hour on 2 cores)
	.ci/run

.PHONY: clean
clean: ## remove everything that was built
	rm -rf build
