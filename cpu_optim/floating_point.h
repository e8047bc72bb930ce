// The floating-point mode that results are defined in: round to nearest even, denormals kept, no traps.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace overspill::optim {

/// Sets that mode for the calling thread while it lives, then puts back what was there: a framework may have
/// asked for flush-to-zero, and a new thread inherits its creator's mode.
class FloatingPointMode {
 public:
  FloatingPointMode(const FloatingPointMode&) = delete;
  FloatingPointMode& operator=(const FloatingPointMode&) = delete;
#if defined(__x86_64__)
  FloatingPointMode() : saved_(_mm_getcsr()) {
    _mm_setcsr(0x1F80);
  }  // the value after reset
  ~FloatingPointMode() {
    _mm_setcsr(saved_);
  }

 private:
  unsigned saved_;
#else
  FloatingPointMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatingPointMode() {
    std::fesetenv(&saved_);
  }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace overspill::optim
