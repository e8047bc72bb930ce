#include "engine/gradients/gradient_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace overspill::engine {

GradientParts::GradientParts(const Setup& setup, GradientIntake& intake, Gradients& gradients, int32_t unit,
                             int32_t segment, optim::Element element)
    : intake_(intake),
      gradients_(gradients),
      segment_(setup.layout.units[unit].segments[segment]),
      arrival_(intake.begin_parts(unit, segment, element)),
      mark_(gradients.mark(unit, segment)),
      width_(optim::bytes(element)) {}

int64_t GradientParts::missing() const {
  return gradients_.piece_end(arrival_, taken_) - taken_ - waiting();
}

void GradientParts::add(std::span<const std::byte> data) {
  const int64_t left = segment_.elements - taken_ - waiting();
  if (std::ssize(data) % width_ != 0 || std::ssize(data) / width_ > left) {
    throw std::invalid_argument(
        fmt::format("a part of the gradient of {} has {} bytes: {} elements of {} follow", segment_.name,
                    data.size(), left, width_));
  }
  if (!rest_.empty()) {
    const auto bytes = static_cast<size_t>(std::min(missing() * width_, std::ssize(data)));
    rest_.insert(rest_.end(), data.begin(), data.begin() + static_cast<std::ptrdiff_t>(bytes));
    data = data.subspan(bytes);
    if (missing() > 0) return;
    intake_.add_parts(std::array{Gradients::Piece{&arrival_, taken_, waiting(), rest_.data()}});
    taken_ += waiting();
    rest_.clear();
  }
  // Up to the last end of a chunk; a segment of no elements has no piece.
  const int64_t end = taken_ + std::ssize(data) / width_;
  int64_t whole = taken_;
  for (int64_t next = taken_; next < end; whole = next) {
    next = gradients_.piece_end(arrival_, next);
    if (next > end) break;
  }
  if (whole > taken_) {
    intake_.add_parts(std::array{Gradients::Piece{&arrival_, taken_, whole - taken_, data.data()}});
    data = data.subspan(static_cast<size_t>((whole - taken_) * width_));
    taken_ = whole;
  }
  rest_.assign(data.begin(), data.end());
}

void GradientParts::finish() {
  if (taken_ < segment_.elements) {
    throw std::invalid_argument(fmt::format("the gradient of {} ends after {} of {} elements", segment_.name,
                                            taken_ + waiting(), segment_.elements));
  }
  intake_.finish_parts(arrival_);
}

void GradientParts::break_off() {
  gradients_.break_off(arrival_, mark_, taken_ > 0);
}

}  // namespace overspill::engine
