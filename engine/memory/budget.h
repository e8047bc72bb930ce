// The bytes that a tier (host memory, or a device's) may use. The engine charges every allocation here first;
// exceeding the budget is always an error.
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace overspill::engine {

/// Thrown by reservations; what() names the tier, what was asked for and why, what is in use, and the budget.
class BudgetError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Budget;

/// Charges a budget until its destructor refunds it. Move-only. The budget outlives it.
class [[nodiscard]] Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept { swap(other); }
  Reservation& operator=(Reservation&& other) noexcept {
    Reservation taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~Reservation();
  int64_t bytes() const { return bytes_; }

 private:
  friend class Budget;
  Reservation(Budget* budget, int64_t bytes) : budget_(budget), bytes_(bytes) {}
  void swap(Reservation& other) noexcept {
    std::swap(budget_, other.budget_);
    std::swap(bytes_, other.bytes_);
  }
  Budget* budget_ = nullptr;
  int64_t bytes_ = 0;
};

/// Thread-safe.
class Budget {
 public:
  Budget(std::string tier, int64_t limit_bytes);
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;
  ~Budget();

  /// Throws BudgetError, and then nothing was charged. `what` names the purpose in the message.
  Reservation reserve(int64_t bytes, const char* what);

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t used_bytes() const { return used_bytes_.load(std::memory_order_relaxed); }
  int64_t peak_bytes() const { return peak_bytes_.load(std::memory_order_relaxed); }

 private:
  friend class Reservation;
  void refund(int64_t bytes) noexcept;

  const std::string tier_;
  const int64_t limit_bytes_;
  std::atomic<int64_t> used_bytes_ = 0;
  std::atomic<int64_t> peak_bytes_ = 0;
};

}  // namespace overspill::engine
