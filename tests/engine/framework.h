// A framework that computes on a queue of its own, ahead of the device, as PyTorch does on a CUDA stream.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "kernels/simulated_device.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

/// The toy model's forward and backward, submitted to a queue. Losses are there once the queue is done.
class Framework {
 public:
  explicit Framework(kernels::Device& device) : device_(device), stream_(device.make_stream()) {}
  ~Framework() { stream_->record().wait(); }
  Framework(const Framework&) = delete;
  Framework& operator=(const Framework&) = delete;

  engine::Queue queue() { return {stream_->native()}; }
  kernels::Stream& stream() { return *stream_; }

  void forward(engine::Engine& engine, int unit, double& loss) {
    const engine::Lease lease = engine.acquire(unit, queue());
    const auto weights = leased(lease);
    const engine::Unit& u = engine.layout().units[unit];
    then([weights, &u, &loss] {
      double own = 0;  // as toy_forward adds
      for (const engine::Segment& s : u.segments) {
        for (float w : weights_of(u, s, *weights)) own += w * w;
      }
      loss += own;
    });
  }

  void backward(engine::Engine& engine, int unit, int step, int micro, int rank) {
    const engine::Unit& u = engine.layout().units[unit];
    const engine::Lease lease = engine.acquire(unit, queue());
    if (!u.trainable()) return;
    const auto weights = leased(lease);
    for (int s = static_cast<int>(u.segments.size()) - 1; s >= 0; --s) {
      if (toy_skips(unit, s, step, rank)) continue;
      const engine::Segment& segment = u.segments[s];
      const int64_t bytes = segment.elements * u.element_bytes;
      auto gradient = std::make_shared<Buffers>();
      gradient->host.resize(static_cast<size_t>(bytes));
      gradient->device = device_.allocate(bytes);
      then([=, &u, &segment] {
        const auto made =
            toy_gradient_bytes(u.dtype, weights_of(u, segment, *weights), unit, s, step, micro, rank);
        std::copy(made.begin(), made.end(), gradient->host.begin());
      });
      stream_->copy_from_host(gradient->device.data(), gradient->host.data(), bytes);
      const std::byte* const data = gradient->device.data();
      engine.add_gradient(unit, s, engine::DeviceArray{data, bytes, u.dtype, std::move(gradient)}, queue());
    }
  }

  ToyStep step(engine::Engine& engine, int step, int micro_batches, int rank = 0) {
    ToyStep out;
    const auto units = static_cast<int>(engine.layout().units.size());
    const auto groups = toy_groups(step, engine.layout().units[0].optimizer);
    engine.expect_step(groups);
    for (int micro = 0; micro < micro_batches; ++micro) {
      engine.begin_pass({true, true});
      for (int u = 0; u < units; ++u) forward(engine, u, out.loss);
      for (int u = units - 1; u >= 0; --u) backward(engine, u, step, micro, rank);
    }
    out.result = engine.step(groups);
    stream_->record().wait();
    return out;
  }

 private:
  using Weights = std::shared_ptr<std::vector<std::byte>>;
  struct Buffers {
    std::vector<std::byte> host;
    kernels::DeviceMemory device;
  };

  static std::vector<float> weights_of(const engine::Unit& u, const engine::Segment& s,
                                       const std::vector<std::byte>& bytes) {
    return toy_widened(u.dtype, bytes.data() + s.begin * u.element_bytes, static_cast<size_t>(s.elements));
  }

  /// What the lease has when the queue gets there.
  Weights leased(const engine::Lease& lease) {
    auto weights = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(lease.bytes()));
    linger();
    stream_->copy_to_host(weights->data(), lease.data(), lease.bytes());
    kept_.push_back(weights);
    return weights;
  }

  /// The queue is behind.
  void linger() {
    const std::chrono::microseconds time(random_() % 300);
    then([time] { std::this_thread::sleep_for(time); });
  }

  void then(std::function<void()> work) {
    if (device_.name() == "simulated") {
      static_cast<kernels::SimulatedQueue*>(stream_->native())->enqueue(std::move(work));
    } else {
      stream_->record().wait();
      work();
    }
  }

  kernels::Device& device_;
  std::minstd_rand random_{7};
  std::vector<Weights> kept_;
  std::unique_ptr<kernels::Stream> stream_;
};

}  // namespace overspill::testing
