// Checks that all ranks make the same, valid call; every transport does so before memory moves.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace overspill::engine {

enum class Call : uint64_t { all_gather, all_to_all, exchange, reduce_scatter_sum, barrier };

inline const char* name_of(Call call) {
  switch (call) {
    case Call::all_gather:
      return "all_gather";
    case Call::all_to_all:
      return "all_to_all";
    case Call::exchange:
      return "exchange";
    case Call::reduce_scatter_sum:
      return "reduce_scatter_sum";
    case Call::barrier:
      return "barrier";
  }
  return "an unknown call";
}

/// What a rank tells each other one before a call, where ranks are processes.
struct Announcement {
  uint64_t number = 0;         // of calls so far
  uint64_t send_bytes = 0;     // in all; of an exchange, what is sent to that rank and is expected from it
  uint64_t receive_bytes = 0;  // of a reduction, as many slices as are sent
  Call call = Call::barrier;
};

/// One rank's side of a call.
struct CallShape {
  std::string_view call;
  uint64_t send_bytes = 0;
  uint64_t receive_bytes = 0;
  bool slices = false;  // whether `send_bytes` has to be divisible by the world
};

/// `shape_of(rank)` is a CallShape. Empty where all ranks make the same call with the same, possible sizes.
template <class ShapeOf>
std::string find_difference(int ranks, ShapeOf shape_of) {
  const CallShape first = shape_of(0);
  for (int rank = 0; rank < ranks; ++rank) {
    const CallShape shape = shape_of(rank);
    if (shape.call != first.call || shape.send_bytes != first.send_bytes) {
      return fmt::format("rank {} calls {} with {} bytes where rank 0 calls {} with {}", rank, shape.call,
                         shape.send_bytes, first.call, first.send_bytes);
    }
    if (shape.receive_bytes != shape.send_bytes) {
      return fmt::format("rank {} sends {} bytes in {} and has room for {}", rank, shape.send_bytes,
                         shape.call, shape.receive_bytes);
    }
    if (shape.slices && shape.send_bytes % static_cast<uint64_t>(ranks) != 0) {
      return fmt::format("rank {} calls {} with {} bytes, not a multiple of {} ranks", rank, shape.call,
                         shape.send_bytes, ranks);
    }
  }
  return {};
}

/// The message for an exchange whose two ends give different lengths.
inline std::string odd_pair(int from, int to, uint64_t sent, uint64_t room) {
  return fmt::format("rank {} sends {} bytes to rank {}, which has room for {}", from, sent, to, room);
}

/// For a transport that knows all pairs: compares `sent(from, to)` with `room(from, to)`, in bytes. Empty
/// where all agree.
template <class Sent, class Room>
std::string find_odd_pair(int ranks, Sent sent, Room room) {
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (from != to && sent(from, to) != room(from, to))
        return odd_pair(from, to, sent(from, to), room(from, to));
    }
  }
  return {};
}

}  // namespace overspill::engine
