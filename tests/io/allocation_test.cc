// The I/O path asks nothing of malloc once it is warm (STYLE: after it the step path allocates nothing).
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <new>

#include "tests/io/store_test_util.h"

namespace {
std::atomic<int64_t> allocations = 0;
}

// noinline: the compiler must not pair what it sees of new with the free() in delete.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, std::align_val_t alignment) {
  ++allocations;
  const size_t unit = static_cast<size_t>(alignment);
  if (void* memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace overspill::io {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// A step: every chunk is read, written to a new extent, and its old one released.
void step(Store& store, std::deque<Transfer>& chunks, std::vector<Extent>& extents) {
  for (size_t i = 0; i < chunks.size(); ++i) {
    chunks[i].kind = Transfer::Kind::read;
    chunks[i].extent = extents[i];
    store.submit(chunks[i]);
  }
  store.drain();
  for (size_t i = 0; i < chunks.size(); ++i) {
    chunks[i].kind = Transfer::Kind::write;
    chunks[i].extent = store.allocate(extents[i].bytes);
    store.submit(chunks[i]);
  }
  store.drain();
  for (size_t i = 0; i < chunks.size(); ++i) {
    store.release(extents[i]);
    extents[i] = chunks[i].extent;
  }
}

void expect_no_allocations(FileStoreOptions::Backend backend) {
  const ScratchFolder folder;
  FileStoreOptions options = file_options(folder.path());
  options.backend = backend;
  std::unique_ptr<Store> store;
  try {
    store = make_file_store(options);
  } catch (const StoreError& error) {
    GTEST_SKIP() << error.what();
  }
  store->reserve(32 * kMiB);
  AlignedMemory memory(16 * kMiB);
  std::deque<Transfer> chunks;
  std::vector<Extent> extents;
  for (int64_t i = 0; i < 8; ++i) {
    extents.push_back(store->allocate((i % 3 + 1) * 256 * 1024));
    chunks.push_back(make_transfer(Transfer::Kind::write, extents.back(), memory.data() + i * kMiB));
    store->submit(chunks.back());
  }
  store->drain();
  for (int warm_up = 0; warm_up < 20; ++warm_up) step(*store, chunks, extents);
  const int64_t before = allocations;
  for (int i = 0; i < 20; ++i) step(*store, chunks, extents);
  EXPECT_EQ(allocations - before, 0);
  for (const Transfer& chunk : chunks) EXPECT_FALSE(chunk.error);
}

TEST(Allocations, NoneOnTheWarmPathOfIoUring) {
  expect_no_allocations(FileStoreOptions::Backend::uring);
}
TEST(Allocations, NoneOnTheWarmPathOfThreads) {
  expect_no_allocations(FileStoreOptions::Backend::threads);
}

}  // namespace
}  // namespace overspill::io
