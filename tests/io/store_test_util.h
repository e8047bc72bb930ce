// What the store's tests share: aligned memory, a folder of one's own, transfers that are waited for.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "io/file_store.h"
#include "io/say.h"
#include "io/store.h"

namespace overspill::io {

inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kPiece = kChecksumBlockBytes;

class AlignedMemory {
 public:
  explicit AlignedMemory(int64_t bytes)
      : bytes_(static_cast<size_t>(bytes)),
        memory_(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes_)), &std::free) {
    std::fill_n(memory_.get(), bytes_, std::byte{0xAA});
  }
  std::byte* data() { return memory_.get(); }
  std::span<std::byte> all() { return {memory_.get(), bytes_}; }

  /// No two 8-byte words alike, neither here nor under another small seed. Cheap, for sanitized builds.
  void fill(uint64_t seed) {
    for (size_t i = 0; i + 8 <= bytes_; i += 8) {
      const uint64_t value = ((seed << 32) + i) * 0x9E3779B97F4A7C15U;
      std::memcpy(memory_.get() + i, &value, sizeof(value));
    }
  }
  friend bool operator==(const AlignedMemory& a, const AlignedMemory& b) {
    return a.bytes_ == b.bytes_ && std::memcmp(a.memory_.get(), b.memory_.get(), a.bytes_) == 0;
  }

 private:
  size_t bytes_;
  std::unique_ptr<std::byte, decltype(&std::free)> memory_;
};

/// A folder that is gone afterwards. On the disk, not on tmpfs, unless said otherwise.
class ScratchFolder {
 public:
  explicit ScratchFolder(const std::filesystem::path& parent = std::filesystem::current_path()) {
    std::string name = (parent / "io-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      throw std::runtime_error("no scratch folder in " + parent.string());
    path_ = name;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline Transfer make_transfer(Transfer::Kind kind, const Extent& extent, std::byte* memory) {
  Transfer transfer;
  transfer.kind = kind;
  transfer.extent = extent;
  transfer.memory = memory;
  transfer.on_complete = [](Transfer&) noexcept {};
  return transfer;
}

inline std::optional<Error> run(Store& store, Transfer::Kind kind, const Extent& extent, std::byte* memory) {
  Transfer transfer = make_transfer(kind, extent, memory);
  store.submit(transfer);
  store.drain();
  return transfer.error;
}
inline std::optional<Error> write(Store& store, const Extent& extent, AlignedMemory& memory) {
  return run(store, Transfer::Kind::write, extent, memory.data());
}
inline std::optional<Error> read(Store& store, const Extent& extent, AlignedMemory& memory) {
  return run(store, Transfer::Kind::read, extent, memory.data());
}

/// A new extent that holds what `seed` makes.
inline Extent written(Store& store, int64_t bytes, uint64_t seed) {
  const Extent extent = store.allocate(bytes);
  AlignedMemory memory(extent.bytes);
  memory.fill(seed);
  const auto error = write(store, extent, memory);
  EXPECT_FALSE(error) << error->message();
  return extent;
}

/// The error that `call` throws; fails the test where it throws none.
template <typename Call>
Error error_of(Call&& call) {
  try {
    std::forward<Call>(call)();
  } catch (const StoreError& error) {
    return error.error();
  }
  ADD_FAILURE() << "no StoreError was thrown";
  return {};
}

/// Forks, runs `child` there, returns its exit status; the child never comes back into the test.
template <typename Child>
int exit_status_of(Child&& child) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    int status = 99;
    try {
      status = child();
    } catch (const std::exception& error) {
      say_on_stderr(fmt::format("child: {}", error.what()));
    }
    ::_exit(status);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline FileStoreOptions file_options(const std::filesystem::path& path, const std::string& job = "test") {
  FileStoreOptions options;
  options.paths = {path};
  options.job = job;
  options.slab_bytes = int64_t{4} << 20;
  options.piece_bytes = int64_t{128} << 10;  // so that most transfers have several pieces
  options.queue_depth = 8;
  options.threads = 4;
  options.patience.retry.first_wait = std::chrono::microseconds(10);
  return options;
}

}  // namespace overspill::io
