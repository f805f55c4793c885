// The C border: exceptions stop here and become a status and a thread-local message.
#pragma once

#include <exception>
#include <new>

#include "describe/problem.hpp"

namespace headrace {

// The text is cut where it exceeds the buffer; no memory is allocated.
void set_last_error(const char* message) noexcept;

template <typename Body>
hr_status guarded(Body&& body) noexcept {
  try {
    body();
    return HR_OK;
  } catch (const Failure& failure) {
    set_last_error(failure.what());
    return failure.status;
  } catch (const std::bad_alloc&) {
    set_last_error("memory: an allocation of the library failed; free memory or describe a smaller call");
  } catch (const std::exception& error) {
    set_last_error(error.what());
  } catch (...) {
    set_last_error("an unknown exception was thrown");
  }
  return HR_ERROR_RUNTIME;
}

}  // namespace headrace
