// Shares of paths: how bytes are dealt out, and how fast a path is held to be.
#include "io/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "io/histogram.h"
#include "io/lane_meter.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

// What each path gets of `count` extents of mixed sizes.
std::vector<int64_t> deal(Balance& balance, size_t paths, int count, uint64_t refused = 0) {
  std::vector<int64_t> bytes(paths, 0);
  for (int i = 0; i < count; ++i) {
    const int64_t size = (i % 3 == 0 ? 1 : 2) * kMiB;  // lo, m, v
    const auto path = balance.next(size, refused);
    if (!path) return bytes;
    balance.took(*path, size);
    bytes[*path] += size;
  }
  return bytes;
}

TEST(Balance, AnyRunIsDealtOutAsTheWeightsAre) {
  Balance balance(3);
  balance.set_weight(0, 60e6);
  balance.set_weight(1, 20e6);
  balance.set_weight(2, 20e6);
  EXPECT_DOUBLE_EQ(balance.share(0), 0.6);
  for (int run = 0; run < 20; ++run) {
    const auto bytes = deal(balance, 3, 12);  // 20 MiB
    EXPECT_NEAR(static_cast<double>(bytes[0]) / kMiB, 12, 4) << run;
    EXPECT_NEAR(static_cast<double>(bytes[1]) / kMiB, 4, 3) << run;
    EXPECT_NEAR(static_cast<double>(bytes[2]) / kMiB, 4, 3) << run;
  }
  const auto many = deal(balance, 3, 3000);
  EXPECT_NEAR(static_cast<double>(many[0]) / kMiB, 3000, 4);
  EXPECT_NEAR(static_cast<double>(many[1]) / kMiB, 1000, 4);
}

TEST(Balance, EqualPathsTakeTurns) {
  Balance balance(2);
  for (size_t i = 0; i < 10; ++i) {
    EXPECT_EQ(balance.next(kMiB, 0), i % 2);
    balance.took(i % 2, kMiB);
  }
}

TEST(Balance, NewWeightsCountFromTheNextExtentOn) {
  Balance balance(2);
  deal(balance, 2, 100);
  balance.set_weight(0, 9);
  const auto bytes = deal(balance, 2, 60);  // 100 MiB
  EXPECT_NEAR(static_cast<double>(bytes[0]) / kMiB, 90, 4);
}

TEST(Balance, AClosedPathTakesNothingAndTheLastStaysOpen) {
  Balance balance(2);
  EXPECT_TRUE(balance.close(0));
  EXPECT_FALSE(balance.close(0)) << "again is no news";
  EXPECT_FALSE(balance.close(1)) << "the last";
  EXPECT_FALSE(balance.is_open(0));
  EXPECT_EQ(balance.share(0), 0);
  EXPECT_EQ(balance.share(1), 1);
  EXPECT_EQ(deal(balance, 2, 30)[0], 0);
  EXPECT_EQ(balance.next(kMiB, 2), std::nullopt);
}

TEST(Balance, APathThatWasFullIsNotFloodedAfterwards) {
  Balance balance(2);
  EXPECT_EQ(deal(balance, 2, 6000, 1)[0], 0);  // 10 GiB on the other
  const auto bytes = deal(balance, 2, 600);    // 1000 MiB
  EXPECT_GT(bytes[1], 300 * kMiB);
}

TEST(Balance, RefusesNoPathAndTooMany) {
  EXPECT_EQ(error_of([] { const Balance none(0); }).kind, ErrorKind::invalid);
  EXPECT_EQ(error_of([] { const Balance many(65); }).kind, ErrorKind::invalid);
}

TEST(Balance, AStepReadsAndWritesEveryByte) {
  EXPECT_DOUBLE_EQ(step_bytes_per_s({60e6, 60e6}), 30e6);
  EXPECT_DOUBLE_EQ(step_bytes_per_s({100, 25}), 20);
  EXPECT_EQ(step_bytes_per_s({100, 0}), 0);
}

TEST(Apportion, ByWeightUpToEachCapacity) {
  const auto parts = [](int64_t bytes, std::vector<double> weights, std::vector<int64_t> room) {
    return apportion(bytes, weights, room);
  };
  EXPECT_EQ(parts(40 * kMiB, {3, 1}, {100 * kMiB, 100 * kMiB}), (std::vector{30 * kMiB, 10 * kMiB}));
  EXPECT_EQ(parts(40 * kMiB, {3, 1}, {8 * kMiB, 100 * kMiB}), (std::vector{8 * kMiB, 32 * kMiB}));
  EXPECT_EQ(parts(40 * kMiB, {2, 1, 1}, {4 * kMiB, 100 * kMiB, 20 * kMiB}),
            (std::vector{4 * kMiB, 18 * kMiB, 18 * kMiB}));
  EXPECT_EQ(parts(40 * kMiB, {3, 1}, {8 * kMiB, 8 * kMiB}), (std::vector{8 * kMiB, 8 * kMiB})) << "too small";
  EXPECT_EQ(parts(40 * kMiB, {0, 1}, {80 * kMiB, 80 * kMiB}), (std::vector{int64_t{0}, 40 * kMiB}))
      << "closed";
  EXPECT_EQ(parts(40 * kMiB, {1, 1}, {-kMiB, 80 * kMiB}), (std::vector{int64_t{0}, 40 * kMiB}));
}

TEST(Apportion, AlwaysAllOfItWhereThereIsRoom) {
  std::mt19937_64 engine(7);
  for (int i = 0; i < 2000; ++i) {
    const auto below = [&](int64_t end) {
      return static_cast<int64_t>(engine() % static_cast<uint64_t>(end));
    };
    std::vector<double> weights;
    std::vector<int64_t> room;
    int64_t total = 0;
    for (int64_t path = 0; path < 1 + i % 5; ++path) {
      weights.push_back(1e-3 + static_cast<double>(below(1'000'000)));
      room.push_back(below(1000) * kBlockBytes + below(kBlockBytes));
      total += room.back() / kBlockBytes * kBlockBytes;
    }
    const int64_t bytes = (1 + below(2000)) * kBlockBytes;
    const auto parts = apportion(bytes, weights, room);
    int64_t sum = 0;
    for (size_t path = 0; path < parts.size(); ++path) {
      EXPECT_LE(parts[path], room[path]);
      EXPECT_EQ(parts[path] % kBlockBytes, 0);
      sum += parts[path];
    }
    ASSERT_EQ(sum, std::min(bytes, total)) << i;
  }
}

TEST(Histogram, PercentilesAreAtMostASixteenthTooHigh) {
  Histogram histogram;
  EXPECT_EQ(histogram.stats().count, 0);
  EXPECT_EQ(histogram.stats().p999_ns, 0);
  std::vector<int64_t> values;
  std::mt19937_64 engine(3);
  std::lognormal_distribution<double> distribution(13, 2);
  for (int i = 0; i < 20000; ++i) values.push_back(static_cast<int64_t>(distribution(engine)));
  for (const int64_t value : values) histogram.add(value);
  std::sort(values.begin(), values.end());
  const LatencyStats stats = histogram.stats();
  EXPECT_EQ(stats.count, 20000);
  EXPECT_EQ(stats.max_ns, values.back());
  const auto expect_near = [&](int64_t found, size_t rank) {
    const auto exact = static_cast<double>(values[rank - 1]);
    EXPECT_GE(static_cast<double>(found), exact);
    EXPECT_LE(static_cast<double>(found), exact * (1 + 1.0 / 16) + 1);
  };
  expect_near(stats.p50_ns, 10000);
  expect_near(stats.p99_ns, 19800);
  expect_near(stats.p999_ns, 19980);
}

TEST(Histogram, TakesEveryValue) {
  Histogram histogram;
  for (int bit = 0; bit < 63; ++bit) histogram.add((int64_t{1} << bit) - 1);
  histogram.add(-5);
  histogram.add(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(histogram.stats().count, 65);
  EXPECT_EQ(histogram.stats().max_ns, std::numeric_limits<int64_t>::max());
  Histogram one;
  one.add(1000);
  EXPECT_EQ(one.stats().p50_ns, 1000) << "never above the largest value";
}

// A path in played time: `depth` reads in flight, one back every `gap` ms.
class Played {
 public:
  Played() { now_ = 1; }
  void read_for(int depth, int64_t bytes, int64_t gap_ms, int pieces) {
    for (int i = 0; i < depth; ++i) meter.issued(Transfer::Kind::read);
    for (int i = 0; i < pieces; ++i) {
      now_ += gap_ms * 1'000'000;
      meter.returned(Transfer::Kind::read, bytes);
      if (i + depth < pieces) meter.issued(Transfer::Kind::read);
    }
  }
  static void idle(int64_t ms) { now_ += ms * 1'000'000; }
  LaneMeter meter{8, [] { return now_; }};

 private:
  static inline int64_t now_ = 1;
};

TEST(LaneMeter, MeasuresAPathThatIsKeptBusy) {
  Played path;
  EXPECT_EQ(path.meter.speed().read_bytes_per_s, 0) << "nothing is known yet";
  path.read_for(8, 1'000'000, 50, 200);  // 20 MB/s
  EXPECT_NEAR(path.meter.speed().read_bytes_per_s, 20e6, 1e6);
  EXPECT_EQ(path.meter.speed().write_bytes_per_s, 0);
  EXPECT_EQ(path.meter.read().busy_ns, 200 * 50'000'000LL);
}

TEST(LaneMeter, APathThatIdlesBecauseOfUsDoesNotLookSlow) {
  Played path;
  path.meter.seed({60e6, 60e6});
  for (int i = 0; i < 200; ++i) {
    path.idle(500);
    path.read_for(1, 1'000'000, 100, 3);  // one at a time, at 10 MB/s
  }
  EXPECT_EQ(path.meter.speed().read_bytes_per_s, 60e6);
  for (int i = 0; i < 200; ++i) {
    path.idle(500);
    path.read_for(8, 1'000'000, 50, 16);  // bursts, at 20 MB/s
  }
  EXPECT_NEAR(path.meter.speed().read_bytes_per_s, 20e6, 1e6);
}

TEST(LaneMeter, FollowsAChangeWithinSeconds) {
  Played path;
  path.read_for(8, 1'000'000, 10, 5000);  // 50 s at 100 MB/s
  path.read_for(8, 1'000'000, 100, 150);  // 15 s at 10 MB/s
  EXPECT_NEAR(path.meter.speed().read_bytes_per_s, 10e6, 3e6);
}

}  // namespace
}  // namespace overspill::io
