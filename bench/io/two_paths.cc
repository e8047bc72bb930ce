// Whether two paths of different speed carry as much as both alone: a step's traffic (every extent read, its
// successor written) over each path and over both, in turn. The paths are ext4 on loop devices, throttled by
// the kernel (cgroup v1 blkio); takes root.
// Usage: bench_two_paths [folder for the images, default .] [MB/s of the one, default 60] [of the other, 20]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/file_store.h"
#include "tests/io/loop_disk.h"
#include "tests/io/step_workload.h"

namespace overspill::io {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int kSlots = 6;   // chunks in memory
constexpr int kRounds = 3;  // of A, B, both
constexpr int kWarmSteps = 2;

struct Speed {
  double bytes_per_s = 0;        // read and written, of one step
  double first_bytes_per_s = 0;  // of the first whole step, with the shares measured at open
  std::vector<double> shares;
};

// Opens a store of its own, so that each round measures its paths anew.
Speed run(const std::vector<std::filesystem::path>& paths, int chunks, std::byte* memory) {
  FileStoreOptions options;
  options.paths = paths;
  options.job = "bench";
  options.slab_bytes = 32 * kMiB;
  const auto store = make_file_store(options);
  store->reserve(3 * chunks * StepWorkload::kChunkBytes);
  StepWorkload workload(*store, chunks, kSlots, memory);
  Speed speed;
  const double bytes = 2.0 * chunks * StepWorkload::kChunkBytes;
  for (int step = 0; step <= kWarmSteps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    workload.run();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    speed.bytes_per_s = bytes / seconds;
    if (step == 0) speed.first_bytes_per_s = speed.bytes_per_s;
  }
  for (const PathStats& path : store->stats().paths) {
    speed.shares.push_back(path.share);
    fmt::print(stderr, "    {}: share {:.2f}, reads {:.1f} MB/s, writes {:.1f} MB/s, {}\n", path.path,
               path.share, path.read_bytes_per_s / 1e6, path.write_bytes_per_s / 1e6, path.access);
  }
  return speed;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int main(const std::filesystem::path& folder, double first, double second) {
  const auto mb = [](double value) { return static_cast<int64_t>(value * 1e6); };
  LoopDisk a(folder, "bench-a", 400 * kMiB);
  LoopDisk b(folder, "bench-b", 400 * kMiB);
  a.throttle(mb(first), mb(first));
  b.throttle(mb(second), mb(second));
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, kSlots * StepWorkload::kChunkBytes)),
      &std::free);
  std::fill_n(memory.get(), kSlots * StepWorkload::kChunkBytes, std::byte{1});
  std::vector<double> alone_a, alone_b, both, both_first, ratios;
  double share = 0;
  for (int round = 0; round < kRounds; ++round) {
    // Each as much as takes it about as long.
    alone_a.push_back(run({a.path()}, 12, memory.get()).bytes_per_s);
    alone_b.push_back(run({b.path()}, 4, memory.get()).bytes_per_s);
    const Speed together = run({a.path(), b.path()}, 16, memory.get());
    both.push_back(together.bytes_per_s);
    both_first.push_back(together.first_bytes_per_s);
    share = together.shares[0];
    ratios.push_back(both.back() / (alone_a.back() + alone_b.back()));
    fmt::print(stderr,
               "round {}: {:.1f} and {:.1f} MB/s alone, {:.1f} together (first step {:.1f}): {:.3f}\n",
               round + 1, alone_a.back() / 1e6, alone_b.back() / 1e6, both.back() / 1e6,
               both_first.back() / 1e6, ratios.back());
  }
  const nlohmann::json result = {{"two_paths_vs_sum", median(ratios)},
                                 {"first_MBps", median(alone_a) / 1e6},
                                 {"second_MBps", median(alone_b) / 1e6},
                                 {"both_MBps", median(both) / 1e6},
                                 {"both_first_step_MBps", median(both_first) / 1e6},
                                 {"share_of_first", share}};
  fmt::print("RESULT {}\n", result.dump());
  return 0;
}

}  // namespace
}  // namespace overspill::io

int main(int argc, char** argv) {
  const auto number = [&](int i, double otherwise) { return argc > i ? std::atof(argv[i]) : otherwise; };
  try {
    return overspill::io::main(std::filesystem::absolute(argc > 1 ? argv[1] : "."), number(2, 60),
                               number(3, 20));
  } catch (const overspill::io::NoLoopDisk& error) {
    fmt::print(stderr, "bench_two_paths: not measured: {}\n", error.what());
    return 77;
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_two_paths: {}\n", error.what());
    return 1;
  }
}
