// Ranks under mpirun or srun, for C++ programs.
#pragma once

#include <chrono>
#include <memory>

#include "engine/collectives/communicator.h"

namespace overspill::engine {

/// MPI for this process: initialised with MPI_THREAD_SERIALIZED unless the program has done so, and in that
/// case finalised at the end. After a failure it is not finalised: MPI_Finalize waits for all ranks, while a
/// process that ends without it makes mpirun end the others.
class MpiSession {
 public:
  /// Throws CommunicatorError where MPI has no such thread level.
  MpiSession();
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// All ranks of MPI_COMM_WORLD, on a communicator of its own. Collective. The session has to outlive it.
  ///
  /// Before each call the ranks tell one another which call it is and how large, in messages of 32 bytes, and
  /// then that they have heard so of everyone. So a rank that makes another call, or none within `timeout`,
  /// is named by a CommunicatorError on every rank that waits for it, before memory is handed to MPI. When
  /// MPI itself does not finish a call that all have begun, MPI_Abort ends the program with a message on
  /// stderr: memory that MPI may still write to cannot be given back. `abort` has to be called by the thread
  /// that makes the calls.
  std::unique_ptr<Communicator> make_communicator(std::chrono::milliseconds timeout);

 private:
  bool initialised_here_ = false;
  std::shared_ptr<bool> failed_ = std::make_shared<bool>(false);
};

}  // namespace overspill::engine
