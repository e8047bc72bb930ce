// What an optimizer says of a state.
#pragma once

namespace overspill::optim {

/// Formats of few bits treat the two differently: a sign costs a bit, and a sum of squares must not be
/// rounded to zero.
enum class Values { any, sum_of_squares };

struct StateSpec {
  const char* name;
  Values values;
};

}  // namespace overspill::optim
