// What a gradient costs between its arrival and the update.
//
//   bench_intake [ROUNDS]     prints its rows, and last RESULT with a line of JSON
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <nlohmann/json.hpp>

#include "bench/intake/intake.h"

namespace {

using namespace overspill::bench;

nlohmann::json run(int rounds) {
  nlohmann::json result;
  double sum = 1e9, tail = 0;
  fmt::print("gradients in host memory, {} threads, {} rounds in turn\n", kThreads, rounds);
  for (const int64_t micro_batches : {1, 8}) {
    const HostIntake row = host_intake(micro_batches, rounds);
    fmt::print("  {} micro-batches: {:.3f} s ({:.1f} GB/s); memory alone {:.3f} s; ratio {:.3f}\n",
               row.micro_batches, row.seconds, row.bytes / row.seconds * 1e-9, row.limit_seconds, row.ratio);
    std::fflush(stdout);
    result[fmt::format("sum_vs_memory_limit_{}", micro_batches)] = row.ratio;
    result[fmt::format("gigabytes_per_s_{}", micro_batches)] = row.bytes / row.seconds * 1e-9;
    sum = std::min(sum, row.ratio);
  }
  fmt::print("gradients in a simulated device's memory, link of 25 GB/s, all by a fiftieth\n");
  for (const auto& [micro_batches, there] : {std::pair{1, false}, {8, true}, {8, false}}) {
    const DeviceIntake row = device_intake(micro_batches, there, micro_batches == 1 ? rounds : 3);
    const double share = row.tail_seconds / row.step_seconds;
    fmt::print("  {} micro-batches{}: a step {:.2f} s, after backward {:.1f} ms, {:.4f} of it\n",
               row.micro_batches,
               micro_batches == 1 ? ""
               : there            ? ", sums on the device"
                                  : ", sums on the host",
               row.step_seconds, row.tail_seconds * 1e3, share);
    std::fflush(stdout);
    result[fmt::format("tail_vs_step_{}{}", micro_batches, there ? "_sums_there" : "")] = share;
    tail = std::max(tail, share);
  }
  result["sum_vs_memory_limit"] = sum;
  result["tail_after_backward_vs_step"] = tail;
  return result;
}

}  // namespace

int main(int count, char** words) {
  const int rounds = count > 1 ? std::atoi(words[1]) : 7;
  if (count > 2 || rounds < 1) {
    fmt::print(stderr, "usage: bench_intake [ROUNDS]\n");
    return 2;
  }
  try {
    fmt::print("RESULT {}\n", run(rounds).dump());
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_intake: {}\n", error.what());
    return 1;
  }
  return 0;
}
