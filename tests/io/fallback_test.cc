// What the store does where the kernel refuses: no io_uring, little lockable memory, no O_DIRECT. Each test
// runs in a forked child, whose limits are then its own.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "io/probe.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

constexpr int kSkipped = 77;

// From here on io_uring_setup fails with `os_error`, as in a container.
bool refuse_io_uring(int os_error) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(os_error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

bool round_trip(Store& store, std::byte* memory, int64_t bytes) {
  const Extent extent = store.allocate(bytes);
  std::fill_n(memory, bytes, std::byte{0x5C});
  if (run(store, Transfer::Kind::write, extent, memory)) return false;
  std::fill_n(memory, bytes, std::byte{0});
  if (run(store, Transfer::Kind::read, extent, memory)) return false;
  return std::all_of(memory, memory + bytes, [](std::byte one) { return one == std::byte{0x5C}; });
}

TEST(Fallback, ThreadsTakeOverWhereIoUringIsRefused) {
  for (const int os_error : {EPERM, ENOSYS, ENOMEM}) {
    const ScratchFolder folder;
    const int status = exit_status_of([&] {
      if (!refuse_io_uring(os_error)) return kSkipped;
      FileStoreOptions options = file_options(folder.path());
      const auto store = make_file_store(options);
      store->reserve(4 * kMiB);
      AlignedMemory memory(kMiB);
      store->register_memory(memory.all());
      if (!round_trip(*store, memory.data(), kMiB)) return 1;
      const std::string backend = store->stats().backend;
      if (!contains(backend, "threads, ") || !contains(backend, "io_uring refused (")) return 2;
      options.job = "strict";
      options.backend = FileStoreOptions::Backend::uring;
      return error_of([&] { make_file_store(options); }).kind == ErrorKind::unsupported ? 0 : 3;
    });
    if (status == kSkipped) GTEST_SKIP() << "seccomp is refused here";
    EXPECT_EQ(status, 0) << os_error;
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  }
}

TEST(Fallback, NobodyWithLittleLockableMemory) {
  const ScratchFolder folder;
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(folder.path().c_str(), 65534, 65534), 0);
  }
  // Root may lock anything; the folder above may be closed to others, hence the descriptor.
  const int at = ::open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_GE(at, 0);
  const int status = exit_status_of([&] {
    const rlimit limit{8 * kMiB, 8 * kMiB};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || ::fchdir(at) != 0) return kSkipped;
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return kSkipped;
    const auto store = make_file_store(file_options("."));
    store->reserve(8 * kMiB);
    AlignedMemory memory(64 * kMiB);
    store->register_memory(memory.all());
    if (!round_trip(*store, memory.data() + 32 * kMiB, 2 * kMiB)) return 1;
    const std::string backend = store->stats().backend;
    fmt::print("as nobody: {}\n", backend);
    std::fflush(stdout);
    if (contains(backend, "io_uring, ") && !contains(backend, "registration refused")) return 2;
    store->unregister_memory(memory.all());
    // What fits the limit is registered, also after a refusal.
    AlignedMemory little(kMiB);
    store->register_memory(little.all());
    if (!round_trip(*store, little.data(), kMiB)) return 3;
    if (contains(store->stats().backend, "io_uring, ") &&
        !contains(store->stats().backend, ", registered buffers"))
      return 4;
    store->unregister_memory(little.all());
    return 0;
  });
  ::close(at);
  if (status == kSkipped) GTEST_SKIP() << "cannot become nobody with a memlock limit here";
  EXPECT_EQ(status, 0);
}

TEST(Fallback, UnwritableFolderIsDenied) {
  const ScratchFolder folder;
  const int status = exit_status_of([&] {
    ::chmod(folder.path().c_str(), 0555);
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return kSkipped;
    return error_of([&] { make_file_store(file_options(folder.path())); }).kind == ErrorKind::denied ? 0 : 1;
  });
  if (status == kSkipped) GTEST_SKIP() << "cannot become nobody here";
  EXPECT_EQ(status, 0);
}

TEST(Probe, TellsWhatAFolderOffers) {
  const ScratchFolder folder;
  const DiskProbe probe = probe_disk(folder.path(), 16 * kMiB);
  EXPECT_GT(probe.read_bytes_per_s, 1e6);
  EXPECT_GT(probe.write_bytes_per_s, 1e6);
  EXPECT_GT(probe.free_bytes, 0);
  EXPECT_FALSE(probe.file_system.empty());
  EXPECT_EQ(probe.io_uring, probe.io_uring_refusal.empty());
  EXPECT_EQ(probe.io_uring, contains(probe.backend, "io_uring, ")) << probe.backend;
  EXPECT_EQ(probe.direct, contains(probe.backend, ", O_DIRECT")) << probe.backend;
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  EXPECT_EQ(error_of([&] { probe_disk(folder.path() / "not-there"); }).kind, ErrorKind::vanished);
}

}  // namespace
}  // namespace overspill::io
