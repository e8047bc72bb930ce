#include "engine/telemetry/journal.h"

#include <algorithm>
#include <utility>

#include "kernels/clock.h"

namespace overspill::engine {

const char* happening_name(Happening happening) {
  switch (happening) {
    case Happening::forward:
      return "forward";
    case Happening::backward:
      return "backward";
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
    case Happening::summing:
      return "summing";
    case Happening::summed:
      return "summed";
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
    case Happening::disk_busy:
      return "disk_busy";
    case Happening::disk_rests:
      return "disk_rests";
  }
  return "?";
}

const char* span_name(DeviceSpan::Kind kind) {
  switch (kind) {
    case DeviceSpan::Kind::copy_up:
      return "copy_up";
    case DeviceSpan::Kind::compute:
      return "compute";
    case DeviceSpan::Kind::copy_down:
      return "copy_down";
    case DeviceSpan::Kind::update:
      return "update";
  }
  return "?";
}

std::vector<JournalEntry> Journal::take() {
  return std::exchange(entries_, {});
}

void Journal::note(DeviceSpan::Kind kind, int32_t unit, const kernels::Event& begin,
                   const kernels::Event& end, const void* queue) {
  if (on_ && begin.state() != nullptr) work_.push_back({{kind, unit, queue}, begin, end});
}

std::vector<DeviceWork> Journal::take_work() {
  return std::exchange(work_, {});
}

std::vector<DeviceSpan> resolve(const std::vector<DeviceWork>& work) {
  std::vector<DeviceSpan> spans;
  for (const DeviceWork& done : work) {
    done.end.wait();
    const auto begin = done.begin.reached_ns(), end = done.end.reached_ns();
    if (!begin || !end) continue;
    spans.push_back(done.span);
    spans.back().begin_ns = *begin;
    spans.back().end_ns = *end;
  }
  std::sort(spans.begin(), spans.end(),
            [](const DeviceSpan& a, const DeviceSpan& b) { return a.begin_ns < b.begin_ns; });
  return spans;
}

void Journal::add(Happening happening, int32_t unit, int32_t chunk, int32_t slot) {
  entries_.push_back({kernels::steady_now_ns(), happening, unit, chunk, slot});
}

}  // namespace overspill::engine
