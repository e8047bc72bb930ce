// Job folders on a disk that others may write to, and locks whose holder cannot be seen.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "io/lock_holder.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

namespace fs = std::filesystem;

class Folder : public ::testing::Test {
 protected:
  std::unique_ptr<Store> open() const { return make_file_store(file_options(base_.path())); }

  /// What opening says on stderr.
  std::string said_by_open() const {
    ::testing::internal::CaptureStderr();
    try {
      open();
    } catch (const StoreError& error) {
      ADD_FAILURE() << error.what();
    }
    return ::testing::internal::GetCapturedStderr();
  }

  fs::path at(const std::string& name) const { return base_.path() / name; }

  /// As a run that was killed leaves it.
  static void leave_dead_run(const fs::path& folder, const std::string& holder) {
    fs::create_directory(folder);
    fs::permissions(folder, fs::perms::owner_all);
    std::ofstream(folder / "lock") << holder;
    std::ofstream(folder / "slab-0-0.bin") << "somebody's bytes";
  }

  ScratchFolder base_;
};

TEST_F(Folder, ADeadRunIsNotFollowedThroughALink) {
  const ScratchFolder victim;
  std::ofstream(victim.path() / "lock") << "";
  std::ofstream(victim.path() / "slab-0-0.bin") << "precious";
  fs::create_directory_symlink(victim.path(), at("overspill-evil"));
  const std::string said = said_by_open();
  EXPECT_TRUE(fs::exists(victim.path() / "slab-0-0.bin"));
  EXPECT_TRUE(fs::exists(victim.path() / "lock"));
  EXPECT_TRUE(contains(said, "overspill-evil has the name of a run's folder, but it is a symbolic link"))
      << said;
}

/// A run that was killed before it made its lock leaves a folder for its owner alone; in a setgid folder it
/// is setgid too.
TEST_F(Folder, OfARunThatNeverBeganGoesAndAUsersOwnStays) {
  for (const auto& [name, mode] : {std::pair("began", 0700), {"setgid", 02700}, {"mine", 0755}}) {
    const fs::path path = at(std::string("overspill-") + name);
    fs::create_directory(path);
    ASSERT_EQ(::chmod(path.c_str(), static_cast<mode_t>(mode)), 0);
  }
  open();
  EXPECT_FALSE(fs::exists(at("overspill-began")));
  EXPECT_FALSE(fs::exists(at("overspill-setgid")));
  EXPECT_TRUE(fs::exists(at("overspill-mine")));
}

TEST_F(Folder, OfTheJobIsNotFollowedThroughALink) {
  const ScratchFolder victim;
  std::ofstream(victim.path() / "slab-0.bin") << "precious";
  fs::create_directory_symlink(victim.path(), at("overspill-test"));
  const Error error = error_of([&] { open(); });
  EXPECT_EQ(error.kind, ErrorKind::denied);
  EXPECT_TRUE(contains(error.message(), "a symbolic link")) << error.message();
  EXPECT_TRUE(fs::exists(victim.path() / "slab-0.bin"));
}

TEST_F(Folder, ThatOthersMayWriteToIsRefused) {
  fs::create_directory(at("overspill-test"));
  ASSERT_EQ(::chmod(at("overspill-test").c_str(), 0777), 0);
  const Error error = error_of([&] { open(); });
  EXPECT_EQ(error.kind, ErrorKind::denied);
  EXPECT_TRUE(contains(error.message(), "mode 0777")) << error.message();
  ASSERT_EQ(::chmod(at("overspill-test").c_str(), 0700), 0);
  open();
}

TEST_F(Folder, OfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  fs::create_directory(at("overspill-test"));
  ASSERT_EQ(::chown(at("overspill-test").c_str(), 65534, 65534), 0);
  const Error error = error_of([&] { open(); });
  EXPECT_EQ(error.kind, ErrorKind::denied);
  EXPECT_TRUE(contains(error.message(), "belongs to user 65534")) << error.message();
}

TEST_F(Folder, DeadRunsOfThisUserGoAndOthersAreSaid) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  leave_dead_run(at("overspill-mine"), "123");
  leave_dead_run(at("overspill-theirs"), "123");
  for (const char* name : {"", "lock", "slab-0-0.bin"})
    ASSERT_EQ(::chown((at("overspill-theirs") / name).c_str(), 65534, 65534), 0);
  leave_dead_run(at("overspill-open"), "123");
  ASSERT_EQ(::chmod(at("overspill-open").c_str(), 0777), 0);
  const std::string said = said_by_open();
  EXPECT_FALSE(fs::exists(at("overspill-mine")));
  EXPECT_TRUE(fs::exists(at("overspill-theirs") / "slab-0-0.bin"));
  EXPECT_TRUE(fs::exists(at("overspill-open") / "slab-0-0.bin"));
  EXPECT_TRUE(contains(said, "overspill-theirs was left by a run that has ended")) << said;
  EXPECT_TRUE(contains(said, "user 65534")) << said;
  EXPECT_TRUE(contains(said, "mode 0777")) << said;
}

TEST_F(Folder, ALiveRunOfAnotherUserIsNobodysMatter) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder away";
  leave_dead_run(at("overspill-theirs"), "123");
  ASSERT_EQ(::chown(at("overspill-theirs").c_str(), 65534, 65534), 0);
  const int lock = ::open((at("overspill-theirs") / "lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  EXPECT_EQ(said_by_open(), "");
  ::close(lock);
}

TEST_F(Folder, APlaceThatEveryoneMayChangeIsSaid) {
  ASSERT_EQ(::chmod(base_.path().c_str(), 0777), 0);
  EXPECT_TRUE(contains(said_by_open(), "mode 0777"));
  const ScratchFolder sticky;
  ASSERT_EQ(::chmod(sticky.path().c_str(), 01777), 0);
  ::testing::internal::CaptureStderr();
  make_file_store(file_options(sticky.path()));
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(Folder, ALockThatIsNoFileIsLeftAlone) {
  fs::create_directory(at("overspill-odd"));
  ASSERT_EQ(::mkfifo((at("overspill-odd") / "lock").c_str(), 0600), 0);
  open();  // and does not wait for a writer of the pipe
  EXPECT_TRUE(fs::exists(at("overspill-odd") / "lock"));
}

TEST_F(Folder, AFileInPlaceOfOneIsSaidToBeOne) {
  std::ofstream(at("file")) << "x";
  const Error error = error_of([&] { make_file_store(file_options(at("file"))); });
  EXPECT_TRUE(contains(error.message(), "it is a file")) << error.message();
  EXPECT_FALSE(contains(error.message(), "gone")) << error.message();
}

TEST_F(Folder, OfARelativePathStaysWhereItIs) {
  const fs::path before = fs::current_path();
  fs::create_directory(at("exported"));
  fs::current_path(base_.path());
  auto store = make_file_store(file_options("."));
  fs::current_path("/");
  store->reserve(int64_t{1} << 20);
  AlignedMemory memory(kBlockBytes);
  memory.fill(1);
  const Extent extent = store->allocate(kBlockBytes);
  ASSERT_FALSE(write(*store, extent, memory));
  EXPECT_TRUE(store->export_extents(std::span(&extent, 1), at("exported")).extents[0].linked);
  store.reset();
  EXPECT_FALSE(fs::exists(at("overspill-test")));
  fs::current_path(before);
}

TEST_F(Folder, WithoutDescriptorsSaysWhatTheLimitIs) {
  rlimit usual{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &usual), 0);
  const int next_fd = ::dup(0);
  ::close(next_fd);
  for (int more = 0;; ++more) {
    ASSERT_LT(more, 100);
    const rlimit few{static_cast<rlim_t>(next_fd + more), usual.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    std::string message;
    try {
      open()->reserve(int64_t{1} << 20);
    } catch (const StoreError& error) {
      message = error.what();
    }
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &usual), 0);
    if (message.empty()) break;
    EXPECT_TRUE(contains(message, "Too many open files")) << message;
    EXPECT_TRUE(contains(message, std::to_string(few.rlim_cur))) << message;
  }
}

/// A run that was killed while it removed a dead run's folder leaves this text. Where locks may end at a
/// machine's border, a holder of that name would keep the folder for ever.
TEST(Holder, OfALockThatWasTakenToRemoveAFolderIsNobody) {
  EXPECT_EQ(LockHolder::parse(kRemoving).process, "");
  EXPECT_EQ(LockHolder::parse(kRemoving).description(), LockHolder::parse("").description());
}

TEST(Holder, IsDescribedAsItIsSeenFromHere) {
  LockHolder holder = LockHolder::self();
  EXPECT_EQ(LockHolder::parse(holder.text()).text(), holder.text());
  EXPECT_EQ(holder.description(), fmt::format("process {}", ::getpid()));
  holder.pid_namespace = "pid:[1]";
  EXPECT_TRUE(contains(holder.description(), "another container")) << holder.description();
  holder.boot = "another";
  holder.host = "node7";
  EXPECT_EQ(holder.description(), fmt::format("process {} on node7", ::getpid()));
  EXPECT_FALSE(holder.on_this_machine());
  EXPECT_EQ(LockHolder::parse("12").description(), "process 12");
  EXPECT_FALSE(LockHolder::parse("12").on_this_machine());
}

}  // namespace
}  // namespace overspill::io
