#include "engine/schedule/journal.h"

#include <utility>

#include "engine/schedule/context.h"

namespace overspill::engine {

const char* happening_name(Happening happening) {
  switch (happening) {
    case Happening::acquired:
      return "acquired";
    case Happening::waiting:
      return "waiting";
    case Happening::resumed:
      return "resumed";
    case Happening::stepped:
      return "stepped";
    case Happening::freed:
      return "freed";
    case Happening::gathering:
      return "gathering";
    case Happening::gathered:
      return "gathered";
    case Happening::gradient:
      return "gradient";
    case Happening::scheduled:
      return "scheduled";
    case Happening::reading:
      return "reading";
    case Happening::staged:
      return "staged";
    case Happening::updating:
      return "updating";
    case Happening::updated:
      return "updated";
    case Happening::guessing:
      return "guessing";
    case Happening::guessed:
      return "guessed";
    case Happening::writing:
      return "writing";
    case Happening::written:
      return "written";
  }
  return "?";
}

std::vector<JournalEntry> Journal::take() {
  return std::exchange(entries_, {});
}

void Journal::add(Happening happening, int32_t unit, int32_t chunk, int32_t slot) {
  entries_.push_back({now_ns(), happening, unit, chunk, slot});
}

}  // namespace overspill::engine
