#include "inference/kernels/forms.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <string>
#include <vector>

#include "cpu_optim/dispatch.h"

namespace overspill::inference {

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
namespace avx512bf16 {
extern const Kernels table;
}
#endif

namespace {

const std::vector<const Kernels*>& known_forms() {
  static const std::vector<const Kernels*> known {
    &portable::table,
#if defined(__aarch64__)
        &neon::table,
#endif
#if defined(__x86_64__)
        &avx2::table, &avx512::table,
#endif
  };
  return known;
}

#if defined(__x86_64__)
// clang 14's and g++ 12's __builtin_cpu_supports do not agree on the name.
bool has_avx512_bf16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & (1u << 5)) != 0;
}
#endif

/// cpu_optim asks the machine; each of its forms has one here, and avx512 two.
std::vector<const Kernels*> forms_up_to(std::string_view widest) {
  std::vector<const Kernels*> found;
  for (const optim::Kernels* theirs : optim::available_kernels()) {
    for (const Kernels* ours : known_forms()) {
      if (std::string_view(ours->name) == theirs->name) found.push_back(ours);
    }
    if (theirs->name == widest) break;
  }
#if defined(__x86_64__)
  if (std::string_view(found.back()->name) == "avx512" && has_avx512_bf16())
    found.push_back(&avx512bf16::table);
#endif
  return found;
}

}  // namespace

std::span<const Kernels* const> available_kernels() {
  static const std::vector<const Kernels*> found = forms_up_to("");
  return found;
}

const Kernels& kernels() {
  static const Kernels& chosen = *forms_up_to(optim::instruction_set()).back();
  return chosen;
}

}  // namespace overspill::inference
