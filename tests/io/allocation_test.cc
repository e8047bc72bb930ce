// The I/O path asks nothing of malloc once it is warm (STYLE: after it the step path allocates nothing).
#include <gtest/gtest.h>

#include <deque>

#include "tests/allocation_watch.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

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
  overspill::testing::watch_allocations();
  for (int i = 0; i < 20; ++i) step(*store, chunks, extents);
  EXPECT_EQ(overspill::testing::stop_watching_allocations(), 0);
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
