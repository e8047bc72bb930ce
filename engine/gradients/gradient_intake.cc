#include "engine/gradients/gradient_intake.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "engine/device/device_gradients.h"

namespace overspill::engine {
namespace {

constexpr size_t kPiecesMost = 64;  // being copied

thread_local const GradientIntake* intake_of_this_thread = nullptr;

}  // namespace

GradientIntake::GradientIntake(const Setup& setup, Core& core, Hardware& hardware, Queues& queues,
                               Updater& updater, Gradients& gradients)
    : setup_(setup),
      core_(core),
      queues_(queues),
      updater_(updater),
      gradients_(gradients),
      slots_(hardware.device(), hardware.host_budget, setup.plan.intake_slots * setup.plan.intake_slot_bytes,
             "gradients on their way from the device") {
  if (hardware.device().shares_host_memory()) return;
  stream_ = hardware.device().make_stream();
  free_all_slots();
  thread_ = std::thread([this] { run(); });
}

void GradientIntake::add(int32_t unit, int32_t segment, std::span<const std::byte> data,
                         std::string_view dtype) {
  const optim::Element element = gradients_.check(unit, segment, std::ssize(data), dtype);
  const MutexLock turn(arrival_);
  take_all_in();
  make_ready(unit, segment);
  take_in(unit, segment, element, data);
}

void GradientIntake::take_in(int32_t unit, int32_t segment, optim::Element element,
                             std::span<const std::byte> data) {
  const Gradients::Arrival arrival = gradients_.begin(unit, segment, element);
  const int64_t elements = setup_.layout.units[unit].segments[segment].elements;
  gradients_.add(std::array{Gradients::Piece{&arrival, 0, elements, data.data()}});
  gradients_.finish(arrival);
  taken_in(unit, segment);
}

Gradients::Arrival GradientIntake::begin_parts(int32_t unit, int32_t segment, optim::Element element) {
  const MutexLock turn(arrival_);
  take_all_in();
  make_ready(unit, segment);
  return gradients_.begin(unit, segment, element);
}

void GradientIntake::add_parts(std::span<const Gradients::Piece> pieces) {
  const MutexLock turn(arrival_);
  take_all_in();
  gradients_.add(pieces);
}

void GradientIntake::finish_parts(const Gradients::Arrival& arrival) {
  const MutexLock turn(arrival_);
  take_all_in();
  gradients_.finish(arrival);
  taken_in(arrival.unit, arrival.segment);
}

void GradientIntake::replace(int32_t unit, int32_t segment, std::span<const std::byte> data,
                             std::string_view dtype) {
  optim::Element element{};
  if (!data.empty()) element = gradients_.check(unit, segment, std::ssize(data), dtype);
  const MutexLock turn(arrival_);
  take_all_in();
  if (!data.empty()) let_go(unit);
  {
    const MutexLock guard(core_.mutex());
    gradients_.drop(unit, segment);
  }
  if (!data.empty()) take_in(unit, segment, element, data);
}

bool GradientIntake::is_zero(int32_t unit, int32_t segment) {
  const MutexLock lock(core_.mutex());
  return gradients_.presence(unit, segment) == Presence::zero;
}

void GradientIntake::write_zeros() {
  const MutexLock turn(arrival_);
  take_all_in();
  std::vector<std::byte> zeros;
  for (int32_t u = 0; u < std::ssize(setup_.layout.units); ++u) {
    const Unit& unit = setup_.layout.units[u];
    for (int32_t s = 0; s < std::ssize(unit.segments); ++s) {
      if (!is_zero(u, s)) continue;
      let_go(u);
      const Gradients::Arrival arrival = gradients_.begin(u, s, setup_.gradient_type(u));
      for (int64_t begin = 0; begin < unit.segments[s].elements;) {
        const int64_t end = gradients_.piece_end(arrival, begin);
        const int64_t bytes = (end - begin) * setup_.gradient_width(u);
        zeros.resize(std::max(zeros.size(), static_cast<size_t>(bytes)));
        gradients_.add(std::array{Gradients::Piece{&arrival, begin, end - begin, zeros.data()}});
        begin = end;
      }
      gradients_.finish(arrival);
    }
  }
}

void GradientIntake::add(int32_t unit, int32_t segment, DeviceArray gradient, Queue queue) {
  if (!on_device())
    return add(unit, segment, {gradient.data, static_cast<size_t>(gradient.bytes)}, gradient.dtype);
  auto item = std::make_unique<Item>();
  item->arrival = {unit, segment, gradients_.check(unit, segment, gradient.bytes, gradient.dtype)};
  item->gradient = std::move(gradient);
  {
    const MutexLock guard(core_.mutex());
    core_.check();
  }
  item->ready = queues_.record(queue);
  const int64_t bytes = item->gradient.bytes;
  const int64_t most = outstanding_bytes_most(setup_.config.device_budget_bytes);
  const MutexLock turn(arrival_);
  const MutexLock lock(mutex_);
  while (outstanding_ > 0 && outstanding_bytes_ + bytes > most) changed_.wait(mutex_);
  ++outstanding_;
  outstanding_bytes_ += bytes;
  waiting_.push_back(std::move(item));
  changed_.notify_all();
}

void GradientIntake::finish() {
  const MutexLock turn(arrival_);
  take_all_in();
}

/// For whoever has the turn.
void GradientIntake::take_all_in() {
  {
    const MutexLock lock(mutex_);
    while (outstanding_ > 0) changed_.wait(mutex_);
  }
  gradients_.bring_down();
  if (!on_device()) return;
  const MutexLock guard(core_.mutex());
  core_.check();  // where the thread has failed, not all was taken in
}

void GradientIntake::close() noexcept {
  if (!thread_.joinable()) return;
  {
    const MutexLock guard(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

/// The last step's gradients are in use until their update, and a guess reads this step's. Returns whether
/// the journal is on.
bool GradientIntake::make_ready(int32_t unit, int32_t segment) {
  let_go(unit);
  gradients_.apply_factor(unit, segment);
  const MutexLock guard(core_.mutex());
  if (core_.meter.phase() == Phase::forward) core_.meter.enter(Phase::backward);
  core_.journal.note(Happening::gradient, unit);
  ++core_.progress;
  return core_.journal.on();
}

void GradientIntake::let_go(int32_t unit) {
  const MutexLock lock(core_.mutex());
  updater_.wait_for(unit);
  updater_.take_back(unit);
}

void GradientIntake::taken_in(int32_t unit, int32_t segment) {
  const MutexLock guard(core_.mutex());
  const bool all = updater_.speculation().arrived(unit, segment);
  // Of one that is under way nobody would take the guess back: it has begun.
  const bool others =
      std::ranges::any_of(items_, [&](const auto& item) { return item->arrival.unit == unit; });
  if (all && !others && !gradients_.ahead_there(unit)) updater_.guess(unit);
}

// ---- the thread

bool GradientIntake::here() const {
  return intake_of_this_thread == this;
}

void GradientIntake::run() noexcept {
  intake_of_this_thread = this;
  std::unique_ptr<Item> item;
  while (next(item)) {
    try {
      if (item != nullptr) {
        submit(std::move(item));
      } else {
        complete_some();
      }
    } catch (const std::exception& error) {
      {
        const MutexLock guard(core_.mutex());
        core_.fail(fmt::format("gradients from the device: {}", error.what()));
      }
      abandon();
    }
  }
  abandon();
}

/// Waits for something to do: an item to begin, or (null) a copy to wait for. False: it is over.
bool GradientIntake::next(std::unique_ptr<Item>& item) {
  const MutexLock lock(mutex_);
  while (!closing_ && waiting_.empty() && pieces_.empty()) changed_.wait(mutex_);
  if (closing_) return false;
  if (!waiting_.empty() && pieces_.size() < kPiecesMost) {
    item = std::move(waiting_.front());
    waiting_.pop_front();
  }
  return true;
}

void GradientIntake::submit(std::unique_ptr<Item> given) {
  items_.push_back(std::move(given));
  Item& item = *items_.back();
  item.elements = setup_.layout.units[item.arrival.unit].segments[item.arrival.segment].elements;
  // What it may have to wait for, and what is added to, has been taken in before.
  const int32_t unit = item.arrival.unit;
  if (gradients_.may_wait(unit) || arriving(item)) {
    while (!pieces_.empty()) complete_some();
  }
  item.timed = make_ready(unit, item.arrival.segment);
  item.arrival = gradients_.begin(unit, item.arrival.segment, item.arrival.element);
  const Source gradient{item.gradient.data, optim::bytes(item.arrival.element)};
  if (const auto there = gradients_.take_in_there(item.arrival, gradient.data, item.ready)) {
    if (there->sum == nullptr) {
      pieces_.push_back({&item, 0, item.elements, -1, true, there->taken, there->squared});
      return;
    }
    stream_->wait(there->taken);
    copy(item, {there->sum, sizeof(float)}, 0, item.elements, there->home, -1);
    pieces_.back().squared = there->squared;
    return;
  }
  stream_->wait(item.ready);
  if (std::byte* place = gradients_.place_of(item.arrival)) {
    copy(item, gradient, 0, item.elements, place, -1);
    pieces_.back().squared = gradients_.square_there(item.arrival, gradient.data, item.ready);
    return;
  }
  int64_t begin = 0;
  do {  // once for a segment without elements
    const int64_t end = gradients_.piece_end(item.arrival, begin);
    const int slot = take_slot();
    copy(item, gradient, begin, end - begin, slots_.data() + slot * setup_.plan.intake_slot_bytes, slot);
    begin = end;
  } while (begin < item.elements);
}

void GradientIntake::copy(Item& item, Source from, int64_t begin, int64_t elements, std::byte* to, int slot) {
  const kernels::Event began = item.timed ? stream_->record() : kernels::Event();
  stream_->copy_to_host(to, from.data + begin * from.width, elements * from.width);
  const bool last = begin + elements == item.elements;
  pieces_.push_back({&item, begin, elements, slot, last, stream_->record(), {}});
  if (!item.timed) return;
  const MutexLock guard(core_.mutex());
  core_.journal.note(DeviceSpan::Kind::copy_down, item.arrival.unit, began, pieces_.back().copied);
}

/// Waits for the oldest piece. Those that have come by then are taken in together.
void GradientIntake::complete_some() {
  pieces_.front().wait();
  size_t count = 1;
  while (count < pieces_.size() && pieces_[count].done()) ++count;
  arrived_.clear();
  for (size_t i = 0; i < count; ++i) {
    const Piece& piece = pieces_[i];
    if (piece.slot < 0) continue;
    arrived_.push_back({&piece.item->arrival, piece.begin, piece.elements,
                        slots_.data() + piece.slot * setup_.plan.intake_slot_bytes});
  }
  gradients_.add(arrived_);
  for (; count > 0; --count) {
    const Piece piece = pieces_.front();
    pieces_.pop_front();
    if (piece.slot >= 0) idle_slots_.push_back(piece.slot);
    if (piece.last) complete_item();
  }
}

/// All of the oldest item has come. Its memory is let go before those who wait for it hear so.
void GradientIntake::complete_item() {
  std::unique_ptr<Item> done = std::move(items_.front());
  items_.pop_front();
  gradients_.finish(done->arrival);
  taken_in(done->arrival.unit, done->arrival.segment);
  const int64_t bytes = done->gradient.bytes;
  done.reset();
  forget(bytes);
}

int GradientIntake::take_slot() {
  while (idle_slots_.empty()) complete_some();
  const int slot = idle_slots_.back();
  idle_slots_.pop_back();
  return slot;
}

void GradientIntake::free_all_slots() {
  idle_slots_.resize(static_cast<size_t>(setup_.plan.intake_slots));
  std::iota(idle_slots_.begin(), idle_slots_.end(), 0);
}

/// An earlier one of the same segment is.
bool GradientIntake::arriving(const Item& item) const {
  return std::any_of(items_.begin(), std::prev(items_.end()), [&](const auto& other) {
    return other->arrival.unit == item.arrival.unit && other->arrival.segment == item.arrival.segment;
  });
}

/// Everything is dropped, once nothing of it is being copied.
void GradientIntake::abandon() noexcept {
  const auto settle = [](const kernels::Event& event) {
    try {
      event.wait();
    } catch (const std::exception&) {  // the engine has failed, or is closed: who uses it is told
    }
  };
  for (const Piece& piece : pieces_) {
    settle(piece.copied);
    settle(piece.squared);
  }
  engine::settle(stream_.get());
  gradients_.settle_there();  // what was started, and has no piece yet
  pieces_.clear();
  items_.clear();
  free_all_slots();
  std::deque<std::unique_ptr<Item>> dropped;  // without the lock: an owner's end may wait for Python's
  const MutexLock guard(mutex_);
  dropped.swap(waiting_);
  outstanding_ = outstanding_bytes_ = 0;
  changed_.notify_all();
}

void GradientIntake::forget(int64_t bytes) {
  const MutexLock guard(mutex_);
  --outstanding_;
  outstanding_bytes_ -= bytes;
  changed_.notify_all();
}

}  // namespace overspill::engine
