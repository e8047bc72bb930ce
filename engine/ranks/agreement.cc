#include "engine/ranks/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace overspill::engine {
namespace {

/// A meeting is held once all callers are there; one that can never be is an error.
std::string find_missed_meeting(const Announcements& said) {
  int waiting = -1;  // a rank at a meeting
  int leaving = -1;
  bool all = true;
  for (int rank = 0; rank < said.ranks(); ++rank) {
    const Standing own = said.standing(rank);
    if (own.leaving != 0) leaving = rank;
    if (own.leaving == 0 && own.meeting != 0 && waiting < 0) waiting = rank;
    all = all && (own.leaving != 0 || own.meeting != 0);
  }
  if (waiting < 0) return {};
  const Standing first = said.standing(waiting);
  const auto at = [&](int rank, const Standing& own) {
    return fmt::format("rank {} is at {} number {}", rank, name(Meeting{static_cast<uint8_t>(own.meeting)}),
                       own.number);
  };
  if (leaving >= 0) return fmt::format("rank {} has left the world, {}", leaving, at(waiting, first));
  for (int rank = 0; rank < said.ranks() && all; ++rank) {
    const Standing own = said.standing(rank);
    if (own.meeting == first.meeting && own.number == first.number) continue;
    const auto write = static_cast<uint64_t>(Meeting::write);
    const bool writes = own.meeting == write || first.meeting == write;
    return fmt::format("{}, {}{}", at(rank, own), at(waiting, first),
                       writes ? ": all ranks must load and write weights equally often" : "");
  }
  return {};
}

/// Whether the rank's caller waits for other ranks, in a meeting or for a unit, and can do nothing until
/// then.
bool waits(const Announcements& said, int rank) {
  const Standing own = said.standing(rank);
  const bool asks = own.demanded >= 0 && own.demanded < said.units();
  return own.leaving != 0 || own.meeting != 0 ||
         (asks && said.says(rank, Say::wants, static_cast<int32_t>(own.demanded)));
}

/// The ranks gather a unit once each of them has changed weights equally often. If all ranks wait, a rank
/// that has changed weights less often than another cannot catch up, so the wait would never end. Returns the
/// error that says so; empty where there is no such rank.
std::string find_missed_change(const Announcements& said) {
  int asking = -1;
  for (int rank = 0; rank < said.ranks(); ++rank) {
    if (!waits(said, rank)) return {};
    const Standing own = said.standing(rank);
    if (own.leaving == 0 && own.meeting == 0 && asking < 0) asking = rank;
  }
  if (asking < 0) return {};
  const Standing first = said.standing(asking);
  for (int rank = 0; rank < said.ranks(); ++rank) {
    const Standing own = said.standing(rank);
    if (own.changes == first.changes) continue;
    return fmt::format(
        "rank {} {} after {} changes of weights, rank {} waits for unit {} after {}: all ranks must "
        "load and write weights equally often",
        rank,
        own.leaving != 0   ? "has left the world"
        : own.meeting != 0 ? "waits in a collective call"
                           : "waits",
        own.changes, asking, first.demanded, first.changes);
  }
  return {};
}

std::string find_other_model(const Announcements& said) {
  for (int rank = 1; rank < said.ranks(); ++rank) {
    if (said.standing(rank).model != said.standing(0).model)
      return fmt::format("rank {} has another model, stage, chunk size or bucket than rank 0", rank);
  }
  return {};
}

int32_t first_given_by_all(const Announcements& said) {
  for (int32_t unit = 0; unit < said.units(); ++unit) {
    bool all = said.anyone(Say::gives, unit);
    for (int rank = 0; rank < said.ranks(); ++rank)
      all = all && (said.says(rank, Say::gives, unit) || said.says(rank, Say::complete, unit));
    if (all) return unit;
  }
  return -1;
}

bool all_changed_alike(const Announcements& said) {
  for (int rank = 1; rank < said.ranks(); ++rank) {
    if (said.standing(rank).changes != said.standing(0).changes) return false;
  }
  return true;
}

void consider(const Announcements& said, int32_t unit, bool alike, Agreement& out) {
  const auto there = [&](const std::vector<int32_t>& list) {
    return std::find(list.begin(), list.end(), unit) != list.end();
  };
  if (!said.anyone(Say::wants, unit) || there(out.gathers)) return;
  if (alike && said.everyone(Say::serves, unit)) {
    out.gathers.push_back(unit);
  } else if (out.due < 0) {
    out.due = unit;
  }
}

}  // namespace

std::string_view name(Meeting meeting) {
  switch (meeting) {
    case Meeting::none:
      break;
    case Meeting::step:
      return "step()";
    case Meeting::norm:
      return "grad_norm()";
    case Meeting::clear:
      return "clear_gradients()";
    case Meeting::look:
      return "a look at weights or states";
    case Meeting::write:
      return "a change of weights";
    case Meeting::save:
      return "save()";
    case Meeting::load:
      return "load()";
  }
  return "no meeting";
}

Announcements::Announcements(int ranks, int32_t units)
    : ranks_(ranks),
      units_(units),
      bit_words_((static_cast<size_t>(units) + 63) / 64),
      words_(static_cast<size_t>(ranks) * (kStandingWords + kSays * bit_words_)) {}

std::span<uint64_t> Announcements::of(int rank) {
  const size_t words = words_.size() / static_cast<size_t>(ranks_);
  return std::span(words_).subspan(static_cast<size_t>(rank) * words, words);
}

Standing Announcements::standing(int rank) const {
  Standing standing;
  const size_t words = words_.size() / static_cast<size_t>(ranks_);
  std::memcpy(static_cast<void*>(&standing), words_.data() + static_cast<size_t>(rank) * words,
              sizeof standing);
  return standing;
}

size_t Announcements::place(int rank, Say say, int32_t unit) const {
  const size_t words = words_.size() / static_cast<size_t>(ranks_);
  return static_cast<size_t>(rank) * words + kStandingWords + static_cast<size_t>(say) * bit_words_ +
         static_cast<size_t>(unit) / 64;
}

bool Announcements::says(int rank, Say say, int32_t unit) const {
  return (words_[place(rank, say, unit)] >> (unit % 64) & 1) != 0;
}

bool Announcements::anyone(Say say, int32_t unit) const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (says(rank, say, unit)) return true;
  }
  return false;
}

bool Announcements::everyone(Say say, int32_t unit) const {
  for (int rank = 0; rank < ranks_; ++rank) {
    if (!says(rank, say, unit)) return false;
  }
  return true;
}

void Announcements::start(int rank, const Standing& standing) {
  const std::span<uint64_t> own = of(rank);
  std::fill(own.begin(), own.end(), 0);
  std::memcpy(own.data(), &standing, sizeof standing);
}

void Announcements::say(int rank, Say say, int32_t unit) {
  words_[place(rank, say, unit)] |= uint64_t{1} << (unit % 64);
}

void agree(const Announcements& said, Agreement& out) {
  out.sums.clear();
  out.gathers.clear();
  out.due = -1;
  out.meet = out.out_of_room = false;
  out.idle = out.all_left = true;
  out.failure = find_other_model(said);
  if (out.failure.empty()) out.failure = find_missed_meeting(said);
  if (out.failure.empty()) out.failure = find_missed_change(said);
  if (!out.failure.empty()) return;

  bool nobody_goes_on = true;
  bool somebody_stuck = false;
  out.meet = true;
  for (int rank = 0; rank < said.ranks(); ++rank) {
    const Standing own = said.standing(rank);
    out.all_left = out.all_left && own.leaving != 0;
    out.meet = out.meet && own.meeting != 0;
    out.idle = out.idle && own.meeting == 0 && own.stuck == 0;
    somebody_stuck = somebody_stuck || own.stuck != 0;
    nobody_goes_on = nobody_goes_on && (own.meeting != 0 || own.stuck != 0 || own.leaving != 0);
  }
  for (int32_t unit = 0; unit < said.units(); ++unit) {
    if (!out.meet && said.anyone(Say::gives, unit) && said.everyone(Say::complete, unit))
      out.sums.push_back(unit);
  }
  const bool alike = all_changed_alike(said);
  for (int rank = 0; rank < said.ranks(); ++rank) {
    const int64_t unit = said.standing(rank).demanded;
    if (unit >= 0 && unit < said.units()) consider(said, static_cast<int32_t>(unit), alike, out);
  }
  for (int32_t unit = 0; unit < said.units(); ++unit) consider(said, unit, alike, out);
  out.idle = out.idle && out.sums.empty() && out.gathers.empty() && out.due < 0;
  if (somebody_stuck && nobody_goes_on && out.sums.empty()) {
    // Everybody has come past the units that all have given: parameters of them that nobody uses are not to
    // fill the pools for ever.
    const int32_t unit = first_given_by_all(said);
    if (unit >= 0) {
      out.sums.push_back(unit);
    } else {
      out.out_of_room = true;
    }
  }
}

}  // namespace overspill::engine
