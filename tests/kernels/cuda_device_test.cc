// The CUDA device: the conformance suite and what is its own, where there is a GPU; elsewhere why there is
// none.
#include "kernels/cuda/cuda_device.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cpu_optim/gradient.h"
#include "device_conformance.h"
#include "gate.h"
#include "kernel_values.h"
#include "kernels/cuda/cuda_kernels.h"

namespace overspill::kernels {

const DeviceFactory kCuda{"cuda", [] { return make_cuda_device(); }, [] { return why_no_cuda(); }};
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceConformance, testing::Values(kCuda), factory_name);
INSTANTIATE_TEST_SUITE_P(Cuda, KernelConformance, testing::Values(kCuda), factory_name);

namespace {

TEST(CudaAbsence, IsSaidAlikeByBothFunctions) {
  const std::string why = why_no_cuda();
  if (why.empty()) GTEST_SKIP() << "there is a CUDA device";
  EXPECT_NE(why.find("CUDA"), std::string::npos) << why;
  try {
    (void)make_cuda_device();
    FAIL() << "a device although: " << why;
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.what(), why);
  }
}

TEST(CudaAbsence, OfADeviceBeyondTheLastIsAnError) {
  for (const int ordinal : {-1, 1000}) {
    EXPECT_NE(why_no_cuda(ordinal), "");
    EXPECT_THROW((void)make_cuda_device(ordinal), DeviceError);
  }
}

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
    device_ = make_cuda_device();
  }
  std::unique_ptr<Device> device_;
};

std::string what_it_throws(const Event& event) {
  try {
    event.wait();
  } catch (const DeviceError& error) {
    return error.what();
  }
  return "";
}

/// Where the driver manages pageable memory too (HMM), any address of this process may be copied to.
bool addresses_of_the_host_count() {
  std::ifstream disabled("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm");
  return disabled.get() == 'N';
}

TEST_F(Cuda, ACopyOutsideItsMemoryFailsItsStreamAndThoseThatWaitForIt) {
  if (addresses_of_the_host_count())
    GTEST_SKIP() << "the driver manages pageable memory (HMM): 0x1000 may count";
  auto stream = device_->make_stream(), other = device_->make_stream(), third = device_->make_stream();
  const DeviceMemory memory = device_->allocate(64), kept = device_->allocate(64);
  std::vector<std::byte> host(64, std::byte{1}), more(64, std::byte{2}), back(64);
  stream->copy_from_host(kept.data(), host.data(), 64);
  const Event before = stream->record();
  stream->copy_from_host(reinterpret_cast<void*>(uintptr_t{4096}), host.data(), 48);  // no device memory
  stream->copy_from_host(kept.data(), more.data(), 64);
  const Event after = stream->record();
  other->wait(after);
  other->copy_from_host(kept.data(), more.data(), 64);
  const Event dependent = other->record();

  EXPECT_EQ(what_it_throws(before), "");
  const std::string error = what_it_throws(after);
  for (const char* part : {"cuda device 0", "a copy from the host", "48 bytes", "0x1000"})
    EXPECT_NE(error.find(part), std::string::npos) << "'" << part << "' in: " << error;
  EXPECT_TRUE(after.done());
  EXPECT_EQ(what_it_throws(after), error) << "again";
  EXPECT_EQ(what_it_throws(dependent), error);
  third->copy_to_host(back.data(), kept.data(), 64);
  EXPECT_EQ(what_it_throws(third->record()), "") << "one stream's failure is no other's";
  EXPECT_EQ(back, host) << "work behind a failure was done";
}

TEST_F(Cuda, WaitsForEventsOfOtherDevices) {
  auto stream = device_->make_stream();
  const DeviceMemory memory = device_->allocate(64);
  std::vector<std::byte> host(64, std::byte{1}), back(64);
  const auto gate = std::make_shared<Gate>();
  std::thread opener([&] {
    std::fill(host.begin(), host.end(), std::byte{7});
    gate->open();
  });
  stream->wait(Event(gate));
  stream->copy_from_host(memory.data(), host.data(), 64);
  stream->copy_to_host(back.data(), memory.data(), 64);
  stream->record().wait();
  opener.join();
  EXPECT_EQ(back, std::vector<std::byte>(64, std::byte{7}));
}

TEST_F(Cuda, AFullDeviceSaysSoWithNumbersAndGoesOn) {
  try {
    (void)device_->allocate(int64_t{1} << 46);
    FAIL() << "64 TiB fit";
  } catch (const std::bad_alloc& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(int64_t{1} << 46)), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(device_->allocate(64).bytes(), 64);
}

TEST_F(Cuda, MemoryPinnedTwiceIsAnError) {
  struct alignas(4096) Page {
    std::byte data[4096];
  };
  const auto page = std::make_unique<Page>();
  const HostPin pin = device_->pin_host(page->data, sizeof(Page));
  EXPECT_THROW((void)device_->pin_host(page->data, sizeof(Page)), DeviceError);
}

TEST_F(Cuda, PoisonIsDoneWhenTheCallReturns) {
  auto stream = device_->make_stream();
  const DeviceMemory memory = device_->allocate(1 << 20);
  std::vector<std::byte> back(1 << 20);
  device_->poison(memory.data(), 1 << 20);
  stream->copy_to_host(back.data(), memory.data(), 1 << 20);
  stream->record().wait();
  EXPECT_EQ(back, std::vector<std::byte>(1 << 20, std::byte{0xFF}));
}

class CudaKernels : public Cuda {};

TEST_F(CudaKernels, NarrowAndScaleAsTheCpuDoes) {
  auto stream = device_->make_stream();
  for (const int64_t count : kCounts) {
    auto from = values(count, 4, false);
    const DeviceMemory x = device_->allocate(count * 4), to = device_->allocate(count * 2);
    stream->copy_from_host(x.data(), from.data(), count * 4);
    cuda::narrow(*stream, reinterpret_cast<const float*>(x.data()), reinterpret_cast<uint16_t*>(to.data()),
                 count);
    cuda::scale(*stream, reinterpret_cast<float*>(x.data()), 0.3F, count);
    std::vector<uint16_t> narrowed(from.size()), expected(from.size());
    std::vector<float> scaled(from.size());
    stream->copy_to_host(narrowed.data(), to.data(), count * 2);
    stream->copy_to_host(scaled.data(), x.data(), count * 4);
    stream->record().wait();
    optim::narrow(std::span<const float>(from), std::span(expected));
    optim::scale(std::span(from), 0.3F);
    EXPECT_EQ(narrowed, expected);
    for (size_t i = 0; i < from.size(); ++i) ASSERT_TRUE(same(scaled[i], from[i])) << i;
  }
}

}  // namespace
}  // namespace overspill::kernels
