// One round of the ranks' agreement (docs/ranks.md): every rank says what it wants, what it can give and
// where it waits; from the same announcements every rank draws the same conclusion. No single rank, no clock
// and no budget decides, and the ranks begin nothing until all are ready for it. So no rank waits in vain.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace overspill::engine {

/// Calls of the engine that all ranks make together.
enum class Meeting : uint8_t { none, step, norm, clear, look, write, save, load };
std::string_view name(Meeting meeting);

/// What a rank says of itself, as 64-bit words that are sent as they are.
struct Standing {
  uint64_t model = 0;     // of its units: the ranks have to have the same
  uint64_t changes = 0;   // of weights so far, by step() and from outside
  uint64_t meeting = 0;   // where its caller waits (Meeting)
  uint64_t number = 0;    // tells two meetings of one kind apart
  uint64_t leaving = 0;   // its engine is being closed
  uint64_t stuck = 0;     // its caller waits for room for a gradient
  int64_t demanded = -1;  // the unit that its caller waits for
  uint64_t progress = 0;  // calls so far: a rank whose count stands still may hang
  bool operator==(const Standing&) const = default;
};
inline constexpr size_t kStandingWords = sizeof(Standing) / sizeof(uint64_t);

/// What a rank says of each unit.
enum class Say : uint8_t {
  wants,     // has room for the whole unit, and its own shard in it
  serves,    // can send its shard, of the version that `changes` counts
  complete,  // no gradient of it is to come before step()
  gives,     // has a gradient that was not summed yet
};
inline constexpr std::array kAllSays{Say::wants, Say::serves, Say::complete, Say::gives};
inline constexpr size_t kSays = kAllSays.size();

/// The announcements of all ranks: memory of an all-gather.
class Announcements {
 public:
  Announcements(int ranks, int32_t units);
  int ranks() const { return ranks_; }
  int32_t units() const { return units_; }
  std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(words_)); }
  std::span<uint64_t> of(int rank);

  Standing standing(int rank) const;
  bool says(int rank, Say say, int32_t unit) const;
  bool anyone(Say say, int32_t unit) const;
  bool everyone(Say say, int32_t unit) const;

  /// Empties a rank's announcement and sets its standing.
  void start(int rank, const Standing& standing);
  void say(int rank, Say say, int32_t unit);

 private:
  size_t place(int rank, Say say, int32_t unit) const;
  int ranks_;
  int32_t units_;
  size_t bit_words_;
  std::vector<uint64_t> words_;
};

/// What the round comes to.
struct Agreement {
  std::string failure;           // why the world ends; empty: it goes on
  std::vector<int32_t> sums;     // units whose gradients are summed now, ascending
  std::vector<int32_t> gathers;  // units whose shards go to ranks that want them; awaited units come first
  int32_t due = -1;              // the first wanted unit that somebody cannot serve yet
  bool meet = false;             // all callers are at one meeting
  bool out_of_room = false;      // nothing can be summed: a stuck rank will never get room
  bool idle = false;             // nobody wants anything
  bool all_left = false;
};

/// Refills `agreement`, keeping its memory.
void agree(const Announcements& said, Agreement& agreement);

}  // namespace overspill::engine
