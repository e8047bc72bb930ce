// The rounds made alone, on two ranks that are threads: they carry shards, sums and meetings between ranks
// whose callers do something else. What a round concludes is in agreement_test.cc, the whole in
// ranks_test.cc.
#include "engine/ranks/rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/base/engine_failed.h"
#include "tests/engine/around.h"
#include "tests/engine/parts.h"
#include "tests/engine/rank_world.h"

namespace overspill::testing {
namespace {

using engine::Gatherer;
using engine::Happening;
using engine::Meeting;
using engine::Rounds;

/// What the rounds of one rank move, and the rounds.
struct Rank {
  explicit Rank(std::unique_ptr<engine::Communicator> transport,
                engine::Placement placement = engine::Placement::host)
      : o(make(std::move(transport), placement)) {
    rounds.start();
  }
  ~Rank() {
    rounds.leave();
    o->ranks.leave();
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  static std::unique_ptr<Owners> make(std::unique_ptr<engine::Communicator> transport,
                                      engine::Placement placement) {
    OwnersOptions options;
    options.config.placement = placement;
    options.time = nullptr;
    options.ranks = std::move(transport);
    return make_owners(std::move(options));
  }

  int rank() const { return o->setup.layout.shard; }
  const engine::Unit& unit(int32_t u) const { return o->setup.layout.units[u]; }

  /// This rank's shard of a unit: bytes that name the rank.
  void fill_shard(int32_t u) {
    std::memset(o->model.units[u].home, 0x40 + rank(), static_cast<size_t>(unit(u).shard_bytes()));
  }

  void give(int32_t u, int32_t segment, float value) {
    const int64_t elements = unit(u).segments[segment].elements;
    const std::vector<float> values(static_cast<size_t>(elements), value);
    const auto element = gradients.check(u, segment, elements * 4, "F32");
    const auto arrival = gradients.begin(u, segment, element);
    const Gradients::Piece piece{&arrival, 0, elements, reinterpret_cast<const std::byte*>(values.data())};
    gradients.add({&piece, 1});
    gradients.finish(arrival);
  }

  /// Of the first element of this rank's shard, as the update sees it.
  float first_sum(int32_t u) const {
    float first = 0;
    std::memcpy(&first, o->model.chunks[unit(u).first_chunk].gradient, sizeof(first));
    return first;
  }

  using Gradients = engine::Gradients;
  std::unique_ptr<Owners> o;
  engine::GradientSquares squares{o->setup, o->core, o->hardware, o->model};
  engine::DeviceUnits device_units{o->setup, o->core, o->hardware, o->model, squares};
  Gatherer gatherer{o->setup, o->core, o->hardware, o->model, o->demand};
  engine::Snapshot snapshot{o->core, o->model};
  engine::Updater updater{o->setup, o->core, o->hardware, o->model, o->demand, gatherer, snapshot};
  Gradients gradients{o->setup, o->core, o->hardware, o->model, o->ranks, device_units, squares};
  Rounds rounds{o->setup, o->core, o->ranks, o->demand, gatherer, updater, gradients};
};

std::vector<std::string> on_two_ranks(const std::function<void(Rank&)>& body) {
  return on_ranks(2, [&](int, std::unique_ptr<engine::Communicator> transport) {
    Rank rank(std::move(transport));
    body(rank);
  });
}

void expect_no_error(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(RoundsAlone, MeetOnceAllCallersAreThere) {
  std::atomic<int> there = 0;
  expect_no_error(on_two_ranks([&](Rank& rank) {
    ++there;
    int64_t sum = 0;
    rank.rounds.meet(Meeting::look, 1, [&] {
      EXPECT_EQ(there, 2) << "the body runs once all have come";
      EXPECT_TRUE(rank.rounds.here());
      std::vector<double> ones{1.0 + rank.rank()};
      rank.o->ranks.communicator->all_reduce_sum(ones);
      sum = static_cast<int64_t>(ones[0]);
    });
    EXPECT_EQ(sum, 3);
    EXPECT_FALSE(rank.rounds.here());
  }));
}

TEST(RoundsAlone, EndTheWorldWhereCallersMeetForDifferentThings) {
  const auto errors = on_two_ranks([](Rank& rank) {
    rank.rounds.meet(rank.rank() == 0 ? Meeting::step : Meeting::save, 1, [] { FAIL() << "nobody met"; });
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("step"), std::string::npos) << error;
    EXPECT_NE(error.find("save"), std::string::npos) << error;
  }
}

/// The other rank's caller computes, or waits for something else: its rounds send what is asked for.
TEST(RoundsAlone, ServeARankWhoseCallerAsksAlone) {
  std::atomic<bool> served = false;
  expect_no_error(on_two_ranks([&](Rank& rank) {
    for (int32_t u = 0; u < 2; ++u) rank.fill_shard(u);
    rank.rounds.meet(Meeting::write, 1, [] {});  // both have written
    if (rank.rank() == 1) {                      // its caller computes
      while (!served) std::this_thread::yield();
    } else {
      const MutexLock lock(rank.o->core.mutex());
      const Sets told(served);  // also where acquire() throws
      engine::Block* const block = rank.gatherer.acquire(1);
      const int64_t shard = rank.unit(1).shard_bytes();
      for (int from = 0; from < 2; ++from) {
        const std::byte* const begin = block->device + from * shard;
        EXPECT_EQ(std::count(begin, begin + shard, std::byte{static_cast<uint8_t>(0x40 + from)}), shard);
      }
      rank.gatherer.release(block, {});
    }
    rank.rounds.meet(Meeting::look, 1, [] {});
  }));
}

/// Calls a function in each exchange of weights.
class Sees final : public Around {
 public:
  Sees(std::unique_ptr<engine::Communicator> inner, const std::function<void()>& in_exchange)
      : Around(std::move(inner)), in_exchange_(in_exchange) {}
  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) override {
    in_exchange_();
    Around::exchange(send, receive);
  }

 private:
  const std::function<void()>& in_exchange_;
};

/// What a rank announced that it could send, and is not asked for, makes room while the rest is sent.
TEST(RoundsAlone, HoldOnlyWhatIsSent) {
  const auto errors = on_ranks(2, [](int, std::unique_ptr<engine::Communicator> transport) {
    Rank* watched = nullptr;
    std::atomic<bool> has_the_first = false;
    std::atomic<int> pins = -1;
    const std::function<void()> look = [&] {
      if (!has_the_first) return;
      const MutexLock lock(watched->o->core.mutex());
      const engine::Block* const block = watched->o->model.units[0].block;
      pins = block != nullptr ? block->pins : 0;
    };
    Rank rank(std::make_unique<Sees>(std::move(transport), look),
              engine::Placement::nvme);  // never written: zeros
    watched = &rank;
    rank.rounds.meet(Meeting::write, 1, [] {});
    {
      const MutexLock lock(rank.o->core.mutex());
      rank.gatherer.release(rank.gatherer.acquire(0), {});
      has_the_first = true;
      rank.gatherer.release(rank.gatherer.acquire(1), {});
    }
    EXPECT_EQ(pins, 0) << "-1: nothing was exchanged";
    rank.rounds.meet(Meeting::look, 1, [] {});
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

/// Gradients of different ranks meet in one sum, in the shard of whoever owns it; a rank that has none of a
/// segment counts as zeros.
TEST(RoundsAlone, SumWhatTheRanksHaveGiven) {
  expect_no_error(on_two_ranks([](Rank& rank) {
    {
      const MutexLock lock(rank.o->core.mutex());
      rank.o->core.journal.enable(true);
    }
    rank.give(2, 0, rank.rank() == 0 ? 1.5F : 2.0F);
    if (rank.rank() == 0) rank.give(5, 0, 3.0F);
    rank.rounds.meet(Meeting::step, 1, [&] {
      rank.rounds.sum_gradients();
      rank.gradients.reduce_presence();
    });
    const MutexLock lock(rank.o->core.mutex());
    EXPECT_TRUE(rank.gradients.present(2, 0));
    EXPECT_TRUE(rank.gradients.present(5, 0)) << "one rank's is all ranks'";
    EXPECT_FALSE(rank.gradients.present(0, 0));
    if (rank.rank() == 0) {
      EXPECT_EQ(rank.first_sum(2), (1.5F + 2.0F) / 2) << "the mean";
    }
    EXPECT_EQ(rank.first_sum(5), 3.0F / 2);
    std::vector<std::pair<Happening, int32_t>> noted;
    for (const engine::JournalEntry& entry : rank.o->core.journal.take()) {
      if (entry.unit >= 0) noted.emplace_back(entry.happening, entry.unit);
    }
    const std::vector<std::pair<Happening, int32_t>> expected{
        {Happening::summing, 2}, {Happening::summed, 2}, {Happening::summing, 5}, {Happening::summed, 5}};
    EXPECT_EQ(noted, expected);
  }));
}

/// While a rank changes weights, nobody is sent a shard: the other waits for the change there too.
TEST(RoundsAlone, SendNothingWhileWeightsChange) {
  std::atomic<bool> changing = false;
  std::atomic<bool> asked = false;
  std::atomic<bool> changed = false;
  expect_no_error(on_two_ranks([&](Rank& rank) {
    rank.fill_shard(0);
    rank.rounds.meet(Meeting::write, 1, [] {});
    const MutexLock lock(rank.o->core.mutex());
    if (rank.rank() == 1) {
      const Rounds::Change change(rank.rounds);
      changing = true;
      const engine::Unlocked unlocked(rank.o->core.mutex());
      while (!asked) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(30));  // in which a shard could come
      changed = true;
    } else {
      {
        const engine::Unlocked unlocked(rank.o->core.mutex());
        while (!changing) std::this_thread::yield();
      }
      { const Rounds::Change change(rank.rounds); }
      asked = true;
      engine::Block* const block = rank.gatherer.acquire(0);
      EXPECT_TRUE(changed) << "a shard came from a rank that was changing it";
      rank.gatherer.release(block, {});
    }
  }));
}

}  // namespace
}  // namespace overspill::testing
