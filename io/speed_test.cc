#include "io/speed_test.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <thread>

#include "io/store.h"

namespace overspill::io {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kThreads = 4;  // of a path: keeps a disk busy
constexpr int64_t kPieceBytes = int64_t{512} << 10;
constexpr int64_t kFileBytes = int64_t{64} << 20;

// One path's file and what was moved of it.
struct Trial {
  UniqueFd fd;
  std::unique_ptr<std::byte, decltype(&std::free)> memory{nullptr, &std::free};
  std::atomic<int64_t> next = 0;     // piece to move; written in order, read from the start again
  std::atomic<int64_t> pieces = 0;   // moved
  std::atomic<int64_t> last_ns = 0;  // when the last one was
  std::atomic<bool> failed = false;
  int64_t filled_pieces = 0;  // written, so that they can be read
};

std::unique_ptr<Trial> open_trial(const JobFolder& folder) {
  auto trial = std::make_unique<Trial>();
  const auto name = folder.path() / "slab-speed";
  const int flags =
      O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | (folder.direct() ? O_DIRECT : O_DSYNC);
  trial->fd = UniqueFd(::open(name.c_str(), flags, 0600));
  ::unlink(name.c_str());
  trial->memory.reset(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, kPieceBytes)));
  if (trial->memory != nullptr) {
    uint32_t state = 1;  // nothing that a disk could compress
    std::generate_n(trial->memory.get(), kPieceBytes,
                    [&] { return static_cast<std::byte>((state = state * 1664525 + 1013904223) >> 24); });
  }
  trial->failed = !trial->fd || trial->memory == nullptr;
  return trial;
}

// One thread's part of a phase. Overwriting or reading the same pieces again is fine.
void move_pieces(Trial& trial, bool writes, std::byte* memory, Clock::time_point start,
                 std::chrono::milliseconds phase) {
  while (!trial.failed && Clock::now() - start < phase) {
    const int64_t pieces = writes ? kFileBytes / kPieceBytes : trial.filled_pieces;
    if (pieces == 0) return;
    const int64_t offset = trial.next++ % pieces * kPieceBytes;
    const ssize_t moved = writes ? ::pwrite(trial.fd.get(), memory, kPieceBytes, offset)
                                 : ::pread(trial.fd.get(), memory, kPieceBytes, offset);
    if (moved != kPieceBytes) {
      trial.failed = true;
      return;
    }
    ++trial.pieces;
    const int64_t ns = std::chrono::nanoseconds(Clock::now() - start).count();
    int64_t last = trial.last_ns;
    while (ns > last && !trial.last_ns.compare_exchange_weak(last, ns)) {
    }
  }
}

// Every path's threads, at once. The memory is shared by writers; a reader has its own.
void run_phase(std::span<const std::unique_ptr<Trial>> trials, bool writes, std::chrono::milliseconds phase) {
  const auto start = Clock::now();
  std::vector<std::jthread> threads;
  for (const auto& trial : trials) {
    trial->next = trial->pieces = trial->last_ns = 0;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&one = *trial, writes, start, phase] {
        if (writes) return move_pieces(one, true, one.memory.get(), start, phase);
        const std::unique_ptr<std::byte, decltype(&std::free)> own(
            static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, kPieceBytes)), &std::free);
        if (own != nullptr) move_pieces(one, false, own.get(), start, phase);
      });
    }
  }
}

double bytes_per_s(const Trial& trial) {
  if (trial.failed || trial.last_ns == 0) return 0;
  return static_cast<double>(trial.pieces * kPieceBytes) / static_cast<double>(trial.last_ns) * 1e9;
}

}  // namespace

std::vector<PathSpeed> measure_speeds(std::span<const JobFolder* const> folders,
                                      std::chrono::milliseconds phase) {
  std::vector<std::unique_ptr<Trial>> trials;
  for (const JobFolder* folder : folders) trials.push_back(open_trial(*folder));
  std::vector<PathSpeed> speeds(trials.size());
  run_phase(trials, true, phase);
  for (size_t i = 0; i < trials.size(); ++i) {
    Trial& trial = *trials[i];
    speeds[i].write_bytes_per_s = bytes_per_s(trial);
    trial.filled_pieces = std::min(trial.pieces.load(), kFileBytes / kPieceBytes);
    if (!trial.failed) ::posix_fadvise(trial.fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
  run_phase(trials, false, phase);
  for (size_t i = 0; i < trials.size(); ++i) speeds[i].read_bytes_per_s = bytes_per_s(*trials[i]);
  return speeds;
}

}  // namespace overspill::io
