// Ranks with one GPU each: large messages go from GPU to GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "engine/collectives/communicator.h"
#include "kernels/device.h"

namespace overspill::engine {

struct NcclOptions {
  std::filesystem::path library;  // empty: see nccl::load
  /// Device memory that calls go through, in pieces; the same on every rank.
  int64_t staging_bytes = int64_t{64} << 20;
  /// Calls of equal slices of at most so many bytes in all go over `control`; the same on every rank.
  int64_t small_bytes = int64_t{64} << 10;
  /// From the moment that all ranks have begun a call until NCCL has finished it.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// All ranks of `control` (MPI, a torch.distributed group over gloo), on an NCCL communicator of its own.
/// Collective.
///
/// `control` carries NCCL's id, sums, barriers and small calls, and before each large one what every rank is
/// about to do. So a rank that makes another call, or is late, is named by `control` on every rank before a
/// GPU waits for it, and no GPU spins while ranks agree. `device` is this rank's GPU. Bytes of host memory
/// go through staging there and back, on one stream; those of the device itself (exchange_on_device) go as
/// they lie.
///
/// Every failure (an error that NCCL reports later, a call that exceeds the timeout, a rank that ends the
/// world) aborts NCCL's communicator by ncclCommAbort, and `control` tells the other ranks. When GPU work
/// does not end even then, the process does, with a message on stderr: the GPU may still write to memory of
/// the caller. Throws CommunicatorError on every rank when one of them has no usable NCCL or device.
std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> control,
                                                     std::shared_ptr<kernels::Device> device,
                                                     const NcclOptions& options = {});

}  // namespace overspill::engine
