// The other ranks of an engine.
#pragma once

#include <memory>

#include "engine/collectives/communicator.h"

namespace overspill::engine {

/// The transports are shared with the code that builds the engine, which tells the other ranks if that fails.
struct RankGroups {
  std::shared_ptr<Communicator> communicator = nullptr;  // null once the engine has left its rounds
  /// The ranks that hold the parts of a model under tensor or pipeline parallelism, this rank included; null:
  /// the model is not divided so. Only norms and finiteness of gradients span them.
  std::shared_ptr<Communicator> model_ranks = nullptr;

  /// Ends the world for all ranks, since this rank will not join their calls.
  void abort(const char* why) const noexcept {
    if (model_ranks != nullptr) model_ranks->abort(why);
    if (communicator != nullptr) communicator->abort(why);
  }
  /// Gives the transports up. This may wait for the other ranks to do the same.
  void leave() noexcept {
    model_ranks.reset();
    communicator.reset();
  }
};

}  // namespace overspill::engine
