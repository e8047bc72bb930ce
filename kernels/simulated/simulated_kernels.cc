#include "kernels/simulated/simulated_kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/math.h"
#include "kernels/simulated_device.h"

namespace overspill::kernels {
namespace {

class SimulatedKernels final : public DeviceKernels {
 public:
  SimulatedKernels(AddressSpace& memory, std::chrono::microseconds delay) : memory_(memory), delay_(delay) {}

  void clear(Stream& stream, void* to, int64_t bytes) override {
    run(stream, "clear", {{to, bytes}}, [=] { std::memset(to, 0, static_cast<size_t>(bytes)); });
  }

  void take_in(Stream& stream, Float from_type, const void* from, Float to_type, void* to, int64_t count,
               bool first) override {
    if (from_type == Float::fp32 && to_type == Float::bf16)
      throw DeviceError("take_in: an fp32 gradient does not go into a bf16 one");
    run(stream, "take_in", {{from, count * width(from_type)}, {to, count * width(to_type)}}, [=] {
      with_type(from_type, from, [&]<class From>(const From* source) {
        if (to_type == Float::fp32) {
          for (int64_t i = 0; i < count; ++i) kernels::take_in(source[i], first, static_cast<float*>(to)[i]);
        } else if constexpr (std::is_same_v<From, uint16_t>) {
          for (int64_t i = 0; i < count; ++i)
            kernels::take_in(source[i], first, static_cast<uint16_t*>(to)[i]);
        }
      });
    });
  }

  void squares(Stream& stream, Float type, const void* from, int64_t count, Squares* blocks) override {
    const int64_t n = squares_blocks(count);
    const auto size = static_cast<int64_t>(sizeof(Squares));
    run(stream, "squares", {{from, count * width(type)}, {blocks, n * size}}, [=] {
      with_type(type, from, [&](const auto* source) {
        for (int64_t b = 0; b < n; ++b)
          blocks[b] = squares_of_block(source + b * kSquaresBlock,
                                       std::min(kSquaresBlock, count - b * kSquaresBlock));
      });
    });
  }

  void update_adam(Stream& stream, const AdamArrays& arrays, Float gradient_type, const void* gradient,
                   int64_t count, const AdamFactors& factors) override {
    std::vector<Range> ranges = {{gradient, count * width(gradient_type)},
                                 {arrays.weight, count * (arrays.lo != nullptr ? 2 : 4)},
                                 {arrays.m, count * 4},
                                 {arrays.v, count * 4}};
    if (arrays.lo != nullptr) ranges.push_back({arrays.lo, count * 2});
    run(stream, "update_adam", std::move(ranges), [=] {
      with_type(gradient_type, gradient, [&](const auto* g) {
        for (int64_t i = 0; i < count; ++i) {
          if (arrays.lo != nullptr) {
            kernels::update_adam(factors, widen(g[i]), static_cast<uint16_t*>(arrays.weight)[i], arrays.lo[i],
                                 arrays.m[i], arrays.v[i]);
          } else {
            kernels::update_adam(factors, widen(g[i]), static_cast<float*>(arrays.weight)[i], arrays.m[i],
                                 arrays.v[i]);
          }
        }
      });
    });
  }

 private:
  struct Range {
    const void* data;
    int64_t bytes;
  };

  static int64_t width(Float type) { return type == Float::bf16 ? 2 : 4; }

  template <class Use>
  static void with_type(Float type, const void* data, Use use) {
    if (type == Float::bf16) return use(static_cast<const uint16_t*>(data));
    use(static_cast<const float*>(data));
  }

  template <class T>
  static Squares squares_of_block(const T* from, int64_t count) {
    std::array<SquaresLane, 32> lanes;
    for (int64_t i = 0; i < count; ++i) lanes[static_cast<size_t>(i % 32)].add(widen(from[i]));
    for (size_t w = 16; w > 0; w /= 2) {
      for (size_t lane = 0; lane < w; ++lane) lanes[lane].sum += lanes[lane + w].sum;
    }
    const bool finite = std::all_of(lanes.begin(), lanes.end(), [](const auto& l) { return l.finite; });
    return {lanes[0].sum, finite ? 0 : 1};
  }

  /// On the stream's thread, late, with all memory that it touches held.
  void run(Stream& stream, const char* name, std::vector<Range> ranges, std::function<void()> work) {
    if (stream.native() == nullptr)
      throw DeviceError(fmt::format("{}: not a stream of a simulated device", name));
    static_cast<SimulatedQueue*>(stream.native())
        ->enqueue([this, name, ranges = std::move(ranges), work = std::move(work)] {
          std::this_thread::sleep_for(delay_ / 2);
          hold(name, ranges, 0, work);
        });
  }
  void hold(const char* name, const std::vector<Range>& ranges, size_t next,
            const std::function<void()>& work) {
    while (next < ranges.size() && ranges[next].bytes == 0) ++next;
    if (next == ranges.size()) return work();
    memory_.with(ranges[next].data, ranges[next].bytes, name, [&] { hold(name, ranges, next + 1, work); });
  }

  AddressSpace& memory_;
  const std::chrono::microseconds delay_;
};

}  // namespace

std::unique_ptr<DeviceKernels> make_simulated_kernels(AddressSpace& memory, std::chrono::microseconds delay) {
  return std::make_unique<SimulatedKernels>(memory, delay);
}

}  // namespace overspill::kernels
