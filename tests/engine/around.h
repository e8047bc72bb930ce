// A transport around another, for tests that change a part of it.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "engine/collectives/communicator.h"

namespace overspill::testing {

class Around : public engine::Communicator {
 public:
  explicit Around(std::unique_ptr<engine::Communicator> ranks) : ranks_(std::move(ranks)) {}
  int rank() const override { return ranks_->rank(); }
  int world() const override { return ranks_->world(); }
  void all_gather(std::span<std::byte> data) override { ranks_->all_gather(data); }
  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    ranks_->all_to_all(send, receive);
  }
  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) override {
    ranks_->exchange(send, receive);
  }
  void all_reduce_sum(std::span<double> values) override { ranks_->all_reduce_sum(values); }
  bool reduces() const override { return ranks_->reduces(); }
  void reduce_scatter_sum(std::span<const std::byte> send, std::span<std::byte> sum,
                          optim::Element element) override {
    ranks_->reduce_scatter_sum(send, sum, element);
  }
  void barrier() override { ranks_->barrier(); }
  void abort(const char* reason) noexcept override { ranks_->abort(reason); }
  std::string failure() override { return ranks_->failure(); }

 private:
  const std::unique_ptr<engine::Communicator> ranks_;
};

/// Reaches the memory of a simulated device, as NCCL that of a GPU: it is host memory at addresses of its
/// own.
class Reaching final : public Around {
 public:
  Reaching(std::unique_ptr<engine::Communicator> ranks, std::shared_ptr<kernels::Device> device)
      : Around(std::move(ranks)), device_(std::move(device)) {}
  const kernels::Device* device() const override { return device_.get(); }
  void exchange_on_device(std::span<const std::span<const std::byte>> send,
                          std::span<const std::span<std::byte>> receive) override {
    exchange(send, receive);
  }

 private:
  const std::shared_ptr<kernels::Device> device_;
};

}  // namespace overspill::testing
