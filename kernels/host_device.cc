#include "kernels/host_device.h"

#include <fmt/format.h>

#include <cstring>
#include <new>

namespace overspill::kernels {
namespace {

constexpr std::align_val_t kAlignment{4096};

void copy(void* to, const void* from, int64_t bytes) {
  if (bytes < 0) throw DeviceError(fmt::format("host device: a copy of {} bytes", bytes));
  // Resident memory is used in place: a copy onto itself is normal here.
  if (bytes == 0 || to == from) return;
  std::memmove(to, from, static_cast<size_t>(bytes));
}

/// Work is done when submitted, so every event is reached, and there is nothing to wait for but other
/// devices' events.
class HostStream final : public Stream {
 public:
  void copy_from_host(void* device, const void* host, int64_t bytes) override { copy(device, host, bytes); }
  void copy_to_host(void* host, const void* device, int64_t bytes) override { copy(host, device, bytes); }
  Event record() override { return Event(); }
  void wait(const Event& event) override { event.wait(); }
  void* native() override { return nullptr; }
};

class HostDevice final : public Device {
 public:
  std::string_view name() const override { return "host"; }
  bool shares_host_memory() const override { return true; }

  DeviceMemory allocate(int64_t bytes) override {
    if (bytes < 0) throw DeviceError(fmt::format("host device: an allocation of {} bytes", bytes));
    if (bytes == 0) return DeviceMemory();
    void* data = ::operator new(static_cast<size_t>(bytes), kAlignment);
    return DeviceMemory(data, bytes, free, nullptr);
  }

  DeviceMemory allocate_nan(int64_t bytes) override {
    DeviceMemory memory = allocate(bytes);
    poison(memory.data(), bytes);
    return memory;
  }

  std::unique_ptr<Stream> make_stream() override { return std::make_unique<HostStream>(); }
  std::unique_ptr<Stream> adopt_stream(void*) override { return make_stream(); }

  HostPin pin_host(void*, int64_t) override { return HostPin(); }
  void make_current() override {}
  void time_events(bool) override {}

  void poison(void* device, int64_t bytes) override {
    if (bytes > 0) std::memset(device, 0xFF, static_cast<size_t>(bytes));
  }

 private:
  static void free(void*, void* data, int64_t) noexcept { ::operator delete(data, kAlignment); }
};

}  // namespace

std::unique_ptr<Device> make_host_device() {
  return std::make_unique<HostDevice>();
}

}  // namespace overspill::kernels
