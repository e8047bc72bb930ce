#include "engine/collectives/counting.h"

#include <utility>

namespace overspill::engine {
namespace {

class CountingCommunicator final : public Communicator {
 public:
  CountingCommunicator(std::unique_ptr<Communicator> ranks, std::shared_ptr<Traffic> traffic)
      : ranks_(std::move(ranks)), traffic_(std::move(traffic)) {}

  int rank() const override { return ranks_->rank(); }
  int world() const override { return ranks_->world(); }

  void all_gather(std::span<std::byte> data) override {
    ranks_->all_gather(data);
    const auto bytes = static_cast<int64_t>(data.size()) / world() * (world() - 1);
    count(traffic_->gathered, bytes, bytes);
  }

  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    ranks_->all_to_all(send, receive);
    const auto bytes = static_cast<int64_t>(send.size()) / world() * (world() - 1);
    count(traffic_->transposed, bytes, bytes);
  }

  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) override {
    ranks_->exchange(send, receive);
    count_pairs(send, receive);
  }

  const kernels::Device* device() const override { return ranks_->device(); }

  void exchange_on_device(std::span<const std::span<const std::byte>> send,
                          std::span<const std::span<std::byte>> receive) override {
    ranks_->exchange_on_device(send, receive);
    count_pairs(send, receive);
  }

  /// Counts as one call.
  void exchange_together(std::span<const Exchange> exchanges) override {
    ranks_->exchange_together(exchanges);
    int64_t sent = 0;
    int64_t received = 0;
    for (const Exchange& one : exchanges) {
      sent += bytes_of(one.send);
      received += bytes_of(one.receive);
    }
    count(traffic_->exchanged, sent, received);
  }

  void all_reduce_sum(std::span<double> values) override {
    ranks_->all_reduce_sum(values);
    const auto bytes = static_cast<int64_t>(values.size_bytes()) * (world() - 1);
    count(traffic_->reduced, bytes, bytes);
  }

  bool reduces() const override { return ranks_->reduces(); }

  void reduce_scatter_sum(std::span<const std::byte> send, std::span<std::byte> sum,
                          optim::Element element) override {
    ranks_->reduce_scatter_sum(send, sum, element);
    const auto bytes = static_cast<int64_t>(sum.size()) * (world() - 1);
    count(traffic_->scattered, bytes, bytes);
  }

  void barrier() override {
    ranks_->barrier();
    count(traffic_->barriers, 0, 0);
  }

  void abort(const char* reason) noexcept override { ranks_->abort(reason); }
  std::string failure() override { return ranks_->failure(); }

 private:
  void count_pairs(std::span<const std::span<const std::byte>> send,
                   std::span<const std::span<std::byte>> receive) {
    count(traffic_->exchanged, bytes_of(send), bytes_of(receive));
  }
  /// To or from all other ranks.
  template <class Spans>
  int64_t bytes_of(const Spans& by_rank) const {
    int64_t bytes = 0;
    for (int peer = 0; peer < world(); ++peer) {
      if (peer != rank()) bytes += static_cast<int64_t>(by_rank[peer].size());
    }
    return bytes;
  }
  static void count(Traffic::Kind& kind, int64_t sent, int64_t received) {
    ++kind.calls;
    kind.sent_bytes += sent;
    kind.received_bytes += received;
  }

  std::unique_ptr<Communicator> ranks_;
  std::shared_ptr<Traffic> traffic_;
};

}  // namespace

std::unique_ptr<Communicator> count_traffic(std::unique_ptr<Communicator> ranks,
                                            std::shared_ptr<Traffic> traffic) {
  return std::make_unique<CountingCommunicator>(std::move(ranks), std::move(traffic));
}

}  // namespace overspill::engine
