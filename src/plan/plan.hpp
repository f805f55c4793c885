// The plan behind the opaque handle of headrace.h: a validated call and the kernel chosen for it.
#pragma once

#include <memory>

#include "describe/problem.hpp"
#include "plan/explain.hpp"
#include "plan/kernel.hpp"

// Immutable once made, and never moved: the kernel refers to the problem.
struct hr_plan {
  hr_plan(const hr_attention& attention, headrace::Pass pass);
  hr_plan(const hr_plan&) = delete;
  hr_plan& operator=(const hr_plan&) = delete;

  // Checks the tensors and the workspace, then runs the kernel; throws Failure before anything is written.
  void execute(const hr_attention& attention, void* workspace, std::size_t workspace_bytes) const;

  hr_attention described;  // compared with the call at execution; its metadata pointers are never followed
  headrace::Problem problem;
  std::unique_ptr<headrace::Kernel> kernel;
  headrace::Explanation explanation;  // set by hr_plan_create: the convenience calls have no use for it
};
