// Where leased units lie in an arena, so that the next one finds a run that is long enough, whatever was
// leased and ended before, and in which order. Leased memory cannot move: two small units in the middle would
// leave no run for the largest one.
//
// The largest units have places of their own; all others share what follows, cut into cells of the largest
// one's size, as many as units are leased at once. A leased unit lies within one cell, so each of the others
// that are leased can spoil one cell, and a whole one is left. Where the rest is so large that any position
// will do, it is not cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace overspill::engine {

class LeasePlaces {
 public:
  /// Offsets from `begin` to `end`; a block within them crosses no multiple of `cell` from `begin`, 0: it
  /// may.
  struct Place {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t cell = 0;
  };

  /// The arena's bytes with which `at_once` of the units of these sizes can always be leased.
  static int64_t least_bytes(std::vector<int64_t> sizes, size_t at_once);

  /// `sizes`: by unit, as the arena rounds them; 0: not gathered. An arena of less than least_bytes() has
  /// places too, and does not promise anything.
  LeasePlaces(const std::vector<int64_t>& sizes, size_t at_once, int64_t arena_bytes);

  const Place& of(int32_t unit) const { return places_[static_cast<size_t>(unit)]; }
  /// Whether a block of that unit may be leased there.
  bool has(int32_t unit, int64_t offset, int64_t bytes) const;

 private:
  std::vector<Place> places_;
};

}  // namespace overspill::engine
