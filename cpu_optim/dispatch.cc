#include "cpu_optim/dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace overspill::optim {

namespace portable {
extern const Kernels table;
}
#if defined(__aarch64__)
namespace neon {
extern const Kernels table;
}
#endif
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

#if defined(__x86_64__)
// g++ 12's __builtin_cpu_supports does not know it. Where AVX2 may be used, so may this.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> found{&portable::table};
#if defined(__aarch64__)
  found.push_back(&neon::table);  // part of every aarch64
#endif
#if defined(__x86_64__)
  // __builtin_cpu_supports asks the operating system too: it must save the wide registers.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
    found.push_back(&avx2::table);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      found.push_back(&avx512::table);
    }
  }
#endif
  return found;
}

// The names in order of width, known on every machine: a limit this machine does not reach is no mistake.
constexpr std::string_view kLevelNames[] = {"portable", "neon", "avx2", "avx512"};

int width_rank(std::string_view name) {
  for (int rank = 0; rank < 4; ++rank) {
    if (kLevelNames[rank] == name) return rank;
  }
  throw std::invalid_argument("OVERSPILL_ISA is '" + std::string(name) +
                              "'; it must be portable, neon, avx2 or avx512, or be left unset");
}

}  // namespace

std::span<const Kernels* const> available_kernels() {
  static const std::vector<const Kernels*> found = detect();
  return found;
}

const Kernels& choose_kernels(std::string_view limit) {
  const auto found = available_kernels();
  if (limit.empty()) return *found.back();
  const int rank_max = width_rank(limit);
  const Kernels* chosen = found.front();
  for (const Kernels* form : found) {
    if (width_rank(form->name) <= rank_max) chosen = form;
  }
  return *chosen;
}

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* limit = std::getenv("OVERSPILL_ISA");
    return choose_kernels(limit == nullptr ? "" : limit);
  }();
  return chosen;
}

std::string_view instruction_set() {
  return kernels().name;
}

Cache prefetch_cache() {
#if defined(__x86_64__)
  static const bool amd = __builtin_cpu_is("amd") != 0;
  if (amd) return Cache::second_level;
#endif
  return Cache::first_level;
}

}  // namespace overspill::optim
