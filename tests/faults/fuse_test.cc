// A file system that fails under the store: errors of every operation, short reads, flipped bits, delays, one
// that hangs, one that dies.
#include <signal.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "io/lock_holder.h"
#include "tests/faults/fuse_fixture.h"
#include "tests/faults/life.h"

namespace overspill::testing {
namespace {

TEST_F(Fuse, DelaysAndShortReadsChangeNothing) {
  for (const char* backend : {"auto", "threads"}) {
    faults_->delay_us = 300;
    faults_->short_reads = true;
    const auto engine = trained(4, backend);
    fmt::print("on FUSE: {}\n", engine->stats().store.backend);
    EXPECT_EQ(toy_contents(*engine), Shadow().at(4));
    engine->save(root() / backend, "{}");
    EXPECT_EQ(contents_of(root() / backend), Shadow().at(4));
    EXPECT_GT(faults_->delayed, 0);
    EXPECT_GT(faults_->shortened, 0);
    EXPECT_GT(engine->stats().store.retries, 0);
  }
}

TEST_F(Fuse, ErrorsInTheMiddleOfARunAreTypedAndTheCheckpointOpens) {
  struct Case {
    FuseOperation operation;
    int os_error;
    std::vector<std::string> says;
  };
  const std::vector<Case> cases = {
      {FuseOperation::read, EIO, {"read failed", "device failure", "Input/output error", "check the disk"}},
      {FuseOperation::write, EIO, {"write failed", "device failure", "Input/output error", "check the disk"}},
      {FuseOperation::write, ENOSPC, {"write failed", "no space left", "free space"}},
      {FuseOperation::write, EDQUOT, {"write failed", "limit reached", "raise the quota"}},
      {FuseOperation::write,
       EROFS,
       {"write failed", "permission denied", "has stopped all writes", "choose another folder"}},
  };
  int number = 0;
  for (const char* backend : {"auto", "threads"}) {
    for (const Case& now : cases) {
      for (const int64_t let_through : {0, 7}) {
        const fs::path checkpoint = root() / fmt::format("checkpoint {}", ++number);
        const auto engine = trained(2, backend);
        engine->save(checkpoint, "{}");
        fail(now.operation, now.os_error, let_through);
        const std::string message = train_until_failure(*engine, 3);
        heal();
        expect_says(message, now.says);
        expect_says(message, {root().string(), "offset", "bytes", checkpoint.string()});
        EXPECT_THROW(engine->save(root() / "never", "{}"), engine::EngineFailed);
        EXPECT_EQ(contents_of(checkpoint), Shadow().at(2));
      }
    }
  }
  EXPECT_GE(faults_->failed, number);
}

TEST_F(Fuse, EachOperationOfASaveMayFail) {
  for (const FuseOperation operation : {FuseOperation::sync, FuseOperation::name, FuseOperation::write}) {
    int refused = 0;
    for (bool saved = false; !saved; ++refused) {
      ASSERT_LT(refused, 100);
      const auto engine = make_engine({.nvme = root(), .placement = engine::Placement::half});
      toy_load(*engine);
      toy_step(*engine, 0, 1, 0);
      const fs::path before = root() / fmt::format("before {} {}", static_cast<int>(operation), refused);
      engine->save(before, "{}");
      toy_step(*engine, 1, 1, 0);
      engine->synchronize();
      const fs::path folder = root() / fmt::format("of {} {}", static_cast<int>(operation), refused);
      fail(operation, EIO, refused);
      try {
        engine->save(folder, "{}");
        saved = true;
      } catch (const engine::CheckpointError& error) {
        expect_says(error.what(), {root().string(), "Input/output error", "; "});
      } catch (const io::StoreError& error) {
        expect_says(error.what(), {root().string(), "Input/output error", "; "});
      }
      heal();
      if (saved) {
        EXPECT_EQ(contents_of(folder), Shadow().at(2));
        break;
      }
      EXPECT_FALSE(fs::exists(folder)) << folder;
      // Where nothing can be removed, what is left is the folder without a name.
      if (operation != FuseOperation::name) {
        EXPECT_FALSE(fs::exists(folder.string() + ".partial")) << folder;
      }
      EXPECT_EQ(contents_of(before), Shadow().at(1));
      toy_step(*engine, 2, 1, 0);
      engine->save(folder, "{}");
      EXPECT_EQ(contents_of(folder), Shadow().at(3));
      fs::remove_all(before);
      fs::remove_all(folder);
    }
    fmt::print("operation {}: each of {} refused a save\n", static_cast<int>(operation), refused);
    if (operation == FuseOperation::sync) {
      // Of docs/store.md: the new name; slab, folder; resident.bin; index, folder; manifest, folder; the
      // final name.
      EXPECT_EQ(refused, 9);
    } else {
      EXPECT_GE(refused, 2);
    }
  }
}

TEST_F(Fuse, ASlabThatFailedToSyncIsCopiedAndNotLinked) {
  const auto engine = trained(2);
  const auto slabs = [&](const fs::path& folder) {
    const std::vector<std::string> names = names_in(folder);
    return std::ranges::count_if(names, [](const std::string& name) { return name.starts_with("slab-"); });
  };
  engine->save(root() / "before", "{}");
  EXPECT_GT(slabs(root() / "before"), 0);
  fail(FuseOperation::sync, EIO, 1);  // the first is the folder's, for its new entry
  expect_says(refusal_of([&] { engine->save(root() / "refused", "{}"); }), {"sync failed", "slab-0.bin"});
  heal();
  engine->save(root() / "after", "{}");  // without a step between: nothing was written anew
  EXPECT_EQ(slabs(root() / "after"), 0);
  EXPECT_EQ(contents_of(root() / "after"), Shadow().at(2));
}

/// As NFS, sshfs and most FUSE file systems do: a file that is removed while it is open gets another name in
/// its folder, which then cannot be removed.
class FuseThatKeepsOpenNames : public Fuse {
 protected:
  void prepare(FuseFaults& faults) override { faults.keeps_open_names = true; }
};

TEST_F(FuseThatKeepsOpenNames, CheckpointsAreDeletedWhileTheRunLives) {
  const auto engine = trained(1);
  int64_t allocated = 0;
  for (int step = 1; step < 6; ++step) {
    const fs::path folder = root() / fmt::format("step-{}", step);
    engine->save(folder, "{}");
    toy_step(*engine, step, 1, 0);
    engine->synchronize();
    EXPECT_EQ(contents_of(folder), Shadow().at(step));
    std::error_code error;
    fs::remove_all(folder, error);
    EXPECT_FALSE(error) << folder << ": " << error.message();
    EXPECT_FALSE(fs::exists(folder));
    if (step == 2) allocated = engine->stats().store.allocated_bytes;
  }
  EXPECT_EQ(engine->stats().store.allocated_bytes, allocated) << "what was deleted is given back";
}

/// FUSE may be a network file system: a lock that is free here may be held on another machine.
TEST_F(Fuse, ARunOnAnotherMachineIsLeftAlone) {
  const auto leave = [&](const std::string& job, const std::string& holder) {
    fs::path folder = root() / ("overspill-" + job);
    fs::create_directory(folder);
    fs::permissions(folder, fs::perms::owner_all);
    std::ofstream(folder / "lock") << holder;
    std::ofstream(folder / "slab-0.bin") << "live";
    return folder;
  };
  io::LockHolder here = io::LockHolder::self(), there = here;
  here.process = "999999";
  there.process = "77";
  there.host = "node7";
  there.boot = "of another kernel";
  const fs::path own = leave("own", here.text()), other = leave("other", there.text());
  const fs::path old = leave("old", "1234");
  ::testing::internal::CaptureStderr();
  trained(1);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_FALSE(fs::exists(own)) << "it died on this machine";
  EXPECT_TRUE(fs::exists(other / "slab-0.bin"));
  EXPECT_TRUE(fs::exists(old / "slab-0.bin")) << "where it ran is not known";
  expect_says(said, {other.string(), "process 77 on node7", "not removed", old.string()});

  leave("faults", there.text());
  expect_says(refusal_of([&] { make_engine({.nvme = root()}); }),
              {"overspill-faults", "process 77 on node7", "remove the folder"});
  EXPECT_TRUE(fs::exists(root() / "overspill-faults" / "slab-0.bin"));
}

TEST_F(Fuse, FlippedBitsAreFoundWhileTrainingAndWhileLoading) {
  const auto engine = trained(2);
  engine->save(root() / "two", "{}");
  const std::vector<float> before = toy_contents(*engine);
  faults_->flip_every = 3;
  const std::string refused = refusal_of([&] { engine->load(root() / "two"); });
  faults_->flip_every = 0;
  expect_says(refused, {(root() / "two").string()});
  EXPECT_EQ(toy_contents(*engine), before);

  faults_->flip_every = 1;  // the second reading too
  expect_says(train_until_failure(*engine, 3), {"corrupt data", "checksum", root().string(), "offset"});
  faults_->flip_every = 0;
  EXPECT_EQ(contents_of(root() / "two"), Shadow().at(2));
}

TEST_F(Fuse, ALoadThatFailsHalfWayLeavesNoMixture) {
  const auto engine = trained(2);
  engine->save(root() / "two", "{}");
  int half_loaded = 0;
  for (int64_t let_through = 0;; let_through += 17) {
    ASSERT_LT(let_through, 10'000);
    const auto other = make_engine({.nvme = root(), .job = fmt::format("other-{}", let_through)});
    toy_load(*other);
    const std::vector<float> before = toy_contents(*other);
    fail(FuseOperation::read, EIO, let_through);
    bool loaded = false;
    try {
      other->load(root() / "two");
      loaded = true;
    } catch (const engine::CheckpointError&) {
    } catch (const io::StoreError&) {
    } catch (const engine::EngineFailed&) {
    }
    heal();
    if (loaded) {
      EXPECT_EQ(toy_contents(*other), Shadow().at(2));
      break;
    }
    try {  // as it was, or no numbers at all
      EXPECT_EQ(toy_contents(*other), before);
    } catch (const engine::EngineFailed& error) {
      expect_says(error.what(), {"was cut off", (root() / "two").string()});
    } catch (const engine::CheckpointError& error) {
      expect_says(error.what(), {"of two models", (root() / "two").string()});
      other->load(root() / "two");
      EXPECT_EQ(toy_contents(*other), Shadow().at(2));
      ++half_loaded;
    }
  }
  EXPECT_GE(half_loaded, 1);
}

TEST_F(Fuse, NoSpaceToReserveIsRefusedAndLeavesNothing) {
  fail(FuseOperation::space, ENOSPC);
  expect_says(refusal_of([&] { make_engine({.nvme = root()}); }),
              {"reserve failed", "no space left", root().string(), "wanted", "available"});
  heal();
  EXPECT_TRUE(names_in(root()).empty());
}

TEST_F(Fuse, OneFailureAtTheStartIsRefusedAndLeavesNothing) {
  int refused = 0;
  for (const FuseOperation operation : {FuseOperation::name, FuseOperation::space}) {
    for (int64_t let_through = 0; let_through < 8; ++let_through) {
      fail(operation, ENOSPC, let_through, 1);
      try {
        make_engine({.nvme = root()});
      } catch (const io::StoreError& error) {
        expect_says(error.what(), {"no space left", root().string(), "errno 28"});
        EXPECT_TRUE(names_in(root()).empty()) << let_through << " " << names_in(root()).front();
        ++refused;
      }
      heal();
      make_engine({.nvme = root()});  // which also removes what could not be removed
      EXPECT_TRUE(names_in(root()).empty()) << let_through;
    }
  }
  EXPECT_GE(refused, 4) << "the folder, the lock, a slab and its space";
}

TEST_F(Fuse, OneThatDiesIsAPathThatIsGone) {
  const auto threads = make_engine({.nvme = root(), .job = "threads", .backend = "threads"});
  toy_load(*threads);
  const auto engine = trained(2);
  kill_layer();
  for (engine::Engine* one : {engine.get(), threads.get()}) {
    expect_says(train_until_failure(*one, 3), {"path is gone", root().string(), "offset", "mount it again"});
    EXPECT_THROW(one->save(root() / "never", "{}"), engine::EngineFailed);
  }
  expect_says(refusal_of([&] { make_engine({.nvme = root(), .job = "next"}); }), {"path is gone", "errno"});
  expect_says(refusal_of([&] { engine::read_manifest(root() / "any"); }), {(root() / "any").string()});
}

TEST_F(Fuse, OthersGoOnWhileOneHangs) {
  const auto engine = trained(2);
  faults_->hang = true;
  std::thread hung([&] { toy_step(*engine, 2, 1, 0); });
  EXPECT_TRUE(eventually([&] { return faults_->hanging > 0; }));
  {  // another path, in the same process
    const ScratchFolder elsewhere;
    const auto other = make_engine({.nvme = elsewhere.path(), .job = "other"});
    toy_load(*other);
    for (int step = 0; step < 5; ++step) toy_step(*other, step, 1, 0);
    other->save(elsewhere.path() / "five", "{}");
    EXPECT_EQ(contents_of(elsewhere.path() / "five"), Shadow().at(5));
  }
  EXPECT_GT(faults_->hanging, 0) << "it had to hang all the while";
  faults_->hang = false;
  hung.join();
  EXPECT_EQ(toy_contents(*engine), Shadow().at(3));
}

TEST_F(Fuse, CtrlCEndsARunOnOneThatHangs) {
  const int file = ::memfd_create("life", 0);
  ASSERT_EQ(::ftruncate(file, sizeof(Life)), 0);
  Life* life = new (map_life(file)) Life;
  const std::string here = root(), number = std::to_string(file);
  const pid_t child = ::fork();
  if (child == 0) {
    ::execl(OVERSPILL_FAULT_CHILD, "fault_child", here.c_str(), here.c_str(), "hung", number.c_str(),
            "blocking", nullptr);
    ::_exit(127);
  }
  EXPECT_TRUE(eventually([&] { return life->saves_done >= 1; }));
  faults_->hang = true;
  EXPECT_TRUE(eventually([&] { return faults_->hanging > 0; }));
  ::kill(child, SIGINT);
  int status = 0;
  EXPECT_TRUE(eventually([&] { return ::waitpid(child, &status, WNOHANG) == child; })) << "still there";
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT);
  faults_->hang = false;
  ::munmap(life, sizeof(Life));
  ::close(file);
  // Its lock went with it: the next run starts, and removes what it left.
  const auto next = trained(1);
  EXPECT_FALSE(fs::exists(root() / "overspill-hung"));
}

TEST_F(FuseThatKeepsOpenNames, HoldsAFolderWhoseDeletedFileIsOpen) {
  fs::create_directory(root() / "folder");
  std::ofstream(root() / "folder" / "file") << "open";
  std::ifstream open(root() / "folder" / "file");
  fs::remove(root() / "folder" / "file");
  EXPECT_FALSE(fs::exists(root() / "folder" / "file"));
  EXPECT_EQ(names_in(root() / "folder").size(), 1U);
  std::error_code error;
  EXPECT_FALSE(fs::remove(root() / "folder", error));
  EXPECT_EQ(error, std::errc::directory_not_empty);
}

}  // namespace
}  // namespace overspill::testing
