#include "engine/telemetry/chrome_trace.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace overspill::engine {
namespace {

constexpr int kCaller = 0;
constexpr int kFirstSlot = 1;  // tracks of the ring's slots
constexpr int kCopyUp = 1000, kCopyDown = 1001, kUpdate = 1002, kFirstQueue = 1003;

class ChromeTrace {
 public:
  ChromeTrace(std::ostream& out, const Layout& layout) : out_(out), layout_(layout) {}

  void write(std::span<const JournalEntry> entries, std::span<const DeviceSpan> device) {
    out_ << "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
    name_track(kCaller, "caller");
    if (!entries.empty()) start_ns_ = entries.front().time_ns;
    for (const JournalEntry& entry : entries) add(entry);
    for (const DeviceSpan& span : device) add(span);
    while (!open_.empty()) end(open_.begin()->first, entries.back().time_ns);
    out_ << "\n]}\n";
  }

 private:
  /// A kind of span and what it is a span of. Spans of one kind and thing do not overlap.
  struct Key {
    std::string category;
    int32_t thing;
    friend bool operator<(const Key& a, const Key& b) {
      return std::tie(a.category, a.thing) < std::tie(b.category, b.thing);
    }
  };
  struct Open {
    std::string name;
    int64_t begin_ns;
    int track;  // -1: a span beside the tracks
  };

  void add(const JournalEntry& e) {
    const std::string& unit = e.unit >= 0 ? layout_.units[e.unit].name : none_;
    const Key slot{"ring", e.slot};
    switch (e.happening) {
      case Happening::forward:
      case Happening::backward:
        return instant(happening_name(e.happening), e.time_ns);
      case Happening::disk_busy:
        return begin({"disk", e.chunk}, e.chunk == 0 ? "disks read" : "disks write", e.time_ns);
      case Happening::disk_rests:
        return end({"disk", e.chunk}, e.time_ns);
      case Happening::acquired:
        return instant("acquire " + unit, e.time_ns);
      case Happening::stepped:
        return instant("step", e.time_ns);
      case Happening::waiting:
        return begin({"wait", kCaller}, "wait for " + unit, e.time_ns, kCaller);
      case Happening::resumed:
        return end({"wait", kCaller}, e.time_ns);
      case Happening::gathering:
        return begin({"gather", e.unit}, "gather " + unit, e.time_ns);
      case Happening::gathered:
        end({"gather", e.unit}, e.time_ns);
        return begin({"gathered", e.unit}, "weights of " + unit, e.time_ns);
      case Happening::freed:
        end({"gather", e.unit}, e.time_ns);
        return end({"gathered", e.unit}, e.time_ns);
      case Happening::gradient:
        return begin({"gradients", e.unit}, "gradients of " + unit, e.time_ns);
      case Happening::summing:
        return begin({"sum", e.unit}, "sum gradients of " + unit, e.time_ns);
      case Happening::summed:
        return end({"sum", e.unit}, e.time_ns);
      case Happening::scheduled:
        ++left_[e.unit];
        return;
      case Happening::reading:
        return begin(slot, "read " + part(e), e.time_ns, kFirstSlot + e.slot);
      case Happening::staged:
      case Happening::written:
        return end(slot, e.time_ns);
      case Happening::updating:
        if (e.slot >= 0) return begin(slot, "update " + part(e), e.time_ns, kFirstSlot + e.slot);
        return begin({"update", e.chunk}, "update " + part(e), e.time_ns);
      case Happening::updated:
        end(e.slot >= 0 ? slot : Key{"update", e.chunk}, e.time_ns);
        if (--left_[e.unit] == 0) end({"gradients", e.unit}, e.time_ns);
        return;
      case Happening::guessing:
        if (e.slot < 0) return begin({"update", e.chunk}, "guess " + part(e), e.time_ns);
        return begin(slot, "guess " + part(e), e.time_ns, kFirstSlot + e.slot);
      case Happening::guessed:
        return end(e.slot >= 0 ? slot : Key{"update", e.chunk}, e.time_ns);
      case Happening::writing:
        return begin(slot, "write " + part(e), e.time_ns, kFirstSlot + e.slot);
    }
  }

  void add(const DeviceSpan& span) {
    const std::string& unit = layout_.units[span.unit].name;
    switch (span.kind) {
      case DeviceSpan::Kind::copy_up:
        return on_device(span, kCopyUp, "device: copies up", "copy", unit);
      case DeviceSpan::Kind::copy_down:
        return on_device(span, kCopyDown, "device: copies down", "copy", "gradients of " + unit);
      case DeviceSpan::Kind::update:
        return on_device(span, kUpdate, "device: updates", "update", unit);
      case DeviceSpan::Kind::compute: {
        const auto known = queues_.try_emplace(span.queue, kFirstQueue + static_cast<int>(queues_.size()));
        const int track = known.first->second;
        return on_device(span, track, fmt::format("device: computes ({})", track - kFirstQueue), "compute",
                         unit);
      }
    }
  }

  void on_device(const DeviceSpan& span, int track, const std::string& track_name, const char* category,
                 const std::string& name) {
    if (device_tracks_.insert(track).second) name_track(track, track_name);
    event({{"ph", "X"},
           {"cat", category},
           {"name", name},
           {"tid", track},
           {"ts", us(span.begin_ns)},
           {"dur", static_cast<double>(span.end_ns - span.begin_ns) / 1000}});
  }

  std::string part(const JournalEntry& e) const {
    const Unit& unit = layout_.units[e.unit];
    return unit.chunk_count > 1 ? fmt::format("{}[{}]", unit.name, e.chunk - unit.first_chunk) : unit.name;
  }

  void begin(Key key, std::string name, int64_t time_ns, int track = -1) {
    if (key.category == "gradients" && open_.contains(key)) return;  // a later micro-batch
    end(key, time_ns);
    if (track >= kFirstSlot && slots_.insert(track).second)
      name_track(track, fmt::format("ring slot {}", track - kFirstSlot));
    open_.emplace(std::move(key), Open{std::move(name), time_ns, track});
  }

  void end(const Key& key, int64_t time_ns) {
    const auto found = open_.find(key);
    if (found == open_.end()) return;
    const auto [name, begin_ns, track] = found->second;
    const std::string category = key.category;
    const int32_t thing = key.thing;
    open_.erase(found);
    if (track >= 0) {
      event({{"ph", "X"},
             {"cat", category},
             {"name", name},
             {"tid", track},
             {"ts", us(begin_ns)},
             {"dur", static_cast<double>(time_ns - begin_ns) / 1000}});
      return;
    }
    for (const auto& [phase, at] : {std::pair("b", begin_ns), std::pair("e", time_ns)}) {
      event({{"ph", phase},
             {"cat", category},
             {"name", name},
             {"id", fmt::format("{}-{}", category, thing)},
             {"tid", kCaller},
             {"ts", us(at)}});
    }
  }

  void instant(const std::string& name, int64_t time_ns) {
    event({{"ph", "i"}, {"s", "t"}, {"name", name}, {"tid", kCaller}, {"ts", us(time_ns)}});
  }

  void name_track(int track, const std::string& name) {
    event({{"ph", "M"}, {"name", "thread_name"}, {"tid", track}, {"args", {{"name", name}}}});
  }

  void event(nlohmann::json fields) {
    fields["pid"] = 0;
    out_ << (first_ ? "" : ",\n") << fields.dump();
    first_ = false;
  }

  double us(int64_t time_ns) const { return static_cast<double>(time_ns - start_ns_) / 1000; }

  std::ostream& out_;
  const Layout& layout_;
  const std::string none_;
  int64_t start_ns_ = 0;
  bool first_ = true;
  std::map<Key, Open> open_;
  std::map<int32_t, int64_t> left_;  // by unit: chunks scheduled and not updated
  std::set<int> slots_;
  std::set<int> device_tracks_;
  std::map<const void*, int> queues_;  // their tracks
};

}  // namespace

void write_chrome_trace(std::ostream& out, const Layout& layout, std::span<const JournalEntry> entries,
                        std::span<const DeviceSpan> device) {
  ChromeTrace(out, layout).write(entries, device);
}

}  // namespace overspill::engine
