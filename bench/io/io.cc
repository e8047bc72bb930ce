// The store through its public interface, as a contender that bench/io/run.py gives its turns: reads lines
// with a pattern from stdin, answers each with one line of JSON.
//   read, write  go through extents of one chunk in order.
//   mixed        is what a step asks of the store: of each chunk of shards of 1 to 64 MiB the components lo,
//                m and v are read, updated by a worker (consumer.h), written to new extents, and the old ones
//                released, many chunks at once.
//   moved        is the same without the update: transfers alone.
// A worker compares and checksums each chunk block by block, as the engine does with its states
// (io/sealed.h); with --by-store the store does, before and after. Usage: bench_io FOLDER... [--mib N]
// [--sequential] [--by-store] [--piece-kib N] [--depth N]
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
#include <utility>
#include <vector>

#include "bench/io/consumer.h"
#include "cpu_optim/executor.h"
#include "engine/memory/host_memory.h"
#include "io/file_store.h"
#include "io/sealed.h"

namespace overspill::io {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kChunkElements = int64_t{512} << 10;    // as the engine cuts shards
constexpr int64_t kSequentialBytes = 8 * kChunkElements;  // an extent of the sequential patterns
constexpr size_t kComponents = 3;
constexpr std::array<int64_t, kComponents> kElementBytes{2, 4, 4};  // lo, m, v
constexpr int64_t kSlotBytes = 10 * kChunkElements;
constexpr int64_t kSlots = 48;
constexpr int64_t kStepElements = kChecksumBlockBytes / 2;  // whole blocks of every component
constexpr int64_t kHostElementBytes = 2;                    // hi and the gradient

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
  int64_t first_element = 0;  // of hi and gradient
  int64_t elements = kSequentialBytes / kElementBytes[0];
};

enum class Pattern : uint8_t { read, write, moved, mixed };

/// What a worker does to a chunk between its read and its write.
struct Between {
  bool by_caller = false;
  std::byte* hi = nullptr;
  std::byte* gradient = nullptr;
  optim::Executor* executor = nullptr;
};

/// Drives chunks through slots: each reads, or writes, or reads and then writes, and takes the next chunk in
/// the callback of its last transfer. One mutex, since several paths call back on several threads.
class Turn {
 public:
  Turn(Store& store, std::span<std::byte> memory, std::vector<Chunk>& chunks, Pattern pattern,
       const Between& between)
      : store_(store), chunks_(chunks), pattern_(pattern), between_(between), by_caller_(between.by_caller) {
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
    std::array<Sealed, kComponents> sealed{Sealed{kSequentialBytes}, Sealed{kSequentialBytes},
                                           Sealed{kSequentialBytes}};
    size_t pending = 0;
  };

  void next_chunk(Slot& slot) {
    if (taken_ == chunks_.size()) return;
    slot.chunk = &chunks_[taken_++];
    if (pattern_ != Pattern::write) return submit(slot, Transfer::Kind::read);
    if (!by_caller_) return write(slot);
    std::byte* memory = slot.memory;
    for (size_t i = 0; i < slot.chunk->components; ++i) {
      slot.sealed[i].start(memory, slot.chunk->extents[i].bytes);
      memory += slot.chunk->extents[i].bytes;
    }
    hand_to_worker(slot);
  }

  void hand_to_worker(Slot& slot) {
    between_.executor->submit([this, &slot] { work(slot); });
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
      if (by_caller_)
        kind == Transfer::Kind::read ? slot.sealed[i].expect(transfer) : slot.sealed[i].hand_over(transfer);
      store_.submit(transfer);
    }
  }

  // On a worker.
  void work(Slot& slot) {
    std::optional<Error> error;
    try {
      work_on(slot);
    } catch (const StoreError& failure) {
      error = failure.error();
    }
    const std::lock_guard lock(mutex_);
    if (!error && pattern_ != Pattern::read) return write(slot);
    if (error && !error_) error_ = error;
    finished(slot);
  }

  // Each block is opened, updated and sealed while it is in the cache, as the engine does.
  void work_on(Slot& slot) {
    const Chunk& chunk = *slot.chunk;
    const int64_t step = by_caller_ ? kStepElements : chunk.elements;
    for (int64_t begin = 0; begin < chunk.elements; begin += step) {
      const int64_t end = std::min(begin + step, chunk.elements);
      for (size_t i = 0; by_caller_ && i < chunk.components; ++i)
        slot.sealed[i].open(store_, begin * kElementBytes[i], end * kElementBytes[i]);
      if (pattern_ == Pattern::mixed) update(slot, begin, end);
      for (size_t i = 0; by_caller_ && pattern_ != Pattern::read && i < chunk.components; ++i)
        slot.sealed[i].seal(begin * kElementBytes[i], end * kElementBytes[i]);
    }
  }

  void update(Slot& slot, int64_t begin, int64_t end) {
    const auto& [lo, m, v] = slot.transfers;
    const int64_t host = slot.chunk->first_element * kHostElementBytes;
    overspill_consume(between_.hi + host, lo.memory, m.memory, v.memory, between_.gradient + host, begin,
                      end);
  }

  void transferred(Slot& slot, const Transfer& transfer) {
    const std::lock_guard lock(mutex_);
    if (transfer.error && !error_) error_ = transfer.error;
    if (--slot.pending > 0) return;
    if (transfer.kind == Transfer::Kind::write) {
      for (size_t i = 0; i < slot.replaced.components; ++i) store_.release(slot.replaced.extents[i]);
    } else if (pattern_ == Pattern::mixed || by_caller_) {
      return hand_to_worker(slot);
    } else if (pattern_ == Pattern::moved) {
      return write(slot);
    }
    finished(slot);
  }

  void finished(Slot& slot) {
    if (++finished_ == chunks_.size()) done_.notify_one();
    next_chunk(slot);
  }

  Store& store_;
  std::vector<Chunk>& chunks_;
  const Pattern pattern_;
  const Between& between_;
  const bool by_caller_;
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
  Contender(const FileStoreOptions& options, int64_t sequential_bytes, bool with_mixed, bool by_caller)
      : budget_("host", kSlots * kSlotBytes + kHostBytes),
        memory_(budget_, kSlots * kSlotBytes, "slots"),
        host_(budget_, with_mixed ? kHostBytes : 0, "weights and gradients"),
        executor_(optim::make_thread_executor(1)),
        between_{by_caller, host_.data(), host_.data() + host_.bytes() / 2, executor_.get()},
        store_(make_file_store(options)) {
    fill(memory_.span());
    fill(host_.span());
    store_->register_memory(memory_.span());

    std::vector<int64_t> sizes;  // of chunks, in elements
    int64_t bytes = sequential_bytes;
    for (int64_t shard = kMiB; with_mixed && shard <= 64 * kMiB; shard *= 2) {
      for (int64_t left = shard / 4; left > 0; left -= kChunkElements) {
        sizes.push_back(std::min(left, kChunkElements));
        bytes += sizes.back() * (kSlotBytes / kChunkElements);
      }
    }
    store_->reserve(bytes + 2 * kSlots * kSlotBytes);
    write_all_space(bytes + kSlots * kSlotBytes);
    for (int64_t at = 0; at < sequential_bytes; at += kSequentialBytes) {
      sequential_.push_back({.extents = {store_->allocate(kSequentialBytes)}, .components = 1});
    }
    int64_t first_element = 0;
    for (const int64_t elements : sizes) {
      Chunk& made = mixed_.emplace_back();
      made.first_element = std::exchange(first_element, first_element + elements);
      made.elements = elements;
      for (size_t i = 0; i < kComponents; ++i)
        made.extents[i] = store_->allocate(elements * kElementBytes[i]);
    }
    for (auto* chunks : {&sequential_, &mixed_})
      Turn(*store_, memory_.span(), *chunks, Pattern::write, between_).wait();
    store_->drain();
  }

  ~Contender() {
    store_->drain();
    store_->unregister_memory(memory_.span());
  }
  Contender(const Contender&) = delete;
  Contender& operator=(const Contender&) = delete;

  nlohmann::json turn(Pattern pattern) {
    const bool both = pattern == Pattern::moved || pattern == Pattern::mixed;
    std::vector<Chunk>& chunks = both ? mixed_ : sequential_;
    const Usage before = Usage::now();
    const auto start = std::chrono::steady_clock::now();
    Turn turn(*store_, memory_.span(), chunks, pattern, between_);
    turn.wait();
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
    store_->drain();  // the last callback has returned
    const Usage after = Usage::now();
    return {{"bytes", bytes_of(chunks) * (both ? 2 : 1)},
            {"seconds", wall.count()},
            {"cpu_s", after.cpu_s - before.cpu_s},
            {"switches", after.switches - before.switches}};
  }

  std::string backend() const { return store_->stats().backend; }

 private:
  static constexpr int64_t kHostBytes = 2 * kHostElementBytes * 127 * kMiB / 4;  // of shards of 1 to 64 MiB

  // Small positive numbers, as states are, that a disk could hardly compress.
  static void fill(std::span<std::byte> memory) {
    uint64_t state = 1;
    for (size_t i = 0; i < memory.size(); i += 8) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      const uint64_t two = (state >> 8 & 0x007FFFFF'007FFFFFU) | 0x3A000000'3A000000U;
      std::memcpy(memory.data() + i, &two, sizeof(two));
    }
  }

  // The first write of reserved space costs the file system more than any later one; a run does that once.
  void write_all_space(int64_t bytes) {
    std::vector<Chunk> chunks;
    for (int64_t at = 0; at + kSequentialBytes <= bytes; at += kSequentialBytes) {
      chunks.push_back({.extents = {store_->allocate(kSequentialBytes)}, .components = 1});
    }
    Turn(*store_, memory_.span(), chunks, Pattern::write, between_).wait();
    store_->drain();
    for (const Chunk& chunk : chunks) store_->release(chunk.extents[0]);
  }

  engine::Budget budget_;
  engine::HostMemory memory_;
  engine::HostMemory host_;
  std::unique_ptr<optim::Executor> executor_;
  const Between between_;
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
  bool by_store = false;
  app.add_flag("--by-store", by_store, "the store compares and checksums, not the worker");
  app.add_option("--mib", mib, "bytes of a sequential turn");
  app.add_option("--piece-kib", piece_kib);
  app.add_option("--depth", options.queue_depth);
  CLI11_PARSE(app, argc, argv);
  options.paths.assign(folders.begin(), folders.end());
  options.piece_bytes = piece_kib << 10;
  options.job = "bench-io-" + std::to_string(::getpid());

  Contender contender(options, mib * kMiB, !sequential, !by_store);
  const auto answer = [](const nlohmann::json& line) { std::cout << line.dump() << std::endl; };
  answer({{"backend", contender.backend()}});
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "read")
      answer(contender.turn(Pattern::read));
    else if (line == "write")
      answer(contender.turn(Pattern::write));
    else if (line == "moved")
      answer(contender.turn(Pattern::moved));
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
