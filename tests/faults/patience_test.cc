// What the engine bears with: a disk that fails once, ten times, for ever; that answers after a while, after
// 30 s, never. What is tried, told, and ended, under io_uring and under threads.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "engine/checkpoint/checkpoint_file.h"
#include "tests/faults/fuse_fixture.h"

namespace overspill::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr const char* kBackends[] = {"auto", "threads"};
// Long enough for a layer that gets no processor for a while.
constexpr milliseconds kTellAfter{200};
constexpr milliseconds kDeadline{1000};

class Patience : public Fuse {
 protected:
  /// Two steps taken; `tell_after` as given, ended after `deadline`.
  std::unique_ptr<engine::Engine> patient(const std::string& backend, milliseconds tell_after,
                                          milliseconds deadline = milliseconds(0)) {
    Rig rig{.nvme = root(), .job = fmt::format("patient-{}", ++jobs_), .backend = backend};
    rig.patience.stall.tell_after = tell_after;
    rig.io_deadline_ms = deadline.count();
    auto engine = make_engine(rig);
    toy_load(*engine);
    for (int step = 0; step < 2; ++step) toy_step(*engine, step, 1, 0);
    engine->synchronize();
    return engine;
  }

  /// What is on the captured stderr once the engine has ended: a thread of the store may still be saying a
  /// line when what it says is over.
  static std::string told_by(std::unique_ptr<engine::Engine> engine) {
    engine.reset();
    return ::testing::internal::GetCapturedStderr();
  }

  static io::PathStats path_of(engine::Engine& engine) { return engine.stats().store.paths.at(0); }

  /// A step under a disk that hangs until the stall was told `times` times.
  void step_while_it_hangs(engine::Engine& engine, const std::string& what_hangs) {
    faults_->hang = true;
    std::thread steps([&] {
      toy_step(engine, 2, 1, 0);
      engine.synchronize();
    });
    EXPECT_TRUE(eventually([&] { return faults_->hanging > 0; }));
    EXPECT_TRUE(eventually([&] { return !engine.stall().empty(); })) << "nobody was told";
    expect_says(engine.stall(), {root().string(), "has not answered for", what_hangs});
    EXPECT_GT(path_of(engine).stalls.now_ns, 0);
    faults_->hang = false;
    steps.join();
    EXPECT_TRUE(eventually([&] { return engine.stall().empty(); }));
    EXPECT_GE(path_of(engine).stalls.count, 1);
    EXPECT_GT(path_of(engine).stalls.longest_ns, 0);
  }

  int jobs_ = 0;
};

TEST_F(Patience, AReadThatFailsOnceOrTenTimesIsTriedAgainAndNothingIsLost) {
  for (const char* backend : kBackends) {
    for (const int times : {1, 10}) {
      auto engine = patient(backend, seconds(10));
      ::testing::internal::CaptureStderr();
      fail(FuseOperation::read, EIO, 0, times);
      toy_step(*engine, 2, 1, 0);
      engine->synchronize();
      EXPECT_EQ(toy_contents(*engine), Shadow().at(3));
      EXPECT_GE(path_of(*engine).retries.reads, 1);
      const std::string told = told_by(std::move(engine));
      expect_says(told, {root().string(), "read failed", "tried again"});
      EXPECT_EQ(told.find("tried again"), told.rfind("tried again")) << "once a path: " << told;
      heal();
    }
  }
}

TEST_F(Patience, AWriteThatFailsOnceOrTenTimesIsMadeInAnotherPlaceAndNothingIsLost) {
  for (const char* backend : kBackends) {
    for (const int os_error : {EIO, ENOSPC}) {
      for (const int times : {1, 10}) {
        auto engine = patient(backend, seconds(10));
        ::testing::internal::CaptureStderr();
        fail(FuseOperation::write, os_error, 0, times);
        toy_step(*engine, 2, 1, 0);
        engine->synchronize();
        EXPECT_EQ(toy_contents(*engine), Shadow().at(3));
        EXPECT_GE(path_of(*engine).retries.writes, 1);
        engine->clear_gradients();
        EXPECT_EQ(engine->stats().store.allocated_bytes, engine->plan().kept_nvme_bytes())
            << "extents leaked";
        const std::string told = told_by(std::move(engine));
        expect_says(told, {root().string(), "write failed", "tried again"});
        EXPECT_EQ(told.find("tried again"), told.rfind("tried again")) << "once a path: " << told;
        heal();
      }
    }
  }
}

TEST_F(Patience, AWriteThatFailsForEverEndsTheRunAndTheErrorSaysHowOftenItWasTried) {
  for (const char* backend : kBackends) {
    for (const int os_error : {ETIMEDOUT, ENOSPC}) {
      const auto engine = patient(backend, seconds(10));
      const fs::path checkpoint = root() / fmt::format("of {} {}", backend, os_error);
      engine->save(checkpoint, "{}");
      fail(FuseOperation::write, os_error);
      expect_says(train_until_failure(*engine, 3),
                  {"write failed", "tried 11 times", root().string(), "offset", checkpoint.string()});
      heal();
      EXPECT_EQ(contents_of(checkpoint), Shadow().at(2));
    }
  }
}

TEST_F(Patience, AFileOfACheckpointThatFailsToBeReadIsTriedAgain) {
  const auto engine = patient("auto", seconds(10));
  engine->save(root() / "linked", "{}");
  for (const int times : {1, 3}) {
    fail(FuseOperation::read, EIO, 0, times);
    EXPECT_EQ(contents_of(root() / "linked"), Shadow().at(2));
    EXPECT_EQ(faults_->failed.exchange(0), times);
    const fs::path copied =
        point_.beside(fmt::format("copied {}", times));  // on another disk: read and written
    fail(FuseOperation::read, EIO, 0, times);
    engine->save(copied, "{}");
    EXPECT_EQ(faults_->failed.exchange(0), times);
    heal();
    EXPECT_EQ(contents_of(copied), Shadow().at(2));
  }
  fail(FuseOperation::read, EIO);
  expect_says(refusal_of([&] { contents_of(root() / "linked"); }), {root().string(), "cannot be read"});
  EXPECT_GE(faults_->failed, 6) << "tried again before it was given up";
}

TEST_F(Patience, AReadThatFailsForEverEndsTheRunAndTheErrorSaysHowOftenItWasTried) {
  for (const char* backend : kBackends) {
    const auto engine = patient(backend, seconds(10));
    const fs::path checkpoint = root() / fmt::format("of {}", backend);
    engine->save(checkpoint, "{}");
    fail(FuseOperation::read, ETIMEDOUT);
    expect_says(train_until_failure(*engine, 3),
                {"read failed", "tried 11 times", root().string(), "offset", checkpoint.string()});
    heal();
    EXPECT_EQ(contents_of(checkpoint), Shadow().at(2));
  }
}

TEST_F(Patience, AShortageOfMemoryPassesOrIsCalledWhatItIs) {
  for (const FuseOperation operation : {FuseOperation::read, FuseOperation::write}) {
    const auto engine = patient("auto", seconds(10));
    fail(operation, ENOMEM, 0, 3);
    toy_step(*engine, 2, 1, 0);
    engine->synchronize();
    EXPECT_EQ(toy_contents(*engine), Shadow().at(3));
    EXPECT_GE(path_of(*engine).retries.shortages, 1);
    fail(operation, ENOMEM);
    const std::string message = train_until_failure(*engine, 3);
    expect_says(message, {"no memory", "free memory", root().string()});
    EXPECT_EQ(message.find("smartctl"), std::string::npos) << message;
    heal();
  }
}

TEST_F(Patience, OneThatAnswersLateIsToldAndNothingIsLost) {
  for (const char* backend : kBackends) {
    const auto engine = patient(backend, kTellAfter);
    ::testing::internal::CaptureStderr();
    step_while_it_hangs(*engine, " of ");
    const std::string told = ::testing::internal::GetCapturedStderr();
    expect_says(told, {"has not answered for", root().string(), "answers again"});
    EXPECT_EQ(toy_contents(*engine), Shadow().at(3));
  }
}

TEST_F(Patience, OneThatAnswersAfterHalfAMinuteIsToldTwice) {
  if (!long_run()) GTEST_SKIP() << "takes 60 s; OVERSPILL_LONG=1 runs it";
  for (const char* backend : kBackends) {
    const auto engine = patient(backend, seconds(10));
    ::testing::internal::CaptureStderr();
    faults_->hang = true;
    std::thread answer([&] {
      std::this_thread::sleep_for(seconds(30));
      faults_->hang = false;
    });
    toy_step(*engine, 2, 1, 0);
    engine->synchronize();
    answer.join();
    EXPECT_EQ(toy_contents(*engine), Shadow().at(3));
    EXPECT_TRUE(eventually([&] { return engine->stall().empty(); }));
    const std::string told = ::testing::internal::GetCapturedStderr();
    expect_says(told, {"has not answered for 1", "has not answered for 2", "answers again, after 3"});
  }
}

TEST_F(Patience, OneThatNeverAnswersEndsTheRunAfterTheDeadlineAndItsMemoryStays) {
  for (const char* backend : kBackends) {
    for (const FuseOperation operation : {FuseOperation::read, FuseOperation::write}) {
      auto engine = patient(backend, kTellAfter, kDeadline);
      const fs::path checkpoint = root() / fmt::format("of {} {}", backend, static_cast<int>(operation));
      engine->save(checkpoint, "{}");
      faults_->hangs = static_cast<uint32_t>(operation);
      faults_->hang = true;
      const std::string message = train_until_failure(*engine, 3);
      expect_says(message,
                  {operation == FuseOperation::read ? "read failed" : "write failed", "no answer",
                   root().string(), "has not answered for 1", "io_deadline_seconds", checkpoint.string()});
      EXPECT_THROW(engine->save(root() / "never", "{}"), engine::EngineFailed);
      EXPECT_THROW(engine->acquire(0), engine::EngineFailed);
      EXPECT_GT(faults_->hanging, 0) << "it had to hang all the while";
      ::testing::internal::CaptureStderr();
      engine.reset();  // while it hangs
      expect_says(::testing::internal::GetCapturedStderr(), {"stay allocated", "may still write"});
      EXPECT_GT(faults_->hanging, 0);
      faults_->hang = false;
      EXPECT_TRUE(eventually([&] { return faults_->hanging == 0; }));
      EXPECT_EQ(contents_of(checkpoint), Shadow().at(2));
    }
  }
}

TEST_F(Patience, ASaveThatIsNeverSyncedEndsWithAnErrorThatNamesTheSlab) {
  const auto engine = patient("auto", kTellAfter, kDeadline);
  engine->save(root() / "before", "{}");
  toy_step(*engine, 2, 1, 0);
  engine->synchronize();
  faults_->hangs = static_cast<uint32_t>(FuseOperation::sync);
  faults_->hang_lets_through = 1;  // that of the folder in which the save's own was made
  faults_->hang = true;
  expect_says(refusal_of([&] { engine->save(root() / "after", "{}"); }),
              {"sync failed", "no answer", "slab-0.bin", "has not answered for 1"});
  EXPECT_GT(faults_->hanging, 0);
  EXPECT_FALSE(fs::exists(root() / "after"));
  faults_->hang = false;
  EXPECT_EQ(contents_of(root() / "before"), Shadow().at(2));
}

// Whatever a save makes durable: folders above it, slabs, what was in memory, the manifest, its own name.
TEST_F(Patience, ASaveIsToldAndGivenUpWhicheverOfItsSyncsHangs) {
  for (const auto placement : {engine::Placement::nvme, engine::Placement::host}) {
    Rig rig{.nvme = root(), .placement = placement, .job = fmt::format("patient-{}", ++jobs_)};
    rig.patience.stall.tell_after = kTellAfter;
    rig.io_deadline_ms = kDeadline.count();
    const auto engine = make_engine(rig);
    toy_load(*engine);
    toy_step(*engine, 0, 1, 0);
    engine->save(root() / "before", "{}");
    faults_->hangs = static_cast<uint32_t>(FuseOperation::sync);
    int hung = 0;
    const auto after = [&] { return root() / "after" / fmt::format("{}", hung); };
    for (;; ++hung) {
      faults_->hang_lets_through = hung;
      faults_->hang = true;
      std::string refused;
      try {
        engine->save(after(), "{}");
      } catch (const io::StoreError& error) {
        refused = error.what();
      }
      faults_->hang = false;
      if (refused.empty()) break;
      expect_says(refused, {"sync failed", "no answer", root().string(), "has not answered for 1"});
      EXPECT_FALSE(fs::exists(after() / "manifest.json"));
      EXPECT_TRUE(eventually([&] { return faults_->hanging == 0; }));
    }
    EXPECT_GE(hung, 4) << "a sync of a folder above, the data, the manifest, its name";
    EXPECT_EQ(contents_of(root() / "before"), Shadow().at(1));
    EXPECT_EQ(contents_of(after()), Shadow().at(1));
    fs::remove_all(root() / "before");
    fs::remove_all(root() / "after");
  }
}

TEST_F(Patience, ACheckpointThatIsReadOrCopiedIsToldWhileTheDiskHangs) {
  Rig rig{.nvme = point_.beside("states"), .job = "patient"};
  fs::create_directory(rig.nvme);
  rig.patience.stall.tell_after = kTellAfter;
  const auto engine = make_engine(rig);
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  const auto while_it_hangs = [&](FuseOperation operation, const char* what,
                                  const std::function<void()>& call) {
    faults_->hangs = static_cast<uint32_t>(operation);
    faults_->hang = true;
    std::thread calls(call);
    EXPECT_TRUE(eventually([&] { return !engine->stall().empty(); })) << what << ": nobody was told";
    expect_says(engine->stall(), {root().string(), "has not answered for", what});
    faults_->hang = false;
    calls.join();
    EXPECT_TRUE(eventually([&] { return engine->stall().empty(); }));
  };
  while_it_hangs(FuseOperation::write, "write of ", [&] { engine->save(root() / "copied", "{}"); });
  for (const auto& entry : fs::directory_iterator(root() / "copied"))
    engine::CheckpointFile::open(entry.path()).drop_cached();  // the disk is asked
  while_it_hangs(FuseOperation::read, "read of ", [&] { engine->load(root() / "copied"); });
  EXPECT_EQ(toy_contents(*engine), Shadow().at(1));
}

}  // namespace
}  // namespace overspill::testing
