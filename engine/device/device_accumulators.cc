#include "engine/device/device_accumulators.h"

#include <algorithm>
#include <stdexcept>

#include "engine/device/device_gradients.h"

namespace overspill::engine {

DeviceAccumulators::DeviceAccumulators(const Setup& setup, Hardware& hardware)
    : setup_(setup), hardware_(hardware), sums_(setup.layout.units.size()), of_(setup.layout.units.size()) {
  if (setup.plan.accumulators_device_bytes == 0) return;
  memory_ = hardware.device().allocate(setup.plan.accumulators_device_bytes);
  stream_ = hardware.device().make_stream();
  std::byte* next = memory_.data();
  for (size_t u = 0; u < sums_.size(); ++u) {
    if (!setup.plan.summed_on_device[u]) continue;
    const Unit& unit = setup.layout.units[u];
    sums_[u] = next;
    of_[u].assign(unit.segments.size(), Sum::none);
    next += accumulator_bytes(unit, setup.config.gradient_accumulation);
  }
  if (next > memory_.data() + memory_.bytes())
    throw std::logic_error("sums of gradients on the device take more than was planned");
}

DeviceAccumulators::~DeviceAccumulators() {
  settle();
}

void DeviceAccumulators::settle() noexcept {
  engine::settle(stream_.get());
}

bool DeviceAccumulators::takes(const DeviceUnits::Arrival& arrival) {
  auto& of = of_[arrival.unit];
  if (of.empty()) return false;
  if (!arrival.first && of[arrival.segment] == Sum::none) return false;
  of[arrival.segment] = Sum::ahead;
  return true;
}

kernels::Event DeviceAccumulators::take_in(const DeviceUnits::Arrival& arrival, const std::byte* data,
                                           const kernels::Event& ready) {
  const Segment& segment = setup_.layout.units[arrival.unit].segments[arrival.segment];
  stream_->wait(ready);
  hardware_.device().kernels()->take_in(*stream_, arrival.element, data, optim::Element::fp32,
                                        sums_[arrival.unit] + segment.begin * 4, segment.elements,
                                        arrival.first);
  return stream_->record();
}

const std::byte* DeviceAccumulators::sum(int32_t unit, int32_t segment) const {
  return sums_[unit] + setup_.layout.units[unit].segments[segment].begin * 4;
}

bool DeviceAccumulators::ahead(int32_t unit) const {
  return std::ranges::any_of(of_[unit], [](Sum sum) { return sum == Sum::ahead; });
}

}  // namespace overspill::engine
