// Page-aligned host memory outside malloc's heap: huge pages where the kernel gives them, never copied by
// fork (MADV_DONTFORK).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/memory/budget.h"
#include "kernels/host_pages.h"

namespace overspill::engine {

/// Anonymous memory in huge pages (kernels/host_pages.h), charged to a budget while it lives. Move-only.
class HostMemory {
 public:
  HostMemory() = default;
  /// Throws BudgetError or std::bad_alloc.
  HostMemory(Budget& budget, int64_t bytes, const char* what);
  std::byte* data() const { return pages_.data(); }
  int64_t bytes() const { return pages_.bytes(); }
  std::span<std::byte> span() const { return pages_.span(); }

 private:
  Reservation reservation_;
  kernels::HostPages pages_;
};

/// What a released parameter's memory reads as: NaN in every float format, over its full length, for the
/// price of one small file's pages mapped repeatedly. Private and writable: a stray write neither crashes nor
/// reaches another parameter's mapping.
class NanPages {
 public:
  explicit NanPages(int64_t bytes);  // rounded up to pages; throws std::bad_alloc
  NanPages(const NanPages&) = delete;
  NanPages& operator=(const NanPages&) = delete;
  ~NanPages();
  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

/// The first `bytes` of a file, mapped shared: the kernel writes them out where memory is short. The file is
/// at least that long, with its disk blocks allocated; it may be closed afterwards. A forked child writes
/// into the same pages.
class FilePages {
 public:
  FilePages(int file, int64_t bytes);  // throws std::bad_alloc
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;
  ~FilePages();
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace overspill::engine
