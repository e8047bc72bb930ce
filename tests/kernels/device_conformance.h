// What every device has to do (device_conformance.cc), and its kernels where it has some
// (kernel_conformance.cc). A device's test binary links these sources and instantiates:
//
//   const DeviceFactory kMine{"mine", make_my_device};
//   INSTANTIATE_TEST_SUITE_P(Mine, DeviceConformance, testing::Values(kMine), factory_name);
//   INSTANTIATE_TEST_SUITE_P(Mine, KernelConformance, testing::Values(kMine), factory_name);
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "kernels/device.h"
#include "kernels/device_kernels.h"

namespace overspill::kernels {

struct DeviceFactory {
  std::string name;
  std::function<std::unique_ptr<Device>()> make;
  std::function<std::string()> why_not = [] { return std::string(); };  // not empty: the tests are skipped
};

inline std::string factory_name(const testing::TestParamInfo<DeviceFactory>& info) {
  return info.param.name;
}

class DeviceConformance : public testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override {
    if (const std::string why = GetParam().why_not(); !why.empty()) GTEST_SKIP() << why;
    device_ = GetParam().make();
  }
  std::unique_ptr<Device> device_;
};

class KernelConformance : public DeviceConformance {
 protected:
  void SetUp() override;
  DeviceKernels* kernels_ = nullptr;
  std::unique_ptr<Stream> stream_;
};

}  // namespace overspill::kernels
