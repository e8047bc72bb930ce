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
  if (bytes.empty()) return std::nullopt;
  taken_ = 0;
  const int64_t room = io::round_up_to_block(std::ssize(bytes));
  const std::optional<int64_t> place = make_room(room);
  if (!place) return std::nullopt;
  Tensor& tensor = tensors_[++last_];
  tensor.owner = this;
  tensor.number = last_;
  tensor.bytes = std::ssize(bytes);
  tensor.room = room;
  tensor.place = *place;
  tensor.transfer.memory = memory_.data() + *place;
  tensor.transfer.on_complete = &ActivationStash::on_transfer;
  tensor.transfer.context = &tensor;
  begin_work(tensor, State::filling);
  {
    const Unlocked unlocked(core_.mutex());
    std::ranges::copy(bytes, tensor.transfer.memory);
    std::memset(tensor.transfer.memory + bytes.size(), 0, static_cast<size_t>(room) - bytes.size());
  }
  end_work(tensor, State::memory);
  stats_.put_bytes += tensor.bytes;
  write_behind();
  return tensor.number;
}

std::span<std::byte> ActivationStash::hold(int64_t number) {
  Tensor& tensor = at(number);
  taken_ = number;
  ++tensor.holders;
  try {
    while (tensor.state != State::memory && tensor.state != State::writing) {
      if (tensor.state == State::nvme) {
        fetch(tensor);
      } else {
        core_.wait([&]() REQUIRES(engine_mutex) { return tensor.state != State::reading; },
                   Cause::activations);
      }
    }
    core_.check();
  } catch (...) {
    let_go(number);
    throw;
  }
  read_ahead();
  return {memory_.data() + tensor.place, static_cast<size_t>(tensor.bytes)};
}

void ActivationStash::let_go(int64_t number) noexcept {
  Tensor& tensor = at(number);
  --tensor.holders;
  settle(tensor);
}

void ActivationStash::drop(int64_t number) noexcept {
  Tensor& tensor = at(number);
  tensor.dropped = true;
  settle(tensor);
}

/// Also ends a wait for room: what was let go may leave the arena.
void ActivationStash::settle(Tensor& tensor) noexcept {
  if (tensor.holders > 0) return;
  ++changes_;
  if (tensor.dropped && (tensor.state == State::memory || tensor.state == State::nvme)) {
    if (tensor.place >= 0) leave_arena(tensor);
    give_up(tensor.extent);
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
  tensor.state = State::nvme;
  ++changes_;
}

ActivationStash::Tensor* ActivationStash::oldest(bool clean) {
  const auto found = std::ranges::find_if(tensors_, [&](const auto& entry) {
    const Tensor& tensor = entry.second;
    return tensor.state == State::memory && tensor.holders == 0 && tensor.extent.empty() != clean;
  });
  return found == tensors_.end() ? nullptr : &found->second;
}

/// A place in the arena. Nothing where it stays full of what is held.
std::optional<int64_t> ActivationStash::make_room(int64_t bytes) {
  if (bytes > memory_.bytes()) return std::nullopt;
  while (true) {
    core_.check();
    if (const auto place = ranges_.allocate(bytes, RangeAllocator::End::low)) return place;
    if (Tensor* clean = oldest(true)) {
      leave_arena(*clean);
      continue;
    }
    const bool enough_leaves = leaving_bytes_ > 0 && ranges_.free_bytes() + leaving_bytes_ >= bytes;
    if (Tensor* dirty = enough_leaves ? nullptr : oldest(false)) {
      write_out(*dirty);
      continue;
    }
    if (working_ == 0) return std::nullopt;
    const uint64_t before = changes_;
    core_.wait([&]() REQUIRES(engine_mutex) { return changes_ != before; }, Cause::activations);
  }
}

/// A full disk is not told yet: what was put is in the arena. make_room() tells of it when it has to.
void ActivationStash::write_behind() {
  try {
    while (ranges_.free_bytes() + leaving_bytes_ < memory_.bytes() / kFreePart) {
      Tensor* next = oldest(false);
      if (next == nullptr) return;
      write_out(*next);
    }
  } catch (const io::StoreError&) {
    return;
  }
}

/// How much forward saves is known when it does: room is reserved as it is needed, an arena's worth at a
/// time.
io::Extent ActivationStash::allocate(int64_t bytes) {
  extent_bytes_ += bytes;  // at once: others allocate while this one waits for the disk
  try {
    if (extent_bytes_ > room_bytes_) {
      const int64_t more = std::max(extent_bytes_ - room_bytes_, memory_.bytes());
      core_.store.reserve_more(more);
      room_bytes_ += more;
    }
    return core_.store.allocate(bytes);
  } catch (...) {
    extent_bytes_ -= bytes;
    throw;
  }
}

void ActivationStash::give_up(io::Extent& extent) {
  extent_bytes_ -= extent.bytes;
  if (core_.store.exists()) core_.store.give_up(extent);
}

void ActivationStash::write_out(Tensor& tensor) {
  begin_work(tensor, State::writing);
  io::Extent extent;
  try {
    extent = allocate(tensor.room);
    if (!core_.failure.empty()) {  // no transfer may begin any more
      give_up(extent);
      core_.check();
    }
  } catch (...) {
    end_work(tensor, State::memory);
    settle(tensor);
    throw;
  }
  tensor.transfer.kind = io::Transfer::Kind::write;
  tensor.transfer.priority = io::Transfer::Priority::write_behind;
  tensor.transfer.extent = extent;
  core_.store.submit(tensor.transfer);
}

/// Of a tensor that is held and on NVMe alone.
void ActivationStash::fetch(Tensor& tensor) {
  tensor.state = State::reading;  // so that no other holder begins it; nothing of it is on its way yet
  std::optional<int64_t> place;
  try {
    place = make_room(tensor.room);
    if (!place) {
      throw BudgetError(fmt::format(
          "backward needs {} bytes of an activation, and the {} bytes for activations are full of those that "
          "are used: raise budget.activations",
          tensor.bytes, memory_.bytes()));
    }
  } catch (...) {
    tensor.state = State::nvme;
    core_.changed.notify_all();
    throw;
  }
  ++stats_.demand_reads;
  read(tensor, *place, io::Transfer::Priority::demand);
}

void ActivationStash::read(Tensor& tensor, int64_t place, io::Transfer::Priority priority) {
  begin_work(tensor, State::reading);
  tensor.place = place;
  tensor.transfer.memory = memory_.data() + place;
  tensor.transfer.kind = io::Transfer::Kind::read;
  tensor.transfer.priority = priority;
  tensor.transfer.extent = tensor.extent;
  core_.store.submit(tensor.transfer);
}

/// Of those before the one that backward took last, the newest first, into what is free.
void ActivationStash::read_ahead() noexcept {
  if (taken_ == 0 || !core_.failure.empty()) return;
  for (auto next = tensors_.lower_bound(taken_); next != tensors_.begin();) {
    Tensor& tensor = (--next)->second;
    if (tensor.state != State::nvme || tensor.dropped) continue;
    const auto place = ranges_.allocate(tensor.room, RangeAllocator::End::low);
    if (!place) return;
    read(tensor, *place, io::Transfer::Priority::prefetch);
  }
}

void ActivationStash::begin_work(Tensor& tensor, State state) {
  ++working_;
  tensor.state = state;
  if (state == State::writing) leaving_bytes_ += tensor.room;
}

void ActivationStash::end_work(Tensor& tensor, State state) noexcept {
  --working_;
  if (tensor.state == State::writing) leaving_bytes_ -= tensor.room;
  tensor.state = state;
  ++changes_;
}

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
  self.end_work(tensor, State::memory);
  if (written && tensor.holders == 0 && !tensor.dropped) self.leave_arena(tensor);
  self.settle(tensor);
  core.changed.notify_all();
}

ActivationStash::Tensor& ActivationStash::at(int64_t number) {
  const auto found = tensors_.find(number);
  if (found == tensors_.end()) throw std::logic_error(fmt::format("there is no activation {}", number));
  return found->second;
}

}  // namespace overspill::engine
