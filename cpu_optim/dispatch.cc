#include "cpu_optim/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace overspill::optim {

namespace portable {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

std::vector<const Kernels*> detect() {
  std::vector<const Kernels*> found{&portable::table};
#if defined(__x86_64__)
  // __builtin_cpu_supports asks the operating system too: it must save the wide registers.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
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
constexpr std::string_view kNames[] = {"portable", "avx2", "avx512"};

int width_rank(std::string_view name) {
  for (int rank = 0; rank < 3; ++rank) {
    if (kNames[rank] == name) return rank;
  }
  throw std::invalid_argument("OVERSPILL_ISA is '" + std::string(name) +
                              "'; it must be portable, avx2 or avx512, or be left unset");
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

}  // namespace overspill::optim
