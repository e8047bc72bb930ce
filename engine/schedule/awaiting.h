#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/schedule/context.h"

namespace overspill::engine {

/// While it lives, a caller waits for the unit: other ranks serve it first.
class Awaiting {
 public:
  Awaiting(Context& context, int32_t unit) REQUIRES(engine_mutex) : context_(context), unit_(unit) {
    context_.awaited_units.push_back(unit);
    if (context_.layout.slices > 1) context_.changed.notify_all();
  }
  ~Awaiting() REQUIRES(engine_mutex) {
    auto& units = context_.awaited_units;
    units.erase(std::find(units.begin(), units.end(), unit_));
  }
  Awaiting(const Awaiting&) = delete;
  Awaiting& operator=(const Awaiting&) = delete;

 private:
  Context& context_;
  const int32_t unit_;
};

}  // namespace overspill::engine
