// What is wrong with a model folder, or with a call of this library.
#pragma once

#include <stdexcept>

namespace overspill::inference {

/// A folder that cannot be run: damaged, hostile, or of a model that is not known here. The message names the
/// file, the value that decided it and the way out.
class ModelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The folder is sound, as far as was looked, and its model is none of those that this library computes.
/// Another program may run it.
class UnknownModel : public ModelError {
 public:
  using ModelError::ModelError;
};

/// A call in a forked child of the process that opened the model: its threads and its weights are not there.
class WrongProcess : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A budget of memory that is too small. The message names what is needed.
class NoRoom : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A request beyond those that may wait. The same request may be taken later.
class QueueFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace overspill::inference
