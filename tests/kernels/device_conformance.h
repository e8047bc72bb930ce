// What every device has to do (device_conformance.cc). A device's test binary links that source and
// instantiates:
//
//   INSTANTIATE_TEST_SUITE_P(MyDevice, DeviceConformance, testing::Values(DeviceFactory{"mine",
//   make_my_device}), factory_name);
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "kernels/device.h"

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

}  // namespace overspill::kernels
