// A rank that dies, hangs or fails an update ends the others, with an error that names it, within the
// timeout; 50 random instants. And calls that do not fit together.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "tests/engine/around.h"
#include "tests/engine/rank_world.h"

namespace overspill::testing {
namespace {

using engine::Engine;
using engine::Placement;

constexpr int kWorld = 3;

enum class Way { throws, hangs, update };

/// Counts the engine's calls down to the one at which a rank fails. One that hangs does so until the others
/// have ended.
class Fuse {
 public:
  Fuse(int calls, Way way, const std::atomic<int>& ended) : left_(calls), way_(way), ended_(ended) {}
  void burn() {
    if (--left_ > 0 || way_ == Way::update) return;
    if (way_ == Way::throws) throw std::runtime_error("this rank dies here");
    while (ended_ < kWorld - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    throw std::runtime_error("this rank has hung");
  }

 private:
  int left_;
  Way way_;
  const std::atomic<int>& ended_;
};

void train(Engine& engine, int rank, Fuse* fuse) {
  const auto burn = [&] {
    if (fuse != nullptr) fuse->burn();
  };
  toy_load(engine);
  const auto units = static_cast<int>(engine.layout().units.size());
  for (int step = 0; step < 400; ++step) {
    engine.begin_pass({true, true});
    for (int u = 0; u < units; ++u) {
      burn();
      toy_forward(engine, engine.acquire(u), u);
    }
    for (int u = units - 1; u >= 0; --u) {
      const engine::Lease lease = engine.acquire(u);
      burn();
      toy_backward(engine, lease, u, step, 0, rank);
    }
    burn();
    engine.step(toy_groups(step));
  }
}

class Failing : public ::testing::TestWithParam<int> {};

TEST_P(Failing, EndsTheOthersWithAnErrorThatNamesTheRank) {
  std::mt19937 random(static_cast<unsigned>(GetParam()));
  const auto way = static_cast<Way>(GetParam() % 3);
  const int failing = static_cast<int>(random() % kWorld);
  const int stage = static_cast<int>(random() % 4);
  const int calls = 1 + static_cast<int>(random() % 60);
  SCOPED_TRACE(fmt::format("rank {} stage {} after {} calls, way {}", failing, stage, calls, GetParam() % 3));
  std::atomic<int> ended = 0;
  const auto errors = on_ranks(kWorld, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    RankOptions options{.stage = stage, .placement = Placement::half};
    if (way == Way::hangs) options.rank_timeout_ms = 1000;  // longer than a thread waits for a processor
    if (way == Way::update && rank == failing) options.write_error = 0.02;
    try {
      const auto engine = toy_rank(options, std::move(ranks));
      Fuse fuse(calls, way, ended);
      train(*engine, rank, rank == failing ? &fuse : nullptr);
    } catch (...) {
      ++ended;
      throw;
    }
  });
  for (int rank = 0; rank < kWorld; ++rank) {
    if (rank == failing) {
      EXPECT_NE(errors[rank], "");
    } else {
      EXPECT_NE(errors[rank].find(fmt::format("rank {}", failing)), std::string::npos) << errors[rank];
      EXPECT_EQ(errors[rank].find("did not join"), std::string::npos)
          << errors[rank];  // nobody waited in vain
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Instants, Failing, ::testing::Range(0, 50));

/// Of three ranks number 1 is built with other options; the others go on to their first forward.
std::vector<std::string> with_an_odd_rank(const RankOptions& odd) {
  return on_ranks(kWorld, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine =
        toy_rank(rank == 1 ? odd : RankOptions{.placement = Placement::nvme}, std::move(ranks));
    train(*engine, rank, nullptr);
  });
}

void expect_others_say(const std::vector<std::string>& errors, int failing, const std::string& reason) {
  for (int rank = 0; rank < kWorld; ++rank) {
    EXPECT_NE(errors[rank].find(reason), std::string::npos) << "rank " << rank << ": " << errors[rank];
    if (rank == failing) {
      EXPECT_EQ(errors[rank].find("rank"), std::string::npos) << "not its own error: " << errors[rank];
    } else {
      EXPECT_NE(errors[rank].find(fmt::format("rank {} aborted", failing)), std::string::npos)
          << errors[rank];
    }
  }
}

TEST(Construction, OnAFullDiskEndsTheOthers) {
  const auto errors = with_an_odd_rank({.placement = Placement::nvme, .store_bytes = 4096});
  expect_others_say(errors, 1, "no space left");
}

TEST(Construction, WithTooSmallABudgetEndsTheOthers) {
  const auto errors = with_an_odd_rank({.placement = Placement::nvme, .host_budget_bytes = 1000});
  expect_others_say(errors, 1, "budget");
}

TEST(Construction, WithWhatTheEngineRefusesEndsTheOthers) {
  const auto errors = with_an_odd_rank({.placement = Placement::nvme, .prefetch_units = -1});
  expect_others_say(errors, 1, "prefetch_units must not be negative");
}

std::vector<std::string> two_ranks(const std::function<void(Engine&, int)>& body, int other_stage = 3) {
  return on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({.stage = rank == 0 ? 3 : other_stage}, std::move(ranks));
    toy_load(*engine);
    body(*engine, rank);
  });
}

void expect_both_say(const std::vector<std::string>& errors, std::initializer_list<const char*> parts) {
  for (const std::string& error : errors) {
    for (const char* part : parts) EXPECT_NE(error.find(part), std::string::npos) << part << " in: " << error;
  }
}

TEST(Meetings, OfTwoKindsEndTheWorld) {
  expect_both_say(two_ranks([](Engine& engine, int rank) {
                    if (rank == 0) {
                      engine.step(toy_groups(0));
                    } else {
                      engine.grad_norm();
                    }
                  }),
                  {"rank 1 is at grad_norm()", "rank 0 is at step()"});
}

TEST(Meetings, ThatARankHasLeftBehindEndTheWorld) {
  const auto errors = two_ranks([](Engine& engine, int rank) {
    if (rank == 0) engine.step(toy_groups(0));
  });
  EXPECT_NE(errors[0].find("rank 1 has left the world, rank 0 is at step()"), std::string::npos) << errors[0];
}

TEST(Meetings, OfOtherStagesAreRefused) {
  const auto errors = two_ranks([](Engine& engine, int) { engine.step(toy_groups(0)); }, 2);
  expect_both_say(errors, {"rank 1 has another model, stage, chunk size or bucket than rank 0"});
}

TEST(Changes, ThatARankHasNotMadeBeforeItLeftEndTheWorld) {
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({}, std::move(ranks));
    if (rank == 1) return;
    toy_load(*engine);
    engine->begin_pass({false, false});
    toy_forward(*engine, engine->acquire(0), 0);
  });
  EXPECT_NE(errors[0].find("rank 1 has left the world after 0 changes of weights, rank 0 waits for unit 0"),
            std::string::npos)
      << errors[0];
}

TEST(Speculation, IsRefusedForSeveralRanks) {
  const auto errors = on_ranks(2, [&](int, std::unique_ptr<engine::Communicator> ranks) {
    toy_rank({.speculate = true}, std::move(ranks));
  });
  expect_both_say(errors, {"speculate needs a world of one rank"});
}

TEST(Closing, TellsWhoHasNotHeardThatTheWorldHasEnded) {
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({}, std::move(ranks));
    toy_load(*engine);
    if (rank == 1) throw std::runtime_error("this rank dies here");
    engine->close();
  });
  EXPECT_NE(errors[0].find("rank 1 aborted: its engine was destroyed by an exception"), std::string::npos)
      << errors[0];
}

TEST(Closing, SaysNothingTwice) {
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = toy_rank({}, std::move(ranks));
    if (rank == 1) throw std::runtime_error("this rank dies here");
    const auto train = [&] {
      toy_load(*engine);
      engine->step(toy_groups(0));
    };
    EXPECT_THROW(train(), engine::EngineFailed);
    engine->close();
  });
  EXPECT_EQ(errors[0], "");
}

/// Runs `visit`, once it is given, in the next call: on the thread of the rounds.
class Visited final : public Around {
 public:
  Visited(std::unique_ptr<engine::Communicator> ranks, std::shared_ptr<std::promise<void>> ended)
      : Around(std::move(ranks)), ended_(std::move(ended)) {}
  ~Visited() override { ended_->set_value(); }
  void all_gather(std::span<std::byte> data) override {
    if (const auto visit = take()) visit();
    Around::all_gather(data);
  }
  void give(std::function<void()> visit) {
    const std::lock_guard lock(mutex_);
    visit_ = std::move(visit);
  }

 private:
  std::function<void()> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(visit_, nullptr);
  }

  std::mutex mutex_;
  std::function<void()> visit_;
  const std::shared_ptr<std::promise<void>> ended_;
};

TEST(Closing, IsRefusedOnTheThreadOfTheRoundsAndLeftToAnotherByTheDestructor) {
  const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    if (rank == 1) {
      const auto engine = toy_rank({}, std::move(ranks));
      return engine->close();
    }
    const auto ended = std::make_shared<std::promise<void>>();
    std::promise<std::string> refused;
    std::unique_ptr<Engine> engine;
    auto transport = std::make_unique<Visited>(std::move(ranks), ended);
    Visited& visited = *transport;
    engine = toy_rank({}, std::move(transport));
    visited.give([&] {
      try {
        engine->close();
        refused.set_value("");
      } catch (const std::invalid_argument& error) {
        refused.set_value(error.what());
      }
      engine.reset();
    });
    EXPECT_NE(refused.get_future().get().find("on another thread"), std::string::npos);
    ended->get_future().get();  // everything of it has ended
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(Leaving, ServesWhoGoesOn) {
  const auto errors = two_ranks([](Engine& engine, int rank) {
    if (rank == 0) return;  // its engine closes at once
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    engine.begin_pass({false, false});
    for (int u = 0; u < static_cast<int>(engine.layout().units.size()); ++u)
      toy_forward(engine, engine.acquire(u), u);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace
}  // namespace overspill::testing
