// The error of an engine that cannot go on.
#pragma once

#include <stdexcept>

namespace overspill::engine {

/// An update or a transfer failed: weights may be half updated, nothing may be read or saved any more. what()
/// names the cause and the last complete checkpoint.
class EngineFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace overspill::engine
