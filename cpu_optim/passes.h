// An update as the passes that it consists of, for whoever runs them: the CPU's kernels, or a device's.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_optim/pass.h"
#include "cpu_optim/piece_check.h"
#include "cpu_optim/update.h"

namespace overspill::optim {

/// Checks the update and calls run(pass) for each value of the index's upper half, which the random bits of a
/// pass share; a piece hardly ever has two. Throws as update(). A pass points to the piece's list of
/// components and into `factors`.
template <class Run>
void for_each_pass(const char* function, Format format, const Piece& piece, Gradient gradient, Range range,
                   const Factors& factors, Run run) {
  check_piece(function, optimizer_of(factors), format, piece, range);
  if (gradient.data == nullptr && range.begin < range.end)
    throw std::invalid_argument(std::string(function) + ": there is no gradient");
  Pass pass{.components = piece.components.data(),
            .gradient = gradient.data,
            .elements = piece.elements,
            .begin = range.begin,
            .end = range.end,
            .factors = std::visit([](const auto& f) -> const void* { return &f; }, factors.of),
            .grad_scale = factors.grad_scale,
            .noise = {}};
  while (pass.begin < range.end) {
    const int64_t first = piece.index + pass.begin;
    const int64_t next_upper = ((first >> 32) + 1) << 32;
    pass.end = std::min(range.end, next_upper - piece.index);
    pass.noise = make_noise(piece.seed, first, factors.step);
    pass.noise.index = static_cast<uint32_t>(piece.index);
    run(pass);
    pass.begin = pass.end;
  }
}

}  // namespace overspill::optim
