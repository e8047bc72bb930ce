#include "bench/io/consumer.h"

#include <array>

#include "cpu_optim/update.h"

using namespace overspill::optim;

void overspill_consume(std::byte* hi, std::byte* lo, std::byte* m, std::byte* v, const std::byte* gradient,
                       int64_t begin, int64_t end) {
  const std::array components{hi, lo, m, v};
  static const Factors factors = make_factors(AdamConfig{}, 1, 1.0);
  update(Format::exact, {.components = components, .elements = end}, {gradient, Element::bf16}, {begin, end},
         factors);
}
