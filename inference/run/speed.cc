#include "inference/run/speed.h"

#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/widest.h"

namespace overspill::inference {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLineBytes = 64;
constexpr int kStreams = 8;  // so that no addition waits for the one before

typedef uint64_t Line __attribute__((vector_size(kLineBytes)));

WIDEST uint64_t sum_of(const std::byte* data, size_t lines) {
  const auto* const at = reinterpret_cast<const Line*>(data);
  Line sums[kStreams] = {};
  for (size_t i = 0; i + kStreams <= lines; i += kStreams) {
    __builtin_prefetch(reinterpret_cast<const char*>(at + i) + 4096);
    for (int s = 0; s < kStreams; ++s) sums[s] += at[i + static_cast<size_t>(s)];
  }
  Line total = {};
  for (const Line& sum : sums) total += sum;
  uint64_t all = 0;
  for (size_t i = 0; i < kLineBytes / sizeof(uint64_t); ++i) all += total[i];
  return all;
}

}  // namespace

double read_bytes_per_second(Team& team, std::span<const std::byte> memory) {
  const size_t lines = memory.size() / kLineBytes / static_cast<size_t>(team.size());
  if (lines == 0) return 0;
  std::atomic<uint64_t> all = 0;  // somebody has to want the sums
  const auto begin = Clock::now();
  team.run(
      [&](int thread) { all += sum_of(&memory[static_cast<size_t>(thread) * lines * kLineBytes], lines); });
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return static_cast<double>(lines * kLineBytes) * team.size() / seconds;
}

}  // namespace overspill::inference
