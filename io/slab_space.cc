#include "io/slab_space.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "io/checksum.h"

namespace overspill::io {
namespace {

std::string describe(const Extent& extent) {
  return fmt::format("slab {}, offset {}, {} bytes, generation {}", extent.slab, extent.offset, extent.bytes,
                     extent.generation);
}

Error invalid(Operation operation, const Extent& extent, const std::string& what) {
  return {.kind = ErrorKind::invalid,
          .operation = operation,
          .offset_bytes = extent.offset,
          .length_bytes = extent.bytes,
          .detail = fmt::format("{} ({})", what, describe(extent))};
}

}  // namespace

std::optional<Error> check_transfer(const Transfer& transfer) {
  const Operation operation = transfer.kind == Transfer::Kind::write ? Operation::write : Operation::read;
  if (transfer.on_complete == nullptr)
    throw StoreError(invalid(operation, transfer.extent, "no on_complete was given"));
  if (transfer.extent.empty()) return invalid(operation, transfer.extent, "the extent is empty");
  if (transfer.memory == nullptr || reinterpret_cast<uintptr_t>(transfer.memory) % kBlockBytes != 0) {
    return invalid(
        operation, transfer.extent,
        fmt::format("memory at {} is not aligned to {} bytes", fmt::ptr(transfer.memory), kBlockBytes));
  }
  const auto wanted = static_cast<size_t>(checksum_blocks(transfer.extent.bytes));
  if (transfer.check == Transfer::Check::by_caller && transfer.checksums.size() != wanted) {
    return invalid(operation, transfer.extent,
                   fmt::format("there is room for {} checksums, not {}", transfer.checksums.size(), wanted));
  }
  return std::nullopt;
}

uint32_t SlabSpace::add_slab(int group, int64_t bytes) {
  const MutexLock lock(mutex_);
  Slab slab{group, bytes, bytes, std::pmr::map<int64_t, int64_t>(&pool_),
            std::pmr::unordered_map<int64_t, Record>(&pool_)};
  slab.free_runs.emplace(0, bytes);
  slabs_.push_back(std::move(slab));
  slab_bytes_ += bytes;
  return static_cast<uint32_t>(slabs_.size() - 1);
}

Extent SlabSpace::occupy(uint32_t number, int64_t offset, int64_t bytes, std::span<const uint64_t> checksums,
                         int pins) {
  const MutexLock lock(mutex_);
  Slab& slab = slabs_.at(number);
  const auto run = std::prev(slab.free_runs.upper_bound(offset));
  const auto [begin, length] = *run;
  slab.free_runs.erase(run);
  if (offset > begin) slab.free_runs.emplace(begin, offset - begin);
  if (offset + bytes < begin + length)
    slab.free_runs.emplace(offset + bytes, begin + length - offset - bytes);
  Record record{next_generation(), bytes,
                std::pmr::vector<uint64_t>(checksums.begin(), checksums.end(), &pool_)};
  record.pins = pins;
  record.released = true;
  record.content = Content::written;
  slab.records.emplace(offset, std::move(record));
  slab.free_bytes -= bytes;
  allocated_bytes_ += bytes;
  return {.slab = number, .generation = last_generation_, .offset = offset, .bytes = bytes};
}

std::optional<Extent> SlabSpace::written_at(uint32_t slab, int64_t offset, int64_t bytes,
                                            std::span<const uint64_t> checksums) const {
  const MutexLock lock(mutex_);
  if (slab >= slabs_.size()) return std::nullopt;
  const auto found = slabs_[slab].records.find(offset);
  if (found == slabs_[slab].records.end()) return std::nullopt;
  const Record& record = found->second;
  if (record.content != Content::written || record.bytes != bytes ||
      !std::ranges::equal(record.sums, checksums))
    return std::nullopt;
  return Extent{.slab = slab, .generation = record.generation, .offset = offset, .bytes = bytes};
}

bool SlabSpace::reclaim(const Extent& extent) {
  const MutexLock lock(mutex_);
  Record* const record = find(extent);
  return record != nullptr && std::exchange(record->released, false);
}

void SlabSpace::raise_limit(int64_t bytes) {
  const MutexLock lock(mutex_);
  limit_bytes_ = std::max(limit_bytes_, bytes);
}

int64_t SlabSpace::limit_bytes() const {
  const MutexLock lock(mutex_);
  return limit_bytes_;
}

int64_t SlabSpace::slab_bytes() const {
  const MutexLock lock(mutex_);
  return slab_bytes_;
}

int64_t SlabSpace::allocated_bytes() const {
  const MutexLock lock(mutex_);
  return allocated_bytes_;
}

bool SlabSpace::within_limit(int64_t bytes) const {
  const MutexLock lock(mutex_);
  return bytes <= limit_bytes_ - allocated_bytes_;
}

Extent SlabSpace::allocate(int64_t bytes, int group) {
  const MutexLock lock(mutex_);
  if (bytes > limit_bytes_ - allocated_bytes_) return {};
  for (size_t number = 0; number < slabs_.size(); ++number) {
    Slab& slab = slabs_[number];
    if (slab.group != group || slab.free_bytes < bytes) continue;
    const Extent extent = allocate_in(slab, static_cast<uint32_t>(number), bytes);
    if (!extent.empty()) return extent;
  }
  return {};
}

uint32_t SlabSpace::next_generation() {
  if (++last_generation_ == 0) ++last_generation_;  // 0 is an empty extent's
  return last_generation_;
}

Extent SlabSpace::allocate_in(Slab& slab, uint32_t number, int64_t bytes) {
  const auto run = std::find_if(slab.free_runs.begin(), slab.free_runs.end(),
                                [&](const auto& candidate) { return candidate.second >= bytes; });
  if (run == slab.free_runs.end()) return {};
  const auto [offset, run_bytes] = *run;

  Record record{next_generation(), bytes,
                std::pmr::vector<uint64_t>(static_cast<size_t>(checksum_blocks(bytes)), &pool_)};
  slab.records.emplace(offset, std::move(record));

  if (run_bytes == bytes) {
    slab.free_runs.erase(run);
  } else {  // the tail stays free; re-keying the node keeps it
    auto node = slab.free_runs.extract(run);
    node.key() = offset + bytes;
    node.mapped() = run_bytes - bytes;
    slab.free_runs.insert(std::move(node));
  }
  slab.free_bytes -= bytes;
  allocated_bytes_ += bytes;
  return {.slab = number, .generation = last_generation_, .offset = offset, .bytes = bytes};
}

SlabSpace::Record* SlabSpace::find(const Extent& extent) {
  if (extent.slab >= slabs_.size()) return nullptr;
  auto& records = slabs_[extent.slab].records;
  const auto found = records.find(extent.offset);
  if (found == records.end()) return nullptr;
  Record& record = found->second;
  return record.generation == extent.generation && record.bytes == extent.bytes ? &record : nullptr;
}

SlabSpace::Record& SlabSpace::require(const Extent& extent, const char* what) {
  Record* record = find(extent);
  if (record == nullptr) {
    throw StoreError(
        invalid(Operation::remove, extent, fmt::format("{} of an extent that is not allocated", what)));
  }
  return *record;
}

void SlabSpace::release(const Extent& extent) {
  const MutexLock lock(mutex_);
  Record& record = require(extent, "release");
  if (record.released) {
    throw StoreError(invalid(Operation::remove, extent, "release of an extent that was released before"));
  }
  record.released = true;
  free_if_unused(extent, record);
}

void SlabSpace::pin(const Extent& extent) {
  const MutexLock lock(mutex_);
  ++require(extent, "pin").pins;
}

void SlabSpace::unpin(const Extent& extent) {
  const MutexLock lock(mutex_);
  Record& record = require(extent, "unpin");
  if (record.pins == 0)
    throw StoreError(invalid(Operation::remove, extent, "unpin of an extent that is not pinned"));
  --record.pins;
  free_if_unused(extent, record);
}

void SlabSpace::free_if_unused(const Extent& extent, const Record& record) {
  if (!record.released || record.pins > 0 || record.transfers > 0) return;
  Slab& slab = slabs_[extent.slab];
  slab.records.erase(extent.offset);
  slab.free_bytes += extent.bytes;
  allocated_bytes_ -= extent.bytes;

  auto run = slab.free_runs.emplace(extent.offset, extent.bytes).first;
  if (const auto after = std::next(run);
      after != slab.free_runs.end() && run->first + run->second == after->first) {
    run->second += after->second;
    slab.free_runs.erase(after);
  }
  if (run == slab.free_runs.begin()) return;
  if (const auto before = std::prev(run); before->first + before->second == run->first) {
    before->second += run->second;
    slab.free_runs.erase(run);
  }
}

std::optional<Error> SlabSpace::begin(Transfer::Kind kind, const Extent& extent) {
  const bool writes = kind == Transfer::Kind::write;
  const Operation operation = writes ? Operation::write : Operation::read;
  const MutexLock lock(mutex_);
  Record* record = find(extent);
  if (record == nullptr) return invalid(operation, extent, "transfer of an extent that is not allocated");
  if (writes) {
    // In place would break what copy-on-write promises: one complete version at every instant.
    if (record->content != Content::undefined) return invalid(operation, extent, "an extent is written once");
    record->content = Content::writing;
  } else if (record->content != Content::written) {
    Error error = invalid(operation, extent, "read of an extent whose write has not completed");
    error.kind = ErrorKind::corrupt;
    return error;
  }
  ++record->transfers;
  return std::nullopt;
}

void SlabSpace::end(Transfer::Kind kind, const Extent& extent, bool succeeded) {
  const MutexLock lock(mutex_);
  Record& record = require(extent, "end of a transfer");
  if (kind == Transfer::Kind::write) record.content = succeeded ? Content::written : Content::undefined;
  --record.transfers;
  free_if_unused(extent, record);
}

std::span<uint64_t> SlabSpace::sums(const Extent& extent) {
  const MutexLock lock(mutex_);
  return require(extent, "use").sums;
}

bool SlabSpace::written(const Extent& extent) const {
  const MutexLock lock(mutex_);
  const Record* record = find(extent);
  return record != nullptr && record->content == Content::written;
}

}  // namespace overspill::io
