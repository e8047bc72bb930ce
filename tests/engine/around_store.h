// A store around another, for tests that change a part of it.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "io/store.h"

namespace overspill::testing {

class AroundStore : public io::Store {
 public:
  explicit AroundStore(std::unique_ptr<io::Store> store) : store_(std::move(store)) {}
  void reserve(int64_t bytes) override { store_->reserve(bytes); }
  io::TakenOver take_over(std::span<const io::KeptSlabs> kept) override { return store_->take_over(kept); }
  std::optional<io::Extent> own_extent(const std::filesystem::path& file, int64_t offset, int64_t bytes,
                                       std::span<const uint64_t> checksums) const override {
    return store_->own_extent(file, offset, bytes, checksums);
  }
  bool reclaim(const io::Extent& extent) override { return store_->reclaim(extent); }
  io::Extent allocate(int64_t bytes) override { return store_->allocate(bytes); }
  void release(const io::Extent& extent) override { store_->release(extent); }
  void pin(const io::Extent& extent) override { store_->pin(extent); }
  void unpin(const io::Extent& extent) override { store_->unpin(extent); }
  void submit(io::Transfer& transfer) override { store_->submit(transfer); }
  void drain() override { store_->drain(); }
  bool poll() override { return store_->poll(); }
  io::Export export_extents(std::span<const io::Extent> extents, const std::filesystem::path& folder,
                            io::ExportPace& pace) override {
    return store_->export_extents(extents, folder, pace);
  }
  using io::Store::export_extents;
  bool share_lives(uint64_t share) const override { return store_->share_lives(share); }
  void share_named(uint64_t share, const std::filesystem::path& folder, const std::string& prefix) override {
    store_->share_named(share, folder, prefix);
  }
  void end_share(uint64_t share) noexcept override { store_->end_share(share); }
  void register_memory(std::span<std::byte> memory) override { store_->register_memory(memory); }
  void unregister_memory(std::span<std::byte> memory) override { store_->unregister_memory(memory); }
  std::string file_of(const io::Extent& extent) const override { return store_->file_of(extent); }
  io::StoreStats stats() const override { return store_->stats(); }

 private:
  const std::unique_ptr<io::Store> store_;
};

/// Calls `before` at each allocate(), on its thread; what `before` throws is what allocate() throws.
class WatchedAllocations final : public AroundStore {
 public:
  WatchedAllocations(std::unique_ptr<io::Store> store, std::function<void()> before)
      : AroundStore(std::move(store)), before_(std::move(before)) {}
  io::Extent allocate(int64_t bytes) override {
    before_();
    return AroundStore::allocate(bytes);
  }

 private:
  const std::function<void()> before_;
};

}  // namespace overspill::testing
