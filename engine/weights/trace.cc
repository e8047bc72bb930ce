#include "engine/weights/trace.h"

#include <algorithm>

namespace overspill::engine {

void Trace::begin(PassKind kind) {
  if (in_pass_ && !recorded_.empty()) {
    Recording& recording = recordings_[index(kind_)];
    if (recording.sequence != recorded_) {
      recording.sequence = recorded_;
      recording.positions.resize(static_cast<size_t>(units_));
      for (auto& positions : recording.positions) positions.clear();
      for (size_t i = 0; i < recorded_.size(); ++i) {
        recording.positions[recorded_[i]].push_back(static_cast<int32_t>(i));
      }
    }
  }
  recorded_.clear();
  kind_ = kind;
  in_pass_ = true;
  lost_ = false;
  position_ = 0;
}

void Trace::acquired(int32_t unit) {
  if (!recorded_.empty() && recorded_.back() == unit) return;  // used again at once: nothing to schedule
  recorded_.push_back(unit);
  const Recording& predicted = of(kind_);
  if (predicted.sequence.empty()) return;
  const auto& positions = predicted.positions[unit];
  const auto found = std::lower_bound(positions.begin(), positions.end(), position_);
  lost_ = found == positions.end();
  if (lost_ || *found != position_) ++departures_;
  if (!lost_) position_ = *found + 1;
}

int64_t Trace::next_use(int32_t unit) const {
  const Recording& predicted = of(kind_);
  if (predicted.sequence.empty()) return kNever;
  const auto& positions = predicted.positions[unit];
  if (positions.empty()) return kNever;
  const auto found = std::lower_bound(positions.begin(), positions.end(), position_);
  if (found != positions.end()) return *found - position_;
  return static_cast<int64_t>(predicted.sequence.size()) - position_ + positions.front();
}

std::span<const int32_t> Trace::upcoming(int64_t count) const {
  const Recording& predicted = of(kind_);
  if (lost_ || position_ >= static_cast<int64_t>(predicted.sequence.size())) return {};
  const int64_t available = static_cast<int64_t>(predicted.sequence.size()) - position_;
  return std::span(predicted.sequence).subspan(position_, std::min(count, available));
}

std::span<const int32_t> Trace::forward_order() {
  const Recording& recording = of({true, true});
  ordered_.assign(static_cast<size_t>(units_), 0);
  order_.clear();
  const auto add = [&](int32_t unit) {
    if (ordered_[unit] == 0) order_.push_back(unit);
    ordered_[unit] = 1;
  };
  // Between two passes the pass just made is the better prediction; it is complete only when the next one
  // begins.
  const bool present = in_pass_ && kind_.training && kind_.grad_enabled;
  for (int32_t unit : present ? recorded_ : recording.sequence) add(unit);
  for (int32_t unit : recording.sequence) add(unit);
  for (int32_t unit = 0; unit < units_; ++unit) add(unit);
  return order_;
}

}  // namespace overspill::engine
