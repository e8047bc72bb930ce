#include "engine/device/device_sums.h"

#include "engine/device/device_gradients.h"

namespace overspill::engine {

DeviceSums::DeviceSums(const Setup& setup, Hardware& hardware) : setup_(setup) {
  const Plan& plan = setup.plan;
  if (plan.sums_device_bytes == 0) return;
  memory_ = hardware.device().allocate(plan.sums_device_bytes);
  arrivals_ = hardware.device().make_stream();
  sums_ = hardware.device().make_stream();
  kernels_ = hardware.device().kernels();
}

DeviceSums::~DeviceSums() {
  settle();
}

void DeviceSums::settle() noexcept {
  engine::settle(arrivals_.get());
  engine::settle(sums_.get());
}

std::span<std::byte> DeviceSums::exchange() const {
  const int64_t slices = setup_.layout.slices;
  return {memory_.data() + memory_.bytes() - (slices + 2) * part_bytes(),
          static_cast<size_t>(slices * part_bytes())};
}

kernels::Event DeviceSums::take_in(optim::Element from_type, const std::byte* from, optim::Element to_type,
                                   std::byte* to, int64_t elements, bool first, const kernels::Event& ready) {
  arrivals_->wait(ready);
  kernels_->take_in(*arrivals_, from_type, from, to_type, to, elements, first);
  return arrivals_->record();
}

void DeviceSums::take_in(optim::Element from_type, const std::byte* from, optim::Element to_type,
                         std::byte* to, int64_t elements, bool first) {
  take_in_from_host(*kernels_, *arrivals_, {sum() + part_bytes(), static_cast<size_t>(part_bytes())},
                    from_type, from, to_type, to, elements, first);
  arrivals_->record().wait();
}

void DeviceSums::clear(std::byte* data, int64_t bytes) {
  kernels_->clear(*sums_, data, bytes);
  sums_->record().wait();
}

void DeviceSums::add(optim::Element type, const std::byte* part, int64_t elements, bool first) {
  kernels_->take_in(*sums_, type, part, optim::Element::fp32, sum(), elements, first);
}

void DeviceSums::fetch(std::span<float> to) {
  sums_->copy_to_host(to.data(), sum(), std::ssize(std::as_bytes(to)));
  sums_->record().wait();
}

void DeviceSums::take_mean(float factor, optim::Element type, std::byte* to, int64_t elements, bool first,
                           const kernels::Event& ready) {
  sums_->wait(ready);
  kernels_->take_mean(*sums_, reinterpret_cast<const float*>(sum()), factor, type, to, elements, first);
  sums_->record().wait();
}

}  // namespace overspill::engine
