// The store through its public interface, as a contender that tools/bench_io.py gives its turns: reads lines
// "read", "write" or "mixed" from stdin, answers each with one line of JSON. "read" and "write" go through
// extents of one chunk in order. "mixed" is what a step asks of the store: of each chunk of shards of 1 to 64
// MiB the components lo, m and v are read, written to new extents, and the old ones released, many chunks at
// once.
// Usage: bench_io FOLDER... [--mib N] [--sequential] [--piece-kib N] [--depth N]
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <iostream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/memory/host_memory.h"
#include "io/file_store.h"

namespace overspill::io {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kChunkElements = int64_t{512} << 10;    // as the engine cuts shards
constexpr int64_t kSequentialBytes = 8 * kChunkElements;  // an extent of the sequential patterns
constexpr size_t kComponents = 3;
constexpr std::array<int64_t, kComponents> kElementBytes{2, 4, 4};  // lo, m, v
constexpr int64_t kSlotBytes = 10 * kChunkElements;
constexpr int64_t kSlots = 48;

struct Usage {
  double cpu_s;
  int64_t switches;

  static Usage now() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    return {seconds(usage.ru_utime) + seconds(usage.ru_stime), usage.ru_nvcsw + usage.ru_nivcsw};
  }
};

/// A chunk's extents, one of each component; a sequential extent is a chunk of one.
struct Chunk {
  std::array<Extent, kComponents> extents;
  size_t components = kComponents;
};

enum class Pattern : uint8_t { read, write, mixed };

/// Drives chunks through slots: each reads, or writes, or reads and then writes, and takes the next chunk in
/// the callback of its last transfer. One mutex, since several paths call back on several threads.
class Turn {
 public:
  Turn(Store& store, std::span<std::byte> memory, std::vector<Chunk>& chunks, Pattern pattern)
      : store_(store), chunks_(chunks), pattern_(pattern) {
    const std::lock_guard lock(mutex_);
    for (int64_t begin = 0; begin + kSlotBytes <= static_cast<int64_t>(memory.size()); begin += kSlotBytes) {
      Slot& slot = slots_.emplace_back();
      slot.turn = this;
      slot.memory = memory.data() + begin;
      next_chunk(slot);
    }
  }

  void wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return finished_ == chunks_.size(); });
    if (error_) throw StoreError(*error_);
  }

 private:
  struct Slot {
    Turn* turn = nullptr;
    std::byte* memory = nullptr;
    Chunk* chunk = nullptr;
    Chunk replaced;
    std::array<Transfer, kComponents> transfers;
    size_t pending = 0;
  };

  void next_chunk(Slot& slot) {
    if (taken_ == chunks_.size()) return;
    slot.chunk = &chunks_[taken_++];
    pattern_ == Pattern::write ? write(slot) : submit(slot, Transfer::Kind::read);
  }

  void write(Slot& slot) {
    slot.replaced = *slot.chunk;
    for (size_t i = 0; i < slot.chunk->components; ++i) {
      slot.chunk->extents[i] = store_.allocate(slot.chunk->extents[i].bytes);
    }
    submit(slot, Transfer::Kind::write);
  }

  void submit(Slot& slot, Transfer::Kind kind) {
    slot.pending = slot.chunk->components;
    std::byte* memory = slot.memory;
    for (size_t i = 0; i < slot.chunk->components; ++i) {
      Transfer& transfer = slot.transfers[i];
      transfer.kind = kind;
      transfer.priority =
          kind == Transfer::Kind::read ? Transfer::Priority::prefetch : Transfer::Priority::write_behind;
      transfer.extent = slot.chunk->extents[i];
      transfer.memory = memory;
      transfer.context = &slot;
      transfer.on_complete = [](Transfer& one) noexcept {
        auto* owner = static_cast<Slot*>(one.context);
        owner->turn->transferred(*owner, one);
      };
      memory += transfer.extent.bytes;
      store_.submit(transfer);
    }
  }

  void transferred(Slot& slot, const Transfer& transfer) {
    const std::lock_guard lock(mutex_);
    if (transfer.error && !error_) error_ = transfer.error;
    if (--slot.pending > 0) return;
    if (transfer.kind == Transfer::Kind::write) {
      for (size_t i = 0; i < slot.replaced.components; ++i) store_.release(slot.replaced.extents[i]);
    } else if (pattern_ == Pattern::mixed) {
      return write(slot);
    }
    if (++finished_ == chunks_.size()) done_.notify_one();
    next_chunk(slot);
  }

  Store& store_;
  std::vector<Chunk>& chunks_;
  const Pattern pattern_;
  std::mutex mutex_;
  std::condition_variable done_;
  std::deque<Slot> slots_;
  std::optional<Error> error_;
  size_t taken_ = 0;
  size_t finished_ = 0;
};

int64_t bytes_of(const std::vector<Chunk>& chunks) {
  int64_t bytes = 0;
  for (const Chunk& chunk : chunks) {
    for (size_t i = 0; i < chunk.components; ++i) bytes += chunk.extents[i].bytes;
  }
  return bytes;
}

class Contender {
 public:
  Contender(const FileStoreOptions& options, int64_t sequential_bytes, bool with_mixed)
      : budget_("host", kSlots * kSlotBytes),
        memory_(budget_, kSlots * kSlotBytes, "slots"),
        store_(make_file_store(options)) {
    uint64_t state = 1;  // nothing that a disk could compress
    for (int64_t i = 0; i < memory_.bytes(); i += 8) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      std::memcpy(memory_.data() + i, &state, sizeof(state));
    }
    store_->register_memory(memory_.span());

    std::vector<std::array<int64_t, kComponents>> sizes;
    int64_t bytes = sequential_bytes;
    for (int64_t shard = kMiB; with_mixed && shard <= 64 * kMiB; shard *= 2) {
      for (int64_t left = shard / 4; left > 0; left -= kChunkElements) {
        auto& chunk = sizes.emplace_back();
        for (size_t i = 0; i < kComponents; ++i) {
          chunk[i] = std::min(left, kChunkElements) * kElementBytes[i];
          bytes += chunk[i];
        }
      }
    }
    store_->reserve(bytes + 2 * kSlots * kSlotBytes);
    write_all_space(bytes + kSlots * kSlotBytes);
    for (int64_t at = 0; at < sequential_bytes; at += kSequentialBytes) {
      sequential_.push_back({.extents = {store_->allocate(kSequentialBytes)}, .components = 1});
    }
    for (const auto& chunk : sizes) {
      Chunk& made = mixed_.emplace_back();
      for (size_t i = 0; i < kComponents; ++i) made.extents[i] = store_->allocate(chunk[i]);
    }
    for (auto* chunks : {&sequential_, &mixed_})
      Turn(*store_, memory_.span(), *chunks, Pattern::write).wait();
    store_->drain();
  }

  ~Contender() {
    store_->drain();
    store_->unregister_memory(memory_.span());
  }
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;

  nlohmann::json turn(Pattern pattern) {
    std::vector<Chunk>& chunks = pattern == Pattern::mixed ? mixed_ : sequential_;
    const Usage before = Usage::now();
    const auto start = std::chrono::steady_clock::now();
    Turn turn(*store_, memory_.span(), chunks, pattern);
    turn.wait();
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
    store_->drain();  // the last callback has returned
    const Usage after = Usage::now();
    return {{"bytes", bytes_of(chunks) * (pattern == Pattern::mixed ? 2 : 1)},
            {"seconds", wall.count()},
            {"cpu_s", after.cpu_s - before.cpu_s},
            {"switches", after.switches - before.switches}};
  }

  std::string backend() const { return store_->stats().backend; }

 private:
  // The first write of reserved space costs the file system more than any later one; a run does that once.
  void write_all_space(int64_t bytes) {
    std::vector<Chunk> chunks;
    for (int64_t at = 0; at + kSequentialBytes <= bytes; at += kSequentialBytes) {
      chunks.push_back({.extents = {store_->allocate(kSequentialBytes)}, .components = 1});
    }
    Turn(*store_, memory_.span(), chunks, Pattern::write).wait();
    store_->drain();
    for (const Chunk& chunk : chunks) store_->release(chunk.extents[0]);
  }

  engine::Budget budget_;
  engine::HostMemory memory_;
  std::unique_ptr<Store> store_;
  std::vector<Chunk> sequential_;
  std::vector<Chunk> mixed_;
};

int run(int argc, char** argv) {
  CLI::App app("The store's turns in make bench-io");
  FileStoreOptions options;
  std::vector<std::string> folders;
  int64_t mib = 1024;
  int64_t piece_kib = options.piece_bytes >> 10;
  app.add_option("folders", folders, "one a path")->required();
  bool sequential = false;
  app.add_flag("--sequential", sequential, "no mixed turns will be asked for");
  app.add_option("--mib", mib, "bytes of a sequential turn");
  app.add_option("--piece-kib", piece_kib);
  app.add_option("--depth", options.queue_depth);
  CLI11_PARSE(app, argc, argv);
  options.paths.assign(folders.begin(), folders.end());
  options.piece_bytes = piece_kib << 10;
  options.job = "bench-io-" + std::to_string(::getpid());

  Contender contender(options, mib * kMiB, !sequential);
  const auto answer = [](const nlohmann::json& line) { std::cout << line.dump() << std::endl; };
  answer({{"backend", contender.backend()}});
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "read")
      answer(contender.turn(Pattern::read));
    else if (line == "write")
      answer(contender.turn(Pattern::write));
    else if (line == "mixed")
      answer(contender.turn(Pattern::mixed));
    else
      throw std::invalid_argument("bench_io: no pattern is called '" + line + "'");
  }
  return 0;
}

}  // namespace
}  // namespace overspill::io

int main(int argc, char** argv) {
  try {
    return overspill::io::run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
