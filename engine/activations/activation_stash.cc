#include "engine/activations/activation_stash.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace overspill::engine {
namespace {

constexpr int64_t kFreePart = 4;  // of the arena, one part of so many is kept free in forward

}  // namespace

ActivationStash::ActivationStash(const Setup& setup, Core& core, Hardware& hardware)
    : setup_(setup),
      core_(core),
      memory_(hardware.host_budget, setup.plan.activations_host_bytes, "activations"),
      ranges_(setup.plan.activations_host_bytes, io::kBlockBytes),
      room_bytes_(setup.plan.activations_host_bytes) {
  if (memory_.bytes() == 0) return;
  if (!core.store.exists()) throw std::invalid_argument("activations have an arena, but there is no NVMe");
  core.store->register_memory(memory_.span());
}

std::optional<int64_t> ActivationStash::put(std::span<const std::byte> bytes) {
  const int64_t room = io::round_up_to_block(std::ssize(bytes));
  if (bytes.empty() || room > memory_.bytes()) return std::nullopt;
  taken_ = 0;
  const int64_t place = make_room(room);
  Tensor& tensor = tensors_[++last_];
  tensor.owner = this;
  tensor.number = last_;
  tensor.bytes = std::ssize(bytes);
  tensor.room = room;
  tensor.place = place;
  tensor.transfer.memory = memory_.data() + place;
  tensor.transfer.on_complete = &ActivationStash::on_transfer;
  tensor.transfer.context = &tensor;
  {
    const Unlocked unlocked(core_.mutex());
    std::ranges::copy(bytes, tensor.transfer.memory);
    std::memset(tensor.transfer.memory + bytes.size(), 0, static_cast<size_t>(room) - bytes.size());
  }
  become(tensor, State::memory);
  core_.changed.notify_all();  // it can make way now
  stats_.put_bytes += tensor.bytes;
  write_behind();
  return tensor.number;
}

void ActivationStash::take(int64_t number, std::span<std::byte> to) {
  Tensor& tensor = at(number);
  if (std::ssize(to) != tensor.bytes) {
    throw std::invalid_argument(
        fmt::format("an activation has {} bytes, and {} are asked for", tensor.bytes, to.size()));
  }
  taken_ = number;
  ++tensor.readers;
  dirty_.erase(number);
  clean_.erase(number);
  try {
    core_.check();
    bring(tensor);
  } catch (...) {
    --tensor.readers;
    become(tensor, tensor.state);
    settle(tensor);
    throw;
  }
  // Other readers may copy at the same time; a write that ends meanwhile leaves it in the arena.
  {
    const Unlocked unlocked(core_.mutex());
    std::ranges::copy(std::span(memory_.data() + tensor.place, to.size()), to.begin());
  }
  --tensor.readers;
  become(tensor, tensor.state);
  settle(tensor);
}

template <class Done>
void ActivationStash::wait(Done done) {
  stats_.wait_ns += core_.wait(done, Cause::activations);
}

/// Returns when the bytes are in the arena. They stay there, since the tensor has a reader.
void ActivationStash::bring(Tensor& tensor) {
  while (tensor.state != State::memory && tensor.state != State::writing) {
    if (tensor.state == State::nvme) {
      fetch(tensor);
    } else {
      wait([&]() REQUIRES(engine_mutex) { return tensor.state != State::reading; });
    }
  }
}

void ActivationStash::drop(int64_t number) noexcept {
  Tensor& tensor = at(number);
  tensor.dropped = true;
  settle(tensor);
}

/// After any change of a tensor: it ends where it was dropped and nothing is under way with it. Also ends
/// waits.
void ActivationStash::settle(Tensor& tensor) noexcept {
  ++changes_;
  const bool rests = tensor.state == State::memory || tensor.state == State::nvme;
  if (tensor.dropped && tensor.readers == 0 && rests) {
    if (tensor.place >= 0) leave_arena(tensor);
    give_up(tensor.extent);
    away_.erase(tensor.number);
    tensors_.erase(tensor.number);
  }
  read_ahead();
  core_.changed.notify_all();
}

void ActivationStash::leave_arena(Tensor& tensor) noexcept {
  if (setup_.config.poison)
    std::memset(memory_.data() + tensor.place, 0xFF, static_cast<size_t>(tensor.room));
  ranges_.release(tensor.place);
  tensor.place = -1;
  become(tensor, State::nvme);
}

/// The only place where states change, and the numbers that follow from them.
void ActivationStash::become(Tensor& tensor, State state) {
  if (tensor.state == State::writing) leaving_bytes_ -= tensor.room;
  tensor.state = state;
  if (state == State::writing) leaving_bytes_ += tensor.room;
  for (std::set<int64_t>* numbers : {&dirty_, &clean_, &away_}) numbers->erase(tensor.number);
  if (state == State::nvme) away_.insert(tensor.number);
  if (state == State::memory && tensor.readers == 0)
    (tensor.extent.empty() ? dirty_ : clean_).insert(tensor.number);
  ++changes_;
}

/// A place in the arena, of no more bytes than that has. Where nothing can leave it, something is being
/// copied or moved, and then can.
int64_t ActivationStash::make_room(int64_t bytes) {
  while (true) {
    core_.check();
    if (const auto place = ranges_.allocate(bytes, RangeAllocator::End::low)) return *place;
    if (!clean_.empty()) {
      leave_arena(first_of(clean_));
      continue;
    }
    const bool enough_leaves = leaving_bytes_ > 0 && ranges_.free_bytes() + leaving_bytes_ >= bytes;
    if (!dirty_.empty() && !enough_leaves) {
      write_out(first_of(dirty_));
      continue;
    }
    const uint64_t before = changes_;
    ++waiting_;  // what comes free is not for reading ahead
    try {
      wait([&]() REQUIRES(engine_mutex) { return changes_ != before; });
    } catch (...) {
      --waiting_;
      throw;
    }
    --waiting_;
  }
}

/// A full disk is not told yet: what was put is in the arena. make_room() tells of it when it has to.
void ActivationStash::write_behind() {
  try {
    while (!dirty_.empty() && ranges_.free_bytes() + leaving_bytes_ < memory_.bytes() / kFreePart)
      write_out(first_of(dirty_));
  } catch (const io::StoreError&) {
    return;
  }
}

/// The store may have to lengthen its files for the extent, so it is asked without the mutex.
void ActivationStash::write_out(Tensor& tensor) {
  core_.check();
  become(tensor, State::writing);
  io::Extent extent;
  try {
    extent = allocate(tensor.room);
    core_.check();  // after a failure no transfer may begin any more
  } catch (...) {
    give_up(extent);
    become(tensor, State::memory);
    settle(tensor);
    throw;
  }
  if (tensor.dropped && tensor.readers == 0) {
    give_up(extent);
    become(tensor, State::memory);
    return settle(tensor);
  }
  tensor.transfer.kind = io::Transfer::Kind::write;
  tensor.transfer.priority = io::Transfer::Priority::write_behind;
  tensor.transfer.extent = extent;
  core_.store.submit(tensor.transfer);
}

io::Extent ActivationStash::allocate(int64_t bytes) {
  extent_bytes_ += bytes;  // at once: others allocate while this one waits for the disk
  try {
    while (extent_bytes_ > room_bytes_) {
      if (growing_) {
        wait([&]() REQUIRES(engine_mutex) { return !growing_; });
      } else {
        grow();
      }
    }
    return core_.store.allocate(bytes);
  } catch (...) {
    extent_bytes_ -= bytes;
    throw;
  }
}

/// How much forward saves is known when it does: room is reserved as it is needed, half as much again each
/// time, since each reservation makes files; on a disk that has less, what is needed.
void ActivationStash::grow() {
  const int64_t least = extent_bytes_ - room_bytes_;
  const int64_t half = room_bytes_ / 2 / io::kBlockBytes * io::kBlockBytes;
  growing_ = true;
  try {
    int64_t more = std::max({least, memory_.bytes(), half});
    try {
      core_.store.reserve_more(more);
    } catch (const io::StoreError&) {
      if (more == least) throw;
      more = least;
      core_.store.reserve_more(more);
    }
    room_bytes_ += more;
  } catch (...) {
    growing_ = false;
    core_.changed.notify_all();
    throw;
  }
  growing_ = false;
  core_.changed.notify_all();
}

void ActivationStash::give_up(io::Extent& extent) {
  extent_bytes_ -= extent.bytes;
  if (core_.store.exists()) core_.store.give_up(extent);
}

/// Of a tensor that is wanted, and on NVMe alone.
void ActivationStash::fetch(Tensor& tensor) {
  become(tensor, State::reading);  // so that no other reader begins it; it has no place yet
  int64_t place = 0;
  try {
    place = make_room(tensor.room);
  } catch (...) {
    become(tensor, State::nvme);
    core_.changed.notify_all();
    throw;
  }
  ++stats_.demand_reads;
  read(tensor, place, io::Transfer::Priority::demand);
}

void ActivationStash::read(Tensor& tensor, int64_t place, io::Transfer::Priority priority) {
  become(tensor, State::reading);
  tensor.place = place;
  tensor.transfer.memory = memory_.data() + place;
  tensor.transfer.kind = io::Transfer::Kind::read;
  tensor.transfer.priority = priority;
  tensor.transfer.extent = tensor.extent;
  core_.store.submit(tensor.transfer);
}

/// Of those before the one that backward took last, the newest first, into what is free.
void ActivationStash::read_ahead() noexcept {
  if (taken_ == 0 || waiting_ > 0 || !core_.failure.empty()) return;
  while (true) {
    const auto behind = away_.lower_bound(taken_);
    if (behind == away_.begin()) return;
    Tensor& tensor = at(*std::prev(behind));
    const auto place = ranges_.allocate(tensor.room, RangeAllocator::End::low);
    if (!place) return;
    read(tensor, *place, io::Transfer::Priority::prefetch);
  }
}

/// What was written while backward goes on stays: it is what backward wants next.
void ActivationStash::on_transfer(io::Transfer& transfer) noexcept {
  Tensor& tensor = *static_cast<Tensor*>(transfer.context);
  ActivationStash& self = *tensor.owner;
  Core& core = self.core_;
  const MutexLock guard(core.mutex());
  core.store.completed(transfer);
  if (transfer.error) return core.fail(fmt::format("activations: {}", transfer.error->message()));
  const bool written = tensor.state == State::writing;
  (written ? self.stats_.written_bytes : self.stats_.read_bytes) += tensor.room;
  if (written) tensor.extent = transfer.extent;
  self.become(tensor, State::memory);
  if (written && tensor.readers == 0 && self.taken_ == 0 && !tensor.dropped) self.leave_arena(tensor);
  self.settle(tensor);
}

ActivationStash::Tensor& ActivationStash::at(int64_t number) {
  const auto found = tensors_.find(number);
  if (found == tensors_.end()) throw std::logic_error(fmt::format("there is no activation {}", number));
  return found->second;
}

}  // namespace overspill::engine
