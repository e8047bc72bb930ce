// The other ranks of an engine.
#pragma once

#include <memory>

#include "engine/collectives/communicator.h"

namespace overspill::engine {

/// The transports are shared with whoever builds the engine, who tells the other ranks where it fails.
struct RankGroups {
  std::shared_ptr<Communicator> communicator = nullptr;  // null once the engine has left its rounds
  /// The ranks that hold the other parts of a model that is divided beside us (tensor, pipeline parallelism),
  /// this one among them; null: we hold all of it. Norms and finiteness of gradients span them; nothing else
  /// does.
  std::shared_ptr<Communicator> model_ranks = nullptr;

  /// Ends the world of the other ranks: this one does not come to what they wait for.
  void abort(const char* why) const noexcept {
    if (model_ranks != nullptr) model_ranks->abort(why);
    if (communicator != nullptr) communicator->abort(why);
  }
  /// A transport may end together with those of the other ranks, and wait for them.
  void leave() noexcept {
    model_ranks.reset();
    communicator.reset();
  }
};

}  // namespace overspill::engine
