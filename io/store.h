// The extent store: where components live that do not fit in memory (docs/store.md).
//
// Copy-on-write: an extent is written once, read any number of times, then released. Whoever replaces a
// component allocates a new extent, writes it, and releases the old one only after the write has completed;
// so at every instant one complete version exists. A pinned extent is not reused even after its release (a
// checkpoint owns it).
//
// Threads: every method may be called from any thread. Completions are delivered on the store's own
// thread(s), or in poll() where the store has none.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/error.h"
#include "io/store_stats.h"
#include "io/taking_over.h"

namespace overspill::io {

class StallWatch;

/// Lengths, offsets and memory addresses of transfers are multiples of this (covers every O_DIRECT
/// requirement).
inline constexpr int64_t kBlockBytes = 4096;

/// Each checksum covers so many bytes; the last one of an extent may cover fewer.
inline constexpr int64_t kChecksumBlockBytes = 64 * 1024;

constexpr int64_t round_up_to_block(int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

/// An aligned run of bytes in the store. A value; whoever holds it decides when to release it.
struct Extent {
  uint32_t slab = 0;
  uint32_t generation = 0;  // differs between two owners of the same bytes; 0 only in an empty extent
  int64_t offset = 0;       // in the slab
  int64_t bytes = 0;        // multiple of kBlockBytes

  bool empty() const { return bytes == 0; }
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// One read or write of one whole extent. Owned by the caller, who keeps it and `memory` alive and unmoved
/// until `on_complete` was called; nothing is allocated for it on the way.
///
/// A write that fails is moved to another path, or to another place of the only one: the store then releases
/// `extent` and puts the new one in its place. So whoever submitted a write reads `extent` in `on_complete`.
struct Transfer {
  enum class Kind : uint8_t { read, write };
  /// A read that someone waits for overtakes read-ahead and write-behind.
  enum class Priority : uint8_t { demand, prefetch, write_behind };
  /// Who compares bytes read with their checksums, and computes the checksums of bytes to write: the store,
  /// before on_complete and after submit(); or the user of the bytes, block by block while they are in the
  /// cache (io/sealed.h, which sets this and `checksums`).
  enum class Check : uint8_t { by_store, by_caller };

  Kind kind = Kind::read;
  Priority priority = Priority::prefetch;
  Extent extent;
  std::byte* memory = nullptr;  // extent.bytes of it, aligned to kBlockBytes
  Check check = Check::by_store;
  /// If the caller checks: one checksum per 64 KiB block, in the caller's memory. A read stores them here, a
  /// write takes them from here.
  std::span<uint64_t> checksums;
  /// For a read that the store checks: the bytes were read once before and differed from their checksums.
  bool second_reading = false;

  /// Called once, on the store's thread or in poll(), without any of the store's locks held: may submit,
  /// allocate and release, must not block.
  void (*on_complete)(Transfer&) noexcept = nullptr;
  void* context = nullptr;

  /// Set before on_complete. If not empty, it says why the bytes in `memory` (read) or the extent (write)
  /// must not be used.
  std::optional<Error> error;

  Transfer* next = nullptr;  // the store's queue link
  int64_t pushed_ns = 0;     // the store's clock
  int64_t due_ns = 0;        // the store's queue's clock: not before
  int retries = 0;           // the store's: of a write, in other places
  uint8_t epoch = 0;         // the store's: which drain() waits for it
  bool held = false;         // the store's: the extent is held for it
};

/// Where an exported extent now lies: a file in the export folder, and the checksum of every 64 KiB block
/// (the last may be shorter) by XXH3-64.
struct ExportedExtent {
  std::string file;  // in the folder, or "<id>/<name>" in a part (part_folder.h)
  int64_t offset = 0;
  int64_t bytes = 0;
  std::vector<uint64_t> block_checksums;
  bool linked = false;  // the file is a slab of the store: the extent stays pinned as long as the share lives
};

/// How copies are made that an export needs. Any thread may read and set it meanwhile.
struct ExportPace {
  std::atomic<bool> leisurely = false;  // leave the disks to others for most of the time
  std::atomic<int64_t> copied_bytes = 0;
};

struct Export {
  std::vector<ExportedExtent> extents;
  std::optional<uint64_t> share;      // nothing where no extent is linked in the folder
  std::vector<uint64_t> part_shares;  // of its parts on other file systems
};

class Store {
 public:
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  virtual ~Store() = default;

  /// Makes room for `bytes` in total, including extents that are allocated already. Throws
  /// StoreError{no_space|quota} naming the path, the bytes wanted and the bytes available; then nothing has
  /// changed.
  virtual void reserve(int64_t bytes) = 0;

  /// Before the first reserve(): makes slabs that ended runs of this user left in these checkpoints slabs of
  /// this store. The folders are all that may have names of them: a slab that has a further name, or that
  /// cannot be linked, stays as it is, with the reason in words. Throws StoreError where a disk does not
  /// answer.
  virtual TakenOver take_over(std::span<const KeptSlabs> kept);
  /// The extent that lies there in a slab of this store, if it is written and has these checksums. `file`:
  /// any name of the slab.
  virtual std::optional<Extent> own_extent(const std::filesystem::path& /*file*/, int64_t /*offset*/,
                                           int64_t /*bytes*/, std::span<const uint64_t> /*checksums*/) const {
    return std::nullopt;
  }
  /// Makes a released extent that pins keep the caller's again. False where somebody owns it.
  virtual bool reclaim(const Extent& /*extent*/) { return false; }

  /// An extent of round_up_to_block(bytes), content undefined. Throws StoreError{no_space} when nothing is
  /// free.
  virtual Extent allocate(int64_t bytes) = 0;

  /// Gives the extent back. Throws StoreError{invalid} for one that is not allocated (double release, old
  /// generation).
  virtual void release(const Extent& extent) = 0;

  /// A pinned extent keeps its bytes after its release, until each pin() is matched by an unpin().
  virtual void pin(const Extent& extent) = 0;
  virtual void unpin(const Extent& extent) = 0;

  /// Queues a transfer; never blocks on the device, never allocates. The outcome, an invalid extent included,
  /// arrives in on_complete. A read of an extent never written completes with `corrupt`.
  virtual void submit(Transfer& transfer) = 0;

  /// Returns once every transfer submitted before the call has completed.
  virtual void drain() = 0;

  /// To be called before a thread blocks to wait for a completion. A store without threads (tests) runs one
  /// event on the caller's thread and returns true: check again. Otherwise returns false: completions come by
  /// themselves. The caller must hold no lock that a completion takes. Throws Stalled (virtual_time.h) when
  /// nothing is on its way.
  virtual bool poll() { return false; }

  /// Puts the extents' bytes into `folder` durably (fdatasync before return). Where the folder lies on the
  /// file system of one of the store's paths: hard links to the slab files, in the folder and, for the other
  /// paths, in parts of it (part_folder.h). Copies where there are no links. The caller has pinned them;
  /// those that are linked stay pinned until the share has ended. Results in the order asked.
  virtual Export export_extents(std::span<const Extent> extents, const std::filesystem::path& folder,
                                ExportPace& pace) = 0;
  Export export_extents(std::span<const Extent> extents, const std::filesystem::path& folder) {
    ExportPace pace;
    return export_extents(extents, folder, pace);
  }

  /// Whether the folder of an export, or a copy of it by hard links, may still have slabs of the store; false
  /// only once their removal is durable. A folder that was moved has them still.
  virtual bool share_lives(uint64_t share) const = 0;
  /// Tells the store that the export's files are now in `folder`, with `prefix` before their names.
  virtual void share_named(uint64_t /*share*/, const std::filesystem::path& /*folder*/,
                           const std::string& /*prefix*/) {}
  /// Ends a share, when the caller has given up its pins.
  virtual void end_share(uint64_t share) noexcept = 0;

  /// Memory that transfers will use often; registered with the kernel where it allows that. Stays the
  /// caller's, who unregisters it before freeing it.
  virtual void register_memory(std::span<std::byte> memory) = 0;
  virtual void unregister_memory(std::span<std::byte> memory) = 0;

  /// The file that an extent lies in, for errors.
  virtual std::string file_of(const Extent& extent) const = 0;

  virtual StoreStats stats() const = 0;

  /// The watch over the disks, for code that makes other calls that wait for a disk; null: there is none.
  virtual std::shared_ptr<StallWatch> watch() const { return nullptr; }

  /// Whether a path was given up (ErrorKind::stalled, ring) while the kernel had transfers. The kernel may
  /// still write into their memory although they are complete: it must neither be used nor freed (io/kept.h).
  virtual bool kernel_keeps_memory() { return false; }
};

}  // namespace overspill::io
