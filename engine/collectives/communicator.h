// Collectives between the ranks of one engine (docs/ranks.md). Transports: self (one rank), in-process
// (tests), MPI, a torch.distributed group, NCCL beside one of them.
//
// Calls block until done. Every rank makes the same calls in the same order from one thread at a time. Errors
// (a rank that died, a size that differs between ranks, a timeout) are thrown as CommunicatorError naming the
// rank and the call, on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_optim/format.h"

namespace overspill::kernels {
class Device;
}

namespace overspill::engine {

class CommunicatorError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One of several exchanges that are made together. By rank, as of Communicator::exchange().
struct Exchange {
  std::vector<std::span<const std::byte>> send;
  std::vector<std::span<std::byte>> receive;
  bool on_device = false;  // in memory of Communicator::device()
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  /// `data` holds world() equal slices; on entry slice rank() is filled, on return all are.
  virtual void all_gather(std::span<std::byte> data) = 0;

  /// Slice r of `send` goes to rank r; slice r of `receive` comes from rank r. Both hold world() equal
  /// slices, and do not overlap.
  virtual void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) = 0;

  /// send[r] goes to rank r, receive[r] is filled by rank r. Both have world() entries. Lengths may differ
  /// between pairs (0: nothing is sent), but both ends of a pair give the same length. Entry rank() is
  /// ignored. Every rank must call it, even with nothing to send.
  virtual void exchange(std::span<const std::span<const std::byte>> send,
                        std::span<const std::span<std::byte>> receive) = 0;

  /// The device whose memory exchange_on_device() sends and receives directly; null: none.
  virtual const kernels::Device* device() const { return nullptr; }

  /// exchange() for memory of device(), which no work on the device may use until the call returns. It is the
  /// same collective as exchange(): each rank calls the one that fits the place of its bytes. Throws
  /// std::logic_error where there is no device().
  virtual void exchange_on_device(std::span<const std::span<const std::byte>> send,
                                  std::span<const std::span<std::byte>> receive);

  /// Makes all of these exchanges, in any order, and returns when all are done. Every rank gives as many, in
  /// the same order. A transport whose calls cost more than their bytes sends them as one call; the default
  /// makes one call for each.
  virtual void exchange_together(std::span<const Exchange> exchanges);

  /// Element-wise sums, added in rank order on every rank: bit-equal everywhere.
  virtual void all_reduce_sum(std::span<double> values) = 0;

  /// Whether the transport has a reduction of its own: reduce_scatter_sum().
  virtual bool reduces() const { return false; }

  /// `send` has world() equal slices. Rank r gets in `sum` the sum of all ranks' slices r. The transport
  /// chooses the order and rounding of the additions, which may differ between transports, worlds and
  /// libraries. Only one rank computes each sum, so ranks cannot disagree. `send` and `sum` do not overlap.
  /// Throws std::logic_error where reduces() is false or `sum` is not whole elements.
  virtual void reduce_scatter_sum(std::span<const std::byte> send, std::span<std::byte> sum,
                                  optim::Element element);

  virtual void barrier() = 0;

  /// Ends the world: calls in progress and later ones throw on every rank, with `reason`.
  virtual void abort(const char* reason) noexcept = 0;

  /// Why the world has ended, as far as this rank knows; does not wait. Empty: it goes on, or this transport
  /// learns of it only in calls. To be called between calls, by the thread that makes them.
  virtual std::string failure() { return {}; }
};

/// How many elements there are in `data`.
inline int64_t whole_elements(std::span<const std::byte> data, optim::Element element) {
  const auto bytes = static_cast<int64_t>(data.size());
  if (bytes % optim::bytes(element) != 0) throw std::logic_error("a sum of parts of elements");
  return bytes / optim::bytes(element);
}

inline void Communicator::exchange_on_device(std::span<const std::span<const std::byte>>,
                                             std::span<const std::span<std::byte>>) {
  throw std::logic_error("this transport moves host memory alone");
}

inline void Communicator::exchange_together(std::span<const Exchange> exchanges) {
  for (const Exchange& one : exchanges) {
    if (one.on_device) {
      exchange_on_device(one.send, one.receive);
    } else {
      exchange(one.send, one.receive);
    }
  }
}

inline void Communicator::reduce_scatter_sum(std::span<const std::byte>, std::span<std::byte>,
                                             optim::Element) {
  throw std::logic_error("this transport has no reduction of its own");
}

}  // namespace overspill::engine
