// SIGKILL at random instants of a run with kept checkpoints on the store's own disk: every checkpoint with a
// name is whole and bit-equal to a run that nothing disturbed, what the dead run left goes at the next start,
// what lives stays. Saves that stop training, and saves in the background over two disks. As root and as
// nobody with 8 MiB of lockable memory; every third life without io_uring.
//
//   OVERSPILL_KILLS=200  how many (default 12; 200 with OVERSPILL_LONG=1)
//   OVERSPILL_SEED=n     of the instants
#include <fcntl.h>
#include <linux/limits.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <string_view>

#include "io/file_store.h"
#include "io/part_folder.h"
#include "tests/faults/life.h"
#include "tests/faults/scene.h"
#include "tests/io/store_test_util.h"

namespace overspill::testing {
namespace {

constexpr uid_t kNobody = 65534;

int64_t number_from(const char* name, int64_t otherwise) {
  const char* text = ::getenv(name);
  return text == nullptr ? otherwise : std::stoll(text);
}

/// Where it is there, memory is another file system than the scratch folder's.
fs::path other_disk() {
  const fs::path memory = "/dev/shm";
  return fs::is_directory(memory) ? memory : fs::temp_directory_path();
}

class Killed : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    nobody_ = std::string(GetParam()) == "nobody";
    if (nobody_ && ::geteuid() != 0)
      GTEST_SKIP() << "only root can become nobody; this user is tested as 'self'";
    nvme_ = scratch_.path() / "nvme";
    second_nvme_ = second_.path() / "nvme";
    checkpoints_ = scratch_.path() / "checkpoints";
    for (const fs::path& folder : {nvme_, second_nvme_, checkpoints_}) {
      fs::create_directory(folder);
      if (nobody_) {
        ASSERT_EQ(::chown(folder.c_str(), kNobody, kNobody), 0);
      }
    }
    for (const ScratchFolder* folder : {&scratch_, &second_}) {
      if (nobody_) fs::permissions(folder->path(), fs::perms(0755));
    }
    life_file_ = ::memfd_create("life", 0);
    ASSERT_GE(life_file_, 0);
    ASSERT_EQ(::ftruncate(life_file_, sizeof(Life)), 0);
    life_ = map_life(life_file_);
    program_ = ::open(OVERSPILL_FAULT_CHILD, O_RDONLY | O_CLOEXEC);
    ASSERT_GE(program_, 0) << OVERSPILL_FAULT_CHILD;
  }
  void TearDown() override {
    if (life_ != nullptr) ::munmap(life_, sizeof(Life));
    if (life_file_ >= 0) ::close(life_file_);
    if (program_ >= 0) ::close(program_);
  }

  /// `way`: "blocking", or the second path of a run whose saves are in the background.
  pid_t start(const std::string& job, const std::string& way, bool io_uring) {
    new (life_) Life;
    const std::string life_fd = std::to_string(life_file_);
    const std::array<const char*, 8> arguments = {"fault_child",
                                                  nvme_.c_str(),
                                                  checkpoints_.c_str(),
                                                  job.c_str(),
                                                  life_fd.c_str(),
                                                  way.c_str(),
                                                  io_uring ? nullptr : "no-io_uring",
                                                  nullptr};
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    const rlimit limit{8 * kMiB, 8 * kMiB};
    const bool ready = ::setrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
                       (!nobody_ || (::setgid(kNobody) == 0 && ::setuid(kNobody) == 0));
    // By descriptor: others may not be able to search the folder that the program lies in.
    if (ready) ::fexecve(program_, const_cast<char* const*>(arguments.data()), environ);
    ::_exit(98);
  }

  /// Waits for the instant; true if the child was killed, false if it ended by itself, which is a failure.
  bool kill_at_random(pid_t pid, std::mt19937_64& random, bool in_save) {
    using std::chrono::microseconds;
    const auto pause = [&](int64_t most_us) {
      std::this_thread::sleep_for(microseconds(std::uniform_int_distribution<int64_t>(0, most_us)(random)));
    };
    if (in_save) {
      const int64_t wanted = 1 + static_cast<int64_t>(random() % 3);
      eventually([&] { return life_->saves_begun >= wanted || dead(pid); });
      if (life_->save_us > 0) save_us_ = life_->save_us;
      pause(save_us_);
    } else {
      pause(life_us_);
    }
    if (dead(pid)) return false;
    ::kill(pid, SIGKILL);
    int status = 0;
    return ::waitpid(pid, &status, 0) == pid && WIFSIGNALED(status);
  }

  static bool dead(pid_t pid) {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid == pid;
  }

  /// Once a run has started, what those before it left is gone.
  void check_folders(const std::string& job) {
    if (life_->started == 0) return;
    for (const fs::path& path : {nvme_, second_nvme_}) {
      for (const std::string& name : names_in(path)) {
        const bool is_part = path == second_nvme_ && name.starts_with("checkpoint-");
        EXPECT_TRUE(is_part || name == "overspill-" + job || name == "overspill-bystander") << path / name;
      }
    }
  }

  /// How far the save under way had come, by what it left.
  std::string phase() const {
    if (life_->started == 0) return "starting";
    if (life_->saving == 0) return "no save under way";
    const std::string step = std::to_string(life_->saving);
    if (fs::exists(checkpoints_ / step)) return "named";
    const std::vector<std::string> files = names_in(checkpoints_ / (step + ".partial"));
    const auto has = [&](std::string_view prefix) {
      return std::ranges::any_of(files, [&](const std::string& name) { return name.starts_with(prefix); });
    };
    if (has(engine::kManifestFile)) return "manifest begun";
    if (has("index.bin")) return "index begun";
    if (has(io::kPartPrefix)) return "part begun";
    return has("shared-") ? "first slab linked" : "states being taken";
  }

  /// Every part of a checkpoint is named by one, or by a save that was cut off: else nobody would remove it.
  void check_parts() {
    std::set<std::string> named;
    for (const std::string& name : names_in(checkpoints_)) {
      for (const io::PartFolder& part : io::parts_of(checkpoints_ / name))
        named.insert(part.path.filename().string());
    }
    for (const std::string& name : names_in(second_nvme_)) {
      if (name.starts_with("overspill-")) continue;
      EXPECT_TRUE(named.contains(name)) << name << " is named by nobody";
      ++parts_;
    }
  }

  /// Every checkpoint with a name is whole; the newest is bit for bit what it should be.
  void check_checkpoints() {
    check_parts();
    int64_t newest = 0, removed = 0;
    for (const std::string& name : names_in(checkpoints_)) {
      const fs::path folder = checkpoints_ / name;
      if (name.ends_with(".partial")) {
        ++partials_;
        continue;
      }
      if (!fs::exists(folder / engine::kManifestFile)) {  // its removal was cut off
        removed = std::max<int64_t>(removed, std::stoll(name));
        continue;
      }
      const engine::VerifyResult whole = engine::verify_checkpoint(folder, nullptr, nullptr);
      EXPECT_EQ(std::to_string(whole.step), name);
      ++verified_;
      newest = std::max(newest, whole.step);
    }
    ASSERT_GE(newest, newest_) << "the last complete checkpoint is gone";
    EXPECT_TRUE(removed == 0 || removed < newest) << removed << " has its name and no manifest";
    newest_ = newest;
    if (newest == 0) return;
    EXPECT_EQ(contents_of(checkpoints_ / std::to_string(newest)), shadow_.at(newest));
  }

  ScratchFolder scratch_, second_{other_disk()};
  fs::path nvme_, second_nvme_, checkpoints_;
  bool nobody_ = false;
  int life_file_ = -1, program_ = -1;
  Life* life_ = nullptr;
  Shadow shadow_;
  int64_t newest_ = 0, verified_ = 0, partials_ = 0, parts_ = 0;
  // Drawn from 0 to these: about what a start and some steps, and a save, take here.
  int64_t life_us_ = 250'000, save_us_ = 12'000;
};

TEST_P(Killed, AtAnyInstantTheLastCheckpointIsWhole) {
  const int64_t kills = number_from("OVERSPILL_KILLS", long_run() ? 200 : 12);
  const auto seed = static_cast<uint64_t>(number_from("OVERSPILL_SEED", 1));
  fmt::print("seed {}\n", seed);
  std::mt19937_64 random(seed);

  // Somebody else's live run on the same disk.
  const auto bystander = io::make_file_store(io::file_options(nvme_, "bystander"));
  bystander->reserve(4 * kMiB);
  const io::Extent theirs = bystander->allocate(kMiB);
  io::AlignedMemory memory(kMiB), expected(kMiB);
  expected.fill(seed);
  memory.fill(seed);
  ASSERT_FALSE(io::write(*bystander, theirs, memory));

  int64_t in_start = 0, in_save = 0, in_training = 0;
  for (int64_t number = 0; number < kills; ++number) {
    const std::string job = fmt::format("run-{}", number);
    const pid_t pid = start(job, "blocking", number % 3 != 2);
    ASSERT_TRUE(kill_at_random(pid, random, number % 2 == 1)) << "child " << number << " ended by itself";
    const bool hit_save = life_->saves_begun != life_->saves_done;
    ++(hit_save ? in_save : life_->steps > 0 ? in_training : in_start);
    check_folders(job);
    check_checkpoints();
    if (HasFailure()) FAIL() << "after kill " << number << " of seed " << seed;
  }
  EXPECT_GT(in_save, 0) << "no save was hit, so this run tested nothing of it";
  ASSERT_FALSE(io::read(*bystander, theirs, memory));
  EXPECT_TRUE(memory == expected) << "a live run's bytes were touched";
  fmt::print(
      "as {}: {} kills: {} while starting, {} while training, {} while saving; {} checkpoints verified, "
      "{} cut-off saves seen, step {} reached\n",
      GetParam(), kills, in_start, in_training, in_save, verified_, partials_, newest_);

  // One more start, and all that is left is removed; a new save takes a cut-off one's place.
  const pid_t last = start("last", "blocking", true);
  EXPECT_TRUE(eventually([&] { return life_->saves_done >= 1 || dead(last); }));
  ::kill(last, SIGKILL);
  int status = 0;
  ::waitpid(last, &status, 0);
  check_checkpoints();
  EXPECT_EQ(names_in(nvme_).size(), 2u);
}

TEST_P(Killed, WhileItSavesInTheBackgroundTheLastCheckpointIsWhole) {
  const int64_t kills = number_from("OVERSPILL_KILLS", long_run() ? 200 : 12);
  const auto seed = static_cast<uint64_t>(number_from("OVERSPILL_SEED", 1));
  fmt::print("seed {}\n", seed);
  std::mt19937_64 random(seed);
  std::map<std::string, int64_t> phases;
  for (int64_t number = 0; number < kills; ++number) {
    const std::string job = fmt::format("run-{}", number);
    const pid_t pid = start(job, second_nvme_.string(), number % 3 != 2);
    ASSERT_TRUE(kill_at_random(pid, random, true)) << "child " << number << " ended by itself";
    ++phases[phase()];
    check_folders(job);
    check_checkpoints();
    if (HasFailure()) FAIL() << "after kill " << number << " of seed " << seed;
  }
  std::string hit;
  for (const auto& [phase, times] : phases) hit += fmt::format("{} {}, ", times, phase);
  fmt::print(
      "as {}: {} kills: {}{} checkpoints verified, {} cut-off saves and {} parts seen, step {} reached\n",
      GetParam(), kills, hit, verified_, partials_, parts_, newest_);
  const int64_t missed = phases["no save under way"] + phases["named"];
  EXPECT_GT(kills - missed, kills / 4) << "three of four kills hit no save, so this run tested little of it";

  // Training goes on from what is left, and a new save takes a cut-off one's place.
  const pid_t last = start("last", second_nvme_.string(), true);
  EXPECT_TRUE(eventually([&] { return life_->saves_done >= 2 || dead(last); }));
  ::kill(last, SIGKILL);
  int status = 0;
  ::waitpid(last, &status, 0);
  check_checkpoints();
}

INSTANTIATE_TEST_SUITE_P(Users, Killed, ::testing::Values("self", "nobody"),
                         [](const auto& user) { return std::string(user.param); });

}  // namespace
}  // namespace overspill::testing
