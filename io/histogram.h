// A histogram of durations with fixed memory: log-linear buckets as in HdrHistogram (G. Tene), 16 to each
// power of two, so a percentile is at most 1/16 too high.
//
// Threads: any thread may add or read; counters are relaxed, an addition is one increment.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "io/store.h"

namespace overspill::io {

class Histogram {
 public:
  void add(int64_t ns) {
    const auto value = static_cast<uint64_t>(std::max<int64_t>(ns, 0));
    buckets_[bucket_of(value)].fetch_add(1, std::memory_order_relaxed);
    uint64_t max = max_.load(std::memory_order_relaxed);
    while (value > max && !max_.compare_exchange_weak(max, value, std::memory_order_relaxed)) {
    }
  }

  LatencyStats stats() const {
    std::array<uint64_t, kBuckets> counts;
    uint64_t total = 0;
    for (size_t i = 0; i < kBuckets; ++i) total += counts[i] = buckets_[i].load(std::memory_order_relaxed);
    const uint64_t max = max_.load(std::memory_order_relaxed);
    // The smallest bucket with at least `part` of all values in it and below.
    const auto percentile = [&](double part) {
      const auto rank = static_cast<uint64_t>(std::ceil(part * static_cast<double>(total)));
      uint64_t seen = 0;
      for (size_t i = 0; i < kBuckets; ++i) {
        seen += counts[i];
        if (total > 0 && seen >= rank) return static_cast<int64_t>(std::min(upper_end(i), max));
      }
      return int64_t{0};
    };
    return {.count = static_cast<int64_t>(total),
            .p50_ns = percentile(0.5),
            .p99_ns = percentile(0.99),
            .p999_ns = percentile(0.999),
            .max_ns = static_cast<int64_t>(max)};
  }

 private:
  static constexpr int kSubBits = 4;
  static constexpr size_t kSub = size_t{1} << kSubBits;
  static constexpr int kTopBit = 40;  // 2^41 ns, 36 minutes, and above share the last bucket
  static constexpr size_t kBuckets = (kTopBit - kSubBits + 2) * kSub;

  static size_t bucket_of(uint64_t value) {
    if (value < kSub) return value;
    const int top = static_cast<int>(std::bit_width(value)) - 1;
    if (top > kTopBit) return kBuckets - 1;
    return static_cast<size_t>(top - kSubBits + 1) * kSub + (value >> (top - kSubBits) & (kSub - 1));
  }
  /// The largest value of a bucket.
  static uint64_t upper_end(size_t bucket) {
    if (bucket < kSub) return bucket;
    if (bucket == kBuckets - 1) return ~uint64_t{0};
    const auto shift = bucket / kSub - 1;
    return ((kSub + bucket % kSub + 1) << shift) - 1;
  }

  std::array<std::atomic<uint64_t>, kBuckets> buckets_{};
  std::atomic<uint64_t> max_ = 0;
};

}  // namespace overspill::io
