// Copies between pinned host memory and a GPU: through kernels/cuda beside bare cudaMemcpyAsync, in turn; up,
// down, and both at once. Prints RESULT {json}. Where there is no GPU it says why and ends with 3. Usage:
// bench_cuda_copy [MiB of each buffer, default 1024] [rounds, default 9]
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/cuda/cuda_device.h"

namespace overspill::kernels {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// Host memory in huge pages where there are some, as the engine's arenas, pinned and touched.
class PinnedArena {
 public:
  PinnedArena(Device& device, int64_t bytes) : bytes_(bytes) {
    data_ = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                   -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    ::madvise(data_, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    std::fill_n(data(), bytes, std::byte{1});
    pin_ = device.pin_host(data_, bytes);
  }
  ~PinnedArena() {
    pin_ = HostPin();
    ::munmap(data_, static_cast<size_t>(bytes_));
  }
  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  int64_t bytes_;
  void* data_ = nullptr;
  HostPin pin_;
};

struct Buffers {
  Buffers(Device& device, int64_t bytes)
      : bytes(bytes),
        host_up(device, bytes),
        host_down(device, bytes),
        up(device.allocate(bytes)),
        down(device.allocate(bytes)) {}
  int64_t bytes;
  PinnedArena host_up, host_down;
  DeviceMemory up, down;
};

struct Ways {
  bool up = false;
  bool down = false;
};

class Bare {
 public:
  Bare() {
    for (cudaStream_t* stream : {&up_, &down_})
      check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
  }
  void copy(const Buffers& b, Ways ways, int64_t piece) {
    const auto bytes = static_cast<size_t>(piece);
    for (int64_t at = 0; at < b.bytes; at += piece) {
      if (ways.up)
        check(cudaMemcpyAsync(b.up.data() + at, b.host_up.data() + at, bytes, cudaMemcpyHostToDevice, up_));
      if (ways.down)
        check(cudaMemcpyAsync(b.host_down.data() + at, b.down.data() + at, bytes, cudaMemcpyDeviceToHost,
                              down_));
    }
    check(cudaStreamSynchronize(up_));
    check(cudaStreamSynchronize(down_));
  }

 private:
  cudaStream_t up_ = nullptr, down_ = nullptr;
};

class Ours {
 public:
  explicit Ours(Device& device) : up_(device.make_stream()), down_(device.make_stream()) {}
  /// As the engine does: an event for every piece.
  void copy(const Buffers& b, Ways ways, int64_t piece) {
    Event up, down;
    for (int64_t at = 0; at < b.bytes; at += piece) {
      if (ways.up) {
        up_->copy_from_host(b.up.data() + at, b.host_up.data() + at, piece);
        up = up_->record();
      }
      if (ways.down) {
        down_->copy_to_host(b.host_down.data() + at, b.down.data() + at, piece);
        down = down_->record();
      }
    }
    up.wait();
    down.wait();
  }

 private:
  std::unique_ptr<Stream> up_, down_;
};

template <class Copier>
double gb_per_s(Copier& copier, const Buffers& buffers, Ways ways, int64_t piece) {
  const auto start = std::chrono::steady_clock::now();
  copier.copy(buffers, ways, piece);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return static_cast<double>(buffers.bytes) * (int{ways.up} + int{ways.down}) / seconds / 1e9;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

nlohmann::json measure(Bare& bare, Ours& ours, const Buffers& buffers, Ways ways, int64_t piece, int rounds) {
  gb_per_s(bare, buffers, ways, piece);  // warm
  gb_per_s(ours, buffers, ways, piece);
  std::vector<double> bare_gbs, ours_gbs, ratios;
  for (int round = 0; round < rounds; ++round) {
    bare_gbs.push_back(gb_per_s(bare, buffers, ways, piece));
    ours_gbs.push_back(gb_per_s(ours, buffers, ways, piece));
    ratios.push_back(ours_gbs.back() / bare_gbs.back());
  }
  const char* name = ways.up && ways.down ? "both" : ways.up ? "up" : "down";
  fmt::print(stderr, "{:>4}  pieces of {:>5} KiB  bare {:.2f}  ours {:.2f} GB/s  ratio {:.3f}\n", name,
             piece / 1024, median(bare_gbs), median(ours_gbs), median(ratios));
  return {{"direction", name},       {"piece_bytes", piece},
          {"bare_gb_s", bare_gbs},   {"ours_gb_s", ours_gbs},
          {"ratio", median(ratios)}, {"bytes", buffers.bytes * (int{ways.up} + int{ways.down})}};
}

int run(int64_t mib, int rounds) {
  if (const std::string why = why_no_cuda(); !why.empty()) {
    fmt::print("bench_cuda_copy: {}\n", why);
    return 3;
  }
  if (mib < 64 || mib % 64 != 0 || rounds < 1) {
    fmt::print(stderr, "bench_cuda_copy: {} MiB, {} rounds; a multiple of 64 MiB and at least one round\n",
               mib, rounds);
    return 2;
  }
  const auto device = make_cuda_device();
  device->make_current();
  const Buffers buffers(*device, mib * kMiB);
  Bare bare;
  Ours ours(*device);
  nlohmann::json rows;
  for (const int64_t piece : {256 * kMiB / 1024, 4 * kMiB, 64 * kMiB}) {
    for (const Ways ways : {Ways{true, false}, Ways{false, true}, Ways{true, true}})
      rows.push_back(measure(bare, ours, buffers, ways, piece, rounds));
  }
  fmt::print("RESULT {}\n", nlohmann::json{{"rounds", rounds}, {"copies", rows}}.dump());
  return 0;
}

}  // namespace
}  // namespace overspill::kernels

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "--help") {
    fmt::print("usage: bench_cuda_copy [MiB of each buffer, default 1024] [rounds, default 9]\n");
    return 0;
  }
  const int64_t mib = argc > 1 ? std::atoll(argv[1]) : 1024;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  return overspill::kernels::run(mib, rounds);
}
