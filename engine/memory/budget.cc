#include "engine/memory/budget.h"

#include <fmt/format.h>

#include <cassert>

namespace overspill::engine {

Reservation::~Reservation() {
  if (budget_ != nullptr) budget_->refund(bytes_);
}

Budget::Budget(std::string tier, int64_t limit_bytes) : tier_(std::move(tier)), limit_bytes_(limit_bytes) {
  if (limit_bytes < 0) {
    throw BudgetError(
        fmt::format("the {0} budget is {1} bytes; set budget.{0} to 0 or more", tier_, limit_bytes));
  }
}

Budget::~Budget() {
  assert(used_bytes() == 0 && "a reservation outlived its budget");
}

Reservation Budget::reserve(int64_t bytes, const char* what) {
  if (bytes < 0) {
    throw BudgetError(fmt::format("{}: {} bytes asked for {}: a size overflowed", tier_, bytes, what));
  }
  int64_t used = used_bytes_.load(std::memory_order_relaxed);
  do {
    // Written so that no sum can overflow: 0 <= used <= limit holds always.
    if (bytes > limit_bytes_ - used) {
      throw BudgetError(fmt::format(
          "{0}: {1} bytes asked for {2}, but {3} of the budget's {4} bytes are in use ({5} free); raise "
          "budget.{0} by at least {6} bytes, or lower the budget's other uses (prefetch depth, states kept "
          "in {0})",
          tier_, bytes, what, used, limit_bytes_, limit_bytes_ - used, bytes - (limit_bytes_ - used)));
    }
  } while (!used_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  const int64_t now = used + bytes;
  int64_t peak = peak_bytes_.load(std::memory_order_relaxed);
  while (now > peak && !peak_bytes_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
  return Reservation(this, bytes);
}

void Budget::refund(int64_t bytes) noexcept {
  used_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
}

}  // namespace overspill::engine
