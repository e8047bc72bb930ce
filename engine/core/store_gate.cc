#include "engine/core/store_gate.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace overspill::engine {
namespace {

Activity activity_of(const io::Transfer& transfer) {
  return transfer.kind == io::Transfer::Kind::read ? Activity::read : Activity::write;
}

}  // namespace

/// Gives the mutex up for a call to the store, which stays until the call has ended.
class SCOPED_CAPABILITY StoreGate::Inside {
 public:
  explicit Inside(StoreGate& gate) RELEASE(engine_mutex) : gate_(gate) {
    ++gate_.inside_;
    gate_.monitor_.mutex().unlock();
  }
  ~Inside() RELEASE() {
    gate_.monitor_.mutex().lock();
    gate_.leave();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  StoreGate& gate_;
};

StoreGate::Kept::Kept(StoreGate& gate) : gate_(gate) {
  const MutexLock guard(gate_.monitor_.mutex());
  gate_.monitor_.check();
  ++gate_.inside_;
}

StoreGate::Kept::~Kept() {
  const MutexLock guard(gate_.monitor_.mutex());
  gate_.leave();
}

void StoreGate::leave() {
  if (--inside_ == 0 && !monitor_.failure.empty()) monitor_.changed.notify_all();
}

bool StoreGate::poll() {
  if (store_ == nullptr) return false;
  const Inside inside(*this);
  return store_->poll();
}

void StoreGate::reserve(int64_t bytes) {
  const MutexLock guard(monitor_.mutex());
  const int64_t before = reserved_bytes_;
  reserved_bytes_ = std::max(reserved_bytes_, bytes);
  const int64_t total = reserved_bytes_ + more_bytes_;
  try {
    const Inside inside(*this);
    store_->reserve(total);
  } catch (...) {
    reserved_bytes_ = before;
    throw;
  }
}

void StoreGate::reserve_more(int64_t bytes) {
  more_bytes_ += bytes;  // at once: another caller adds to it
  const int64_t total = reserved_bytes_ + more_bytes_;
  try {
    const Inside inside(*this);
    store_->reserve(total);
  } catch (...) {
    more_bytes_ -= bytes;
    throw;
  }
}

io::Extent StoreGate::allocate(int64_t bytes) {
  const Inside inside(*this);
  return store_->allocate(bytes);
}

void StoreGate::submit(io::Transfer& transfer) {
  transfer.error.reset();
  meter_.begin(activity_of(transfer));
  const int32_t kind = transfer.kind == io::Transfer::Kind::read ? 0 : 1;
  if (under_way_[static_cast<size_t>(kind)]++ == 0) journal_.note(Happening::disk_busy, -1, kind);
  store_->submit(transfer);
}

void StoreGate::completed(const io::Transfer& transfer) {
  meter_.end(activity_of(transfer));
  const int32_t kind = transfer.kind == io::Transfer::Kind::read ? 0 : 1;
  if (--under_way_[static_cast<size_t>(kind)] == 0) journal_.note(Happening::disk_rests, -1, kind);
  meter_.moved(activity_of(transfer), transfer.extent.bytes);
}

void StoreGate::note_under_way() {
  for (size_t kind = 0; kind < under_way_.size(); ++kind) {
    if (under_way_[kind] > 0) journal_.note(Happening::disk_busy, -1, static_cast<int32_t>(kind));
  }
}

void StoreGate::give_up(io::Extent& extent) {
  if (extent.empty()) return;
  store_->release(extent);
  extent = {};
}

std::unique_ptr<io::Store> StoreGate::take() {
  if (monitor_.failure.empty()) throw std::logic_error("the store of an engine that goes on was to be taken");
  while (inside_ > 0) monitor_.changed.wait(monitor_.mutex());
  return std::move(store_);
}

}  // namespace overspill::engine
