// Engines of several ranks in one process, a thread each.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/collectives/counting.h"
#include "engine/engine.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

struct RankOptions {
  int stage = 3;
  engine::Placement placement = engine::Placement::host;
  std::string device = "host";
  std::shared_ptr<kernels::Device> given_device = nullptr;  // in place of the name
  int64_t device_budget_bytes = 0;
  bool reaches = false;  // the device's memory is reached by what carries bytes between ranks
  int micro_batches = 1;
  bool together = false;  // micro-batches pass each unit together
  int64_t prefetch_units = 4;
  int64_t bucket_bytes = 1 << 20;
  int64_t host_budget_bytes = 64 << 20;
  double max_grad_norm = 1.0;
  int64_t rank_timeout_ms = 60'000;
  bool speculate = false;
  bool library_sums = false;
  bool sum_over_ranks = false;
  bool poison = true;                        // waits for a device where memory is given up
  double write_error = 0;                    // of the store: how often
  std::chrono::milliseconds store_delay{0};  // of each transfer
  int64_t store_bytes = 64 << 20;            // of a store with errors, or with another size than this
  std::string job = "ranks";
  ToyKind kind = {};
};

/// One rank's engine of any model.
std::unique_ptr<engine::Engine> model_rank(const std::vector<engine::UnitSpec>& units,
                                           const RankOptions& options,
                                           std::unique_ptr<engine::Communicator> ranks,
                                           std::shared_ptr<engine::Traffic> traffic = nullptr);

/// One rank's engine of the toy model; its traffic goes to `traffic` where that is not null.
std::unique_ptr<engine::Engine> toy_rank(const RankOptions& options,
                                         std::unique_ptr<engine::Communicator> ranks,
                                         std::shared_ptr<engine::Traffic> traffic = nullptr);

/// Sets a flag at its end.
class Sets {
 public:
  explicit Sets(std::atomic<bool>& flag) : flag_(flag) {}
  ~Sets() { flag_ = true; }
  Sets(const Sets&) = delete;
  Sets& operator=(const Sets&) = delete;

 private:
  std::atomic<bool>& flag_;
};

/// Runs body(rank, communicator) on a thread a rank. Returns what each threw, "" for nothing.
std::vector<std::string> on_ranks(int world,
                                  const std::function<void(int, std::unique_ptr<engine::Communicator>)>& body,
                                  std::chrono::milliseconds timeout = std::chrono::seconds(60));

/// Of losses, norms and everything that toy_contents gives: the same bits, the same number.
uint64_t digest(const std::vector<float>& contents, const std::vector<engine::StepResult>& results);

}  // namespace overspill::testing
