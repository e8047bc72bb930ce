#include "io/probe.h"

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "io/backend.h"
#include "io/block_device.h"
#include "io/file_store.h"
#include "io/job_folder.h"

namespace overspill::io {
namespace {

constexpr int64_t kProbeExtentBytes = int64_t{4} << 20;
constexpr size_t kInFlight = 8;

std::string file_system_name(const std::filesystem::path& folder) {
  struct statfs info {};
  if (::statfs(folder.c_str(), &info) != 0) throw system_error(Operation::open, folder);
  constexpr long kXfs = 0x58465342;
  constexpr long kZfs = 0x2FC12FC1;
  switch (static_cast<long>(info.f_type)) {
    case EXT4_SUPER_MAGIC:
      return "ext4";
    case TMPFS_MAGIC:
      return "tmpfs";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlay";
    case NFS_SUPER_MAGIC:
      return "nfs";
    case kXfs:
      return "xfs";
    case kZfs:
      return "zfs";
    default:
      return fmt::format("0x{:x}", static_cast<unsigned long>(info.f_type));
  }
}

// Transfers of the probe never overlap a wait, so their errors are looked at after the drain.
void done(Transfer&) noexcept {}

double bytes_per_second(Store& store, Transfer::Kind kind, const std::vector<Extent>& extents,
                        std::span<std::byte> memory) {
  std::vector<Transfer> transfers(extents.size());
  const auto start = std::chrono::steady_clock::now();
  int64_t bytes = 0;
  for (size_t i = 0; i < extents.size(); ++i) {
    transfers[i].kind = kind;
    transfers[i].extent = extents[i];
    transfers[i].memory = memory.data() + (i % kInFlight) * kProbeExtentBytes;
    transfers[i].on_complete = done;
    store.submit(transfers[i]);
    bytes += extents[i].bytes;
    if (i % kInFlight == kInFlight - 1) store.drain();
  }
  store.drain();
  for (const Transfer& transfer : transfers) {
    if (transfer.error) throw StoreError(*transfer.error);
  }
  return static_cast<double>(bytes) /
         std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void measure(Store& store, int64_t bytes, DiskProbe& probe) {
  const auto memory_bytes = static_cast<size_t>(kProbeExtentBytes) * kInFlight;
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, memory_bytes)), &std::free);
  if (memory == nullptr) throw std::bad_alloc();
  const std::span<std::byte> all(memory.get(), memory_bytes);
  uint64_t state = 1;  // nothing that a disk could compress
  for (std::byte& one : all)
    one = static_cast<std::byte>((state = state * 6364136223846793005U + 1442695040888963407U) >> 56);

  std::vector<Extent> extents;
  store.reserve(bytes);
  for (int64_t i = 0; i < bytes / kProbeExtentBytes; ++i)
    extents.push_back(store.allocate(kProbeExtentBytes));
  store.register_memory(all);
  probe.write_bytes_per_s = bytes_per_second(store, Transfer::Kind::write, extents, all);
  probe.read_bytes_per_s = bytes_per_second(store, Transfer::Kind::read, extents, all);
  probe.backend = store.stats().backend;
  store.unregister_memory(all);
}

class NoOwner final : public TransferOwner {
  Target locate(const Transfer&) override { return {}; }
  std::string path_of(const Target&) override { return ""; }
  void first_retry(const Error&) noexcept override {}
  void completed(Transfer&) noexcept override {}
};

}  // namespace

DiskProbe probe_disk(const std::filesystem::path& folder, int64_t scratch_bytes) {
  DiskProbe probe;
  const std::string job = fmt::format("probe-{}", ::getpid());
  {
    const JobFolder place(folder, job, true);
    probe.direct = place.direct();
    probe.direct_refusal = place.direct_refusal();
    probe.direct_alignment = place.direct_alignment();
    probe.free_bytes = place.available_bytes();
  }
  {
    NoOwner nobody;
    PieceQueue queue(nobody, 1, kProbeExtentBytes, nullptr);
    const auto ring = make_uring_backend(queue, probe.io_uring_refusal);
    probe.io_uring = ring != nullptr;
    queue.stop();
  }
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  probe.memlock_limit_bytes = limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<int64_t>(limit.rlim_cur);
  probe.file_system = file_system_name(folder);
  probe.disks = disks_of(folder);
  probe.numa_node = numa_node_of(probe.disks);
  if (!probe.disks.empty()) probe.rotational = rotational(probe.disks.front());

  FileStoreOptions options;
  options.paths = {folder};
  options.job = job;
  const auto store = make_file_store(options);
  measure(*store, std::max(scratch_bytes / kProbeExtentBytes, int64_t{1}) * kProbeExtentBytes, probe);
  return probe;
}

}  // namespace overspill::io
