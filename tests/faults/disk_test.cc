// Small real disks (loop devices) that fill up, are taken away, or end too early: ext4, XFS and Btrfs.
// Quotas of the kernel are in tests/faults/fuse_test.cc as EDQUOT: not every kernel is built with them.
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>

#include "tests/faults/mounts.h"

namespace overspill::testing {
namespace {

struct FileSystem {
  const char* name;
  std::vector<std::string> make;
  int64_t bytes;  // about the least that it takes
};

/// Writes into the folder until nothing more goes in, in ever smaller pieces.
void fill_up(const fs::path& folder) {
  const int file = ::open((folder / "filling").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  ASSERT_GE(file, 0);
  const std::string zeros(kMiB, 'x');
  for (size_t bytes = zeros.size(); bytes >= 4096;) {
    // Synced, as what is only in memory may still find out that there is no room.
    if (::write(file, zeros.data(), bytes) != static_cast<ssize_t>(bytes) || ::fdatasync(file) != 0)
      bytes /= 4;
  }
  ::close(file);
}

class Disk : public ::testing::TestWithParam<FileSystem> {
 protected:
  void SetUp() override {
    if (const std::string why = own_mounts(); !why.empty()) GTEST_SKIP() << why;
    image_ = point_.beside("image");
    const int file = ::open(image_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_GE(file, 0);
    ASSERT_EQ(::ftruncate(file, GetParam().bytes), 0);
    std::vector<std::string> make = GetParam().make;
    make.push_back(image_.string());
    const int made = run_program(make);
    // Where the disk below is full, a file with holes would give EIO in the middle of a test.
    const int reserved = ::posix_fallocate(file, 0, GetParam().bytes);
    ::close(file);
    ASSERT_EQ(reserved, 0) << "no room for " << image_;
    if (made == 127) GTEST_SKIP() << make.front() << " is not installed (tools/setup --test)";
    ASSERT_EQ(made, 0) << make.front();
    if (run_program({"mount", "-o", "loop", image_.string(), root().string()}) != 0)
      GTEST_SKIP() << "no loop device, or no " << GetParam().name << " in this kernel";
  }

  fs::path root() const { return point_.path(); }

  std::unique_ptr<engine::Engine> trained(int steps, const std::string& job = "faults") {
    auto engine = make_engine({.nvme = root(), .job = job});
    toy_load(*engine);
    for (int step = 0; step < steps; ++step) toy_step(*engine, step, 1, 0);
    engine->synchronize();
    return engine;
  }

  /// The loop device whose file is the image; -1 if there is none.
  int open_device() const {
    struct stat image {};
    if (::stat(image_.c_str(), &image) != 0) return -1;
    for (int number = 0; number < 256; ++number) {
      const int device = ::open(fmt::format("/dev/loop{}", number).c_str(), O_RDWR | O_CLOEXEC);
      loop_info64 info{};
      if (device >= 0 && ::ioctl(device, LOOP_GET_STATUS64, &info) == 0 && info.lo_inode == image.st_ino)
        return device;
      if (device >= 0) ::close(device);
    }
    return -1;
  }

  Mountpoint point_;
  fs::path image_;
};

TEST_P(Disk, TooFullToStartIsRefusedAndNothingHasChanged) {
  fill_up(root());
  const std::vector<std::string> before = names_in(root());
  expect_says(refusal_of([&] { make_engine({.nvme = root()}); }),
              {"no space left", root().string(), "errno 28"});
  EXPECT_EQ(names_in(root()), before);
}

TEST_P(Disk, WithRoomForTheFolderAloneIsRefusedWithTheNumbers) {
  std::ofstream(root() / "kept") << std::string(size_t{2} << 20, 'x');
  fill_up(root());
  fs::remove(root() / "kept");
  ::sync();
  const std::vector<std::string> before = names_in(root());
  expect_says(refusal_of([&] { make_engine({.nvme = root()}); }),
              {"reserve failed", "no space left", root().string(), "wanted", "available", "free space"});
  EXPECT_EQ(names_in(root()), before);
}

TEST_P(Disk, ThatFillsUpWhileTrainingNeverGivesAWrongNumber) {
  const auto engine = trained(2);
  engine->save(root() / "two", "{}");
  fill_up(root());
  ASSERT_EQ(train_until_failure(*engine, 30), "") << "the space was reserved";
  EXPECT_EQ(toy_contents(*engine), Shadow().at(32));
  // The reservation holds the states, not the checkpoint's small files.
  const std::string refused = refusal_of([&] { engine->save(root() / "full", std::string(kMiB, ' ')); });
  expect_says(refused, {root().string(), "o space left", "; "});
  EXPECT_FALSE(fs::exists(root() / "full"));
  EXPECT_FALSE(fs::exists(root() / "full.partial"));
  EXPECT_EQ(contents_of(root() / "two"), Shadow().at(2));
  fs::remove(root() / "filling");
  toy_step(*engine, 32, 1, 0);
  engine->save(root() / "room again", "{}");
  EXPECT_EQ(contents_of(root() / "room again"), Shadow().at(33));
}

// What a save wrote is in memory still, and may be whole there and not on the disk.
TEST_P(Disk, ThatKeptOtherBytesThanItWasGivenIsFoundByVerify) {
  const auto engine = make_engine({.nvme = root(), .placement = engine::Placement::host});
  toy_load(*engine);
  toy_step(*engine, 0, 1, 0);
  engine->save(root() / "saved", "{}");
  EXPECT_NO_THROW(engine::verify_checkpoint(root() / "saved", nullptr, nullptr));
  std::string begin(256, 0);
  std::ifstream(root() / "saved" / "resident.bin").read(begin.data(), std::ssize(begin));
  std::ifstream image(image_);
  const std::string all(std::istreambuf_iterator<char>(image), {});
  const size_t at = all.find(begin);
  ASSERT_NE(at, std::string::npos);
  std::fstream(image_, std::ios::in | std::ios::out)
      .seekp(static_cast<std::streamoff>(at))
      .put(static_cast<char>(~begin[0]));
  EXPECT_NE(refusal_of([&] { engine::verify_checkpoint(root() / "saved", nullptr, nullptr); }), "");
}

TEST_P(Disk, ThatFillsUpUnderASnapshotIsATypedErrorInTheMiddleOfARun) {
  if (std::string(GetParam().name) != "btrfs") GTEST_SKIP() << GetParam().name << " has no snapshots";
  const auto engine = trained(2);
  engine->save(root() / "two", "{}");
  // Now that somebody else holds the old bytes, a write takes new room whatever was reserved.
  ASSERT_EQ(run_program({"btrfs", "subvolume", "snapshot", root().string(), (root() / "snapshot").string()}),
            0);
  fill_up(root());
  const std::string message = train_until_failure(*engine, 30);
  expect_says(message, {"write failed", "no space left", root().string(), "offset", "bytes", "free space"});
  expect_says(message, {(root() / "two").string(), "another file shares these blocks", "snapshot"});
  EXPECT_THROW(engine->save(root() / "never", "{}"), engine::EngineFailed);
  EXPECT_EQ(contents_of(root() / "two"), Shadow().at(2));
}

/// Not Btrfs: there cp copies the bytes of files that are written in place, as slabs are.
class DiskWithReflinks : public Disk {};

TEST_P(DiskWithReflinks, ThatFillsUpUnderACopyNamesIt) {
  const auto engine = trained(2);
  engine->save(root() / "two", "{}");
  ASSERT_EQ(run_program({"cp", "-r", (root() / "two").string(), (root() / "copy").string()}), 0);
  fill_up(root());
  expect_says(train_until_failure(*engine, 30),
              {"no space left", "another file shares these blocks", "cp --reflink=never"});
  EXPECT_EQ(contents_of(root() / "two"), Shadow().at(2));
  EXPECT_EQ(contents_of(root() / "copy"), Shadow().at(2));
}

TEST_P(Disk, ThatIsTakenAwayIsATypedError) {
  const auto engine = trained(2);
  const fs::path copy = point_.beside("copy");
  engine->save(root() / "two", "{}");
  ASSERT_EQ(run_program({"cp", "-r", (root() / "two").string(), copy.string()}), 0);
  const int folder = ::open(root().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const uint32_t no_flush = 2;  // XFS_IOC_GOINGDOWN, which ext4 knows too: from now on every transfer fails
  const int taken = ::ioctl(folder, _IOR('X', 125, uint32_t), &no_flush);
  const int os_error = errno;
  ::close(folder);
  if (taken != 0) GTEST_SKIP() << GetParam().name << " cannot be shut down: " << std::strerror(os_error);
  expect_says(train_until_failure(*engine, 3),
              {"device failure", root().string(), "offset", "errno", "check the disk"});
  EXPECT_THROW(engine->save(root() / "never", "{}"), engine::EngineFailed);
  refusal_of([&] { make_engine({.nvme = root(), .job = "next"}); });
  EXPECT_EQ(contents_of(copy), Shadow().at(2));
}

TEST_P(Disk, ThatLosesItsEndIsATypedError) {
  const auto engine = trained(2);
  const fs::path copy = point_.beside("copy");
  engine->save(root() / "two", "{}");
  ASSERT_EQ(run_program({"cp", "-r", (root() / "two").string(), copy.string()}), 0);
  const int device = open_device();
  if (device < 0) GTEST_SKIP() << "the loop device cannot be found";
  ASSERT_EQ(::truncate(image_.c_str(), kMiB / 4), 0);
  const int shrunk = ::ioctl(device, LOOP_SET_CAPACITY, 0);
  ::close(device);
  ASSERT_EQ(shrunk, 0);
  expect_says(train_until_failure(*engine, 3), {root().string(), "offset", "bytes", ";"});
  EXPECT_EQ(contents_of(copy), Shadow().at(2));
}

TEST_P(Disk, ThatIsUnmountedLazilyServesTheRunThatHasItOpen) {
  const auto engine = trained(2);
  ASSERT_EQ(::umount2(root().c_str(), MNT_DETACH), 0);
  EXPECT_EQ(train_until_failure(*engine, 3), "");
  EXPECT_EQ(toy_contents(*engine), Shadow().at(5));
  // The folder is another disk's now: no link across, and no slab to be found by its name.
  const std::string refused = refusal_of([&] { engine->save(root() / "five", "{}"); });
  expect_says(refused, {root().string()});
  EXPECT_FALSE(fs::exists(root() / "five"));
  EXPECT_EQ(toy_step(*engine, 5, 1, 0).result.step, 6);
}

INSTANTIATE_TEST_SUITE_P(FileSystems, DiskWithReflinks,
                         ::testing::Values(FileSystem{"xfs", {"mkfs.xfs", "-q", "-f"}, 320 * kMiB}),
                         [](const auto& one) { return std::string(one.param.name); });

INSTANTIATE_TEST_SUITE_P(FileSystems, Disk,
                         ::testing::Values(FileSystem{"ext4", {"mkfs.ext4", "-q", "-F"}, 24 * kMiB},
                                           FileSystem{"xfs", {"mkfs.xfs", "-q", "-f"}, 320 * kMiB},
                                           FileSystem{
                                               "btrfs", {"mkfs.btrfs", "-q", "-f", "--mixed"}, 64 * kMiB}),
                         [](const auto& one) { return std::string(one.param.name); });

TEST(FileSizeLimit, IsRefusedAtTheStart) {
  const ScratchFolder scratch;
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{100'000, 100'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int status = 1;
    try {
      make_engine({.nvme = scratch.path()});
    } catch (const io::StoreError& error) {
      status = error.error().kind == io::ErrorKind::quota && names_in(scratch.path()).empty() ? 0 : 2;
    }
    ::_exit(status);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace overspill::testing
