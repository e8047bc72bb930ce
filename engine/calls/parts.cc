// Weights that are read, and gradients that are given, in parts (engine.h).
#include <fmt/format.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/calls/calls.h"
#include "engine/calls/machine.h"
#include "engine/engine.h"
#include "engine/gradients/gradient_parts.h"
#include "io/say.h"

namespace overspill::engine {
namespace {

void require_host(const Machine& m, const char* what) {
  require_world_one(m.setup.layout, what);
  if (!m.hardware.shared_device->shares_host_memory())
    throw std::invalid_argument(fmt::format("{} needs a device that shares the host's memory", what));
}

}  // namespace

void Engine::read_part(int32_t unit, int32_t segment, int64_t begin, std::span<std::byte> out) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  const Unit& u = m.unit_at(unit);
  require_host(m, "reading a part of a weight");
  const auto bytes = std::ssize(out);
  if (begin < 0 || bytes % u.element_bytes != 0 || bytes / u.element_bytes > s.elements - begin) {
    throw std::invalid_argument(
        fmt::format("{} bytes from element {} of {} on: it has {} elements of {} bytes", bytes, begin, s.name,
                    s.elements, u.element_bytes));
  }
  if (u.part_bytes == 0) throw std::invalid_argument(fmt::format("{} is not read in parts", s.name));
  const InCall call(m.core);
  {
    const MutexLock lock(m.core.mutex());
    m.core.check();
    ++m.core.progress;
    m.core.meter.reached(unit);
    m.gatherer.trace().acquired(unit);
    m.core.journal.note(Happening::acquired, unit);
    if (m.model.units[unit].pending_chunks > 0) {
      m.demand.want_updates(unit);
      m.updater.pump();
    }
    m.updater.wait_for(unit);
  }
  m.gatherer.parts().read(unit, (s.begin + begin) * u.element_bytes, out);
}

PartedGradient Engine::begin_gradient(int32_t unit, int32_t segment, std::string_view dtype) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  require_host(m, "a gradient in parts");
  const optim::Element element = m.gradients.check(unit, segment, dtype);
  const InCall call(m.core);
  settle_clip(m, s);
  return {machine_, std::make_unique<GradientParts>(m.setup, m.intake, m.gradients, unit, segment, element)};
}

PartedGradient::PartedGradient(std::shared_ptr<Machine> machine, std::unique_ptr<GradientParts> parts)
    : machine_(std::move(machine)), parts_(std::move(parts)) {}

PartedGradient::PartedGradient(PartedGradient&& other) noexcept = default;

PartedGradient& PartedGradient::operator=(PartedGradient&& other) noexcept {
  if (this == &other) return *this;
  break_off();
  machine_ = std::move(other.machine_);
  parts_ = std::move(other.parts_);
  return *this;
}

PartedGradient::~PartedGradient() {
  break_off();
}

void PartedGradient::break_off() noexcept {
  if (parts_ == nullptr || !machine_->process.here()) return;
  try {
    parts_->break_off();
  } catch (const std::exception& error) {
    io::say_on_stderr(fmt::format("overspill: a gradient that was given in part: {}", error.what()));
  }
  parts_.reset();
}

GradientParts& PartedGradient::parts() const {
  if (parts_ == nullptr) throw std::invalid_argument("this gradient has ended: begin another");
  machine_->check_process();
  if (machine_->closed) throw std::invalid_argument(std::string(kClosed));
  return *parts_;
}

void PartedGradient::add(std::span<const std::byte> data) {
  GradientParts& own = parts();
  const InCall call(machine_->core);
  own.add(data);
}

void PartedGradient::finish() {
  GradientParts& own = parts();
  const InCall call(machine_->core);
  own.finish();
  parts_.reset();
}

}  // namespace overspill::engine
