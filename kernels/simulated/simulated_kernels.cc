#include "kernels/simulated/simulated_kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_optim/floating_point.h"
#include "cpu_optim/passes.h"
#include "kernels/launch.h"
#include "kernels/math.h"
#include "kernels/simulated_device.h"

namespace overspill::kernels {
namespace {

class SimulatedKernels final : public DeviceKernels {
 public:
  SimulatedKernels(AddressSpace& memory, std::chrono::microseconds delay) : memory_(memory), delay_(delay) {}

  Formats formats() const override { return all_formats(); }

  void clear(Stream& stream, void* to, int64_t bytes) override {
    run(stream, "clear", {{to, bytes}}, [=] { std::memset(to, 0, static_cast<size_t>(bytes)); });
  }

  void copy(Stream& stream, void* to, const void* from, int64_t bytes) override {
    run(stream, "copy", {{from, bytes}, {to, bytes}},
        [=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
  }

  void take_in(Stream& stream, optim::Element from_type, const void* from, optim::Element to_type, void* to,
               int64_t count, bool first) override {
    check_taken_in(from_type, to_type);
    run(stream, "take_in", {{from, count * optim::bytes(from_type)}, {to, count * optim::bytes(to_type)}},
        [=] {
          with_taken_in(from_type, from, to_type, to, [&](const auto* source, auto* target) {
            for (int64_t i = 0; i < count; ++i) kernels::take_in(source[i], first, target[i]);
          });
        });
  }

  void take_mean(Stream& stream, const float* sum, float factor, optim::Element to_type, void* to,
                 int64_t count, bool first) override {
    run(stream, "take_mean", {{sum, count * 4}, {to, count * optim::bytes(to_type)}}, [=] {
      optim::with_type(to_type, [&]<class T>(T) {
        for (int64_t i = 0; i < count; ++i) kernels::take_in(sum[i] * factor, first, static_cast<T*>(to)[i]);
      });
    });
  }

  void squares(Stream& stream, optim::Element type, const void* from, int64_t count,
               Squares* blocks) override {
    const int64_t n = squares_blocks(count);
    const auto size = static_cast<int64_t>(sizeof(Squares));
    run(stream, "squares", {{from, count * optim::bytes(type)}, {blocks, n * size}}, [=] {
      optim::with_type(type, [&]<class T>(T) {
        for (int64_t b = 0; b < n; ++b)
          blocks[b] = squares_of_block(static_cast<const T*>(from) + b * kSquaresBlock,
                                       std::min(kSquaresBlock, count - b * kSquaresBlock));
      });
    });
  }

  void update(Stream& stream, optim::Format format, const optim::Piece& piece, optim::Gradient gradient,
              optim::Range range, const optim::Factors& factors) override {
    const optim::Optimizer optimizer = optim::optimizer_of(factors);
    const auto specs = optim::components(optimizer, format);
    optim::for_each_pass("update", format, piece, gradient, range, factors, [&](const optim::Pass& pass) {
      std::vector<Range> ranges = {part(gradient.data, optim::bytes(gradient.element), pass.begin, pass.end)};
      for (size_t i = 0; i < specs.size(); ++i) add_touched(specs[i], piece.components[i], pass, ranges);
      with_update(
          optimizer, format, gradient.element, pass,
          [&](const auto& update_element) {
            run(stream, "update", ranges, [=, begin = pass.begin, end = pass.end] {
              for (int64_t i = begin; i < end; ++i) update_element(i);
            });
          },
          [&](const auto& update) {
            run(stream, "update", ranges, [=, blocks = blocks_of(pass)] {
              for (int64_t block = blocks.first; block < blocks.second; ++block) update_block(update, block);
            });
          });
    });
  }

 private:
  struct Range {
    const void* data;
    int64_t bytes;
  };

  /// Of an array of elements.
  static Range part(const void* data, int64_t width, int64_t begin, int64_t end) {
    return {static_cast<const std::byte*>(data) + begin * width, (end - begin) * width};
  }

  /// What a pass touches of a component: of one with scales whole blocks.
  static void add_touched(const optim::ComponentSpec& spec, const std::byte* data, const optim::Pass& pass,
                          std::vector<Range>& ranges) {
    if (!spec.scaled) return ranges.push_back(part(data, spec.element_bytes, pass.begin, pass.end));
    const auto [first, end] = blocks_of(pass);
    ranges.push_back(
        part(data, 1, first * optim::kScaleBlock, std::min(end * optim::kScaleBlock, pass.elements)));
    ranges.push_back(part(data + pass.elements, 1, first, end));
  }

  template <class Update>
  static void update_block(const Update& update, int64_t block) {
    std::array<typename Update::Element, optim::kScaleBlock> elements;
    typename Update::Scales largest;
    const int64_t begin = block * optim::kScaleBlock;
    for (size_t i = 0; i < elements.size(); ++i) {
      elements[i] = update.update(begin + static_cast<int64_t>(i));
      Update::raise(largest, elements[i]);
    }
    const auto scales = Update::scales_of(largest);
    for (size_t i = 0; i < elements.size(); ++i)
      update.store(begin + static_cast<int64_t>(i), elements[i], scales);
    update.store_scales(block, scales);
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

  /// On the stream's thread, late, with all memory that it touches held, in the mode that results are defined
  /// in.
  void run(Stream& stream, const char* name, std::vector<Range> ranges, std::function<void()> work) {
    if (stream.native() == nullptr)
      throw DeviceError(fmt::format("{}: not a stream of a simulated device", name));
    static_cast<SimulatedQueue*>(stream.native())
        ->enqueue([this, name, ranges = std::move(ranges), work = std::move(work)] {
          std::this_thread::sleep_for(delay_ / 2);
          const optim::FloatingPointMode mode;
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
