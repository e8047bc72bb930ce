#include "engine/ranks/rounds.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "kernels/clock.h"

namespace overspill::engine {
namespace {

thread_local const Rounds* of_this_thread = nullptr;

constexpr std::chrono::microseconds kRestLeast{20};
constexpr std::chrono::microseconds kRestMost{1000};

/// Of everything that has to be the same on all ranks (FNV-1a).
uint64_t fingerprint(const Layout& layout, const Config& config) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  const auto mix = [&](uint64_t word) { hash = (hash ^ word) * 0x100000001b3ULL; };
  mix(static_cast<uint64_t>(config.stage));
  mix(static_cast<uint64_t>(config.gradient_accumulation));
  mix(config.rounding_seed);
  mix(config.library_sums ? 1 : 0);
  mix(config.sum_over_ranks ? 1 : 0);
  mix(config.skip_nonfinite ? 1 : 0);
  mix(config.micro_batches_together ? 1 : 0);
  mix(static_cast<uint64_t>(config.bucket_bytes));
  mix(static_cast<uint64_t>(layout.slices));
  for (const Unit& unit : layout.units) {
    for (const char c : unit.name) mix(static_cast<unsigned char>(c));
    for (const Segment& segment : unit.segments) mix(static_cast<uint64_t>(segment.elements));
    mix(static_cast<uint64_t>(unit.elements));
    mix(unit.trainable() ? static_cast<uint64_t>(*unit.format) + 1 : 0);
  }
  for (const Chunk& chunk : layout.chunks) mix(static_cast<uint64_t>(chunk.elements));
  return hash;
}

}  // namespace

Rounds::Rounds(const Setup& setup, Core& core, RankGroups& ranks, Demand& demand, Gatherer& gatherer,
               Updater& updater, Gradients& gradients)
    : setup_(setup),
      core_(core),
      ranks_(ranks),
      demand_(demand),
      gatherer_(gatherer),
      updater_(updater),
      gradients_(gradients),
      said_(setup.layout.slices, static_cast<int32_t>(setup.layout.units.size())),
      model_(fingerprint(setup.layout, setup.config)),
      seen_progress_(static_cast<size_t>(setup.layout.slices)),
      seen_ns_(static_cast<size_t>(setup.layout.slices)),
      gives_(static_cast<size_t>(setup.layout.slices)) {}

Rounds::~Rounds() {
  leave();
}

// ---- the caller's side

void Rounds::start() {
  seen_ns_.assign(seen_ns_.size(), kernels::steady_now_ns());
  if (!alone()) thread_ = std::thread([this] { run(); });
}

void Rounds::attend(Meeting meeting, uint64_t number, std::function<void()> body) {
  const MutexLock lock(core_.mutex());
  core_.check();
  Call call{meeting, number, std::move(body)};
  call_ = &call;
  ++core_.progress;
  core_.changed.notify_all();
  try {
    core_.wait([&]() REQUIRES(engine_mutex) { return call.done; }, Cause::rest);
  } catch (...) {
    // The thread may be in the body, which is the caller's.
    while (in_round_ && !over_) core_.changed.wait(core_.mutex());
    call_ = nullptr;
    throw;
  }
  call_ = nullptr;
}

Rounds::Change::Change(Rounds& rounds) : rounds_(rounds) {
  ++rounds.change_waits_;
  while (rounds.in_round_) rounds.core_.changed.wait(rounds.core_.mutex());
  --rounds.change_waits_;
  ++rounds.changing_;
  ++rounds.changes_;
  rounds.core_.changed.notify_all();
}

bool Rounds::here() const {
  return of_this_thread == this;
}

void Rounds::leave() noexcept {
  if (!thread_.joinable()) return;
  {
    const MutexLock guard(core_.mutex());
    leaving_ = true;
    core_.changed.notify_all();
  }
  thread_.join();
}

void Rounds::abort_model_ranks(const char* why) noexcept {
  if (ranks_.model_ranks != nullptr) ranks_.model_ranks->abort(why);
}

void Rounds::abort(const char* why) noexcept {
  abort_model_ranks(why);
  if (alone()) return;
  const MutexLock guard(core_.mutex());
  if (core_.failure.empty()) core_.fail(why);
}

// ---- the thread

void Rounds::run() noexcept {
  of_this_thread = this;
  std::string why;
  try {
    while (!agreement_.all_left) {
      round();
      rest();
    }
  } catch (const std::exception& error) {
    why = error.what();
  }
  if (!why.empty()) {
    ranks_.communicator->abort(why.c_str());
    abort_model_ranks(why.c_str());
    const MutexLock guard(core_.mutex());
    core_.fail(why);
  }
  const MutexLock guard(core_.mutex());
  in_round_ = false;
  over_ = true;
  core_.changed.notify_all();
}

void Rounds::round() {
  MutexLock lock(core_.mutex());
  gatherer_.copy_served();
  while (change_waits_ > 0) core_.changed.wait(core_.mutex());
  if (!core_.failure.empty()) throw std::runtime_error(core_.cause);
  in_round_ = true;
  announce();
  Call* const call = call_;  // where all ranks meet, that of this rank, which stays until it is done
  lock.unlock();
  ranks_.communicator->all_gather(said_.bytes());
  agree(said_, agreement_);
  if (!agreement_.failure.empty()) throw CommunicatorError(agreement_.failure);
  unpin_all_but(agreement_.gathers);
  if (agreement_.meet) {
    call->body();
  } else {
    sum(agreement_.sums);
  }
  gather(agreement_.gathers);
  lock.lock();
  if (agreement_.meet) call->done = true;
  if (agreement_.out_of_room && gradients_.sums().stuck()) gradients_.sums().refuse();
  if (agreement_.due >= 0 && changing_ == 0) {  // what is read while weights change would be of two versions
    gatherer_.prepare_to_serve(agreement_.due);
    updater_.pump();
  }
  gatherer_.unpin_all_but({});
  look_for_hanging_ranks();
  in_round_ = false;
  core_.changed.notify_all();
}

/// What is not sent now may make room while the rest is.
void Rounds::unpin_all_but(std::span<const int32_t> units) {
  const MutexLock guard(core_.mutex());
  gatherer_.unpin_all_but(units);
}

/// Until there is something new to say, or the others may have.
void Rounds::rest() {
  if (agreement_.all_left) return;
  if (agreement_.meet || !agreement_.sums.empty() || !agreement_.gathers.empty()) {
    idle_rounds_ = 0;
    return;
  }
  // While nobody wants anything, longer and longer.
  idle_rounds_ = agreement_.idle ? std::min(idle_rounds_ + 1, 16) : std::min(idle_rounds_ + 1, 4);
  const auto time = std::min(kRestMost, kRestLeast * (1 << std::min(idle_rounds_, 8)));
  const MutexLock lock(core_.mutex());
  const auto end = std::chrono::steady_clock::now() + time;
  while (core_.failure.empty() && !differs()) {
    if (!core_.changed.wait_until(core_.mutex(), end)) return;
  }
}

Standing Rounds::stand() const {
  Standing own;
  own.model = model_;
  own.changes = changes_;
  if (call_ != nullptr && !call_->done) {
    own.meeting = static_cast<uint64_t>(call_->meeting);
    own.number = call_->number;
  }
  own.leaving = leaving_ ? 1 : 0;
  own.stuck = gradients_.sums().stuck() ? 1 : 0;
  own.demanded = demand_.weights.empty() ? -1 : demand_.weights.front();
  own.progress = core_.progress;
  return own;
}

void Rounds::announce() {
  const int rank = setup_.layout.slice;
  const Standing own = stand();
  said_.start(rank, own);
  for (int32_t unit = 0; unit < said_.units(); ++unit) {
    for (const Say say : kAllSays) {
      if (is_so(say, unit, own)) said_.say(rank, say, unit);
    }
    if (said_.says(rank, Say::serves, unit)) gatherer_.pin_shard(unit);
  }
}

/// Whether this rank, in the standing `own`, announces `say` for the unit.
bool Rounds::is_so(Say say, int32_t unit, const Standing& own) const {
  const bool may_move = setup_.layout.shards > 1 && changing_ == 0;
  const bool gave_all = own.meeting == static_cast<uint64_t>(Meeting::step) ||
                        own.meeting == static_cast<uint64_t>(Meeting::norm);
  switch (say) {
    case Say::wants:
      return may_move && gatherer_.wants(unit);
    case Say::serves:
      return may_move && gatherer_.shard_in_memory(unit) != nullptr;
    case Say::complete:
      return gave_all || gradients_.sums().complete(unit);
    case Say::gives:
      return gradients_.sums().gives(unit);
  }
  return false;
}

/// Whether this rank would announce something else now than in the last round.
bool Rounds::differs() const {
  const int rank = setup_.layout.slice;
  const Standing own = stand();
  Standing said = said_.standing(rank);
  said.progress = own.progress;  // a change of this number makes no rank do anything
  if (own != said) return true;
  for (int32_t unit = 0; unit < said_.units(); ++unit) {
    for (const Say say : kAllSays) {
      if (is_so(say, unit, own) != said_.says(rank, say, unit)) return true;
    }
  }
  return false;
}

void Rounds::sum_gradients() {
  for (int32_t unit = 0; unit < said_.units(); ++unit) {
    if (said_.anyone(Say::gives, unit)) sum(std::span(&unit, 1));
  }
}

void Rounds::sum(std::span<const int32_t> units) {
  for (const int32_t unit : units) {
    for (int rank = 0; rank < said_.ranks(); ++rank)
      gives_[rank] = said_.says(rank, Say::gives, unit) ? 1 : 0;
    note(Happening::summing, unit);
    gradients_.sums().sum(unit, gives_);
    const MutexLock guard(core_.mutex());
    core_.journal.note(Happening::summed, unit);
    gradients_.sums().summed(unit);
  }
}

void Rounds::note(Happening happening, int32_t unit) {
  const MutexLock guard(core_.mutex());
  core_.journal.note(happening, unit);
}

/// In groups that go as one call each. All ranks make the same ones: the units and their order are agreed on.
void Rounds::gather(std::span<const int32_t> units) {
  while (!units.empty()) {
    const size_t count = count_together(units);
    gather_together(units.first(count));
    units = units.subspan(count);
  }
}

/// How many of the first units go together: at least one, and no more than Config::bucket_bytes, since the
/// first, for which a caller may wait, arrives with the last.
size_t Rounds::count_together(std::span<const int32_t> units) const {
  size_t count = 0;
  int64_t bytes = 0;
  for (const int32_t unit : units) {
    bytes += setup_.layout.units[unit].bytes();
    if (count > 0 && bytes > setup_.config.bucket_bytes) break;
    ++count;
  }
  return count;
}

void Rounds::gather_together(std::span<const int32_t> units) {
  if (exchanges_.size() < units.size()) exchanges_.resize(units.size());
  for (size_t i = 0; i < units.size(); ++i) prepare(units[i], exchanges_[i]);
  ranks_.communicator->exchange_together(std::span(exchanges_).first(units.size()));
  const MutexLock guard(core_.mutex());
  for (const int32_t unit : units) {
    if (said_.says(setup_.layout.shard, Say::wants, unit)) gatherer_.collected(unit);
  }
}

/// What this rank sends of the unit, and where it receives the others' shards if it wants them.
void Rounds::prepare(int32_t unit, Exchange& exchange) {
  const int own = setup_.layout.shard;
  const auto bytes = static_cast<size_t>(setup_.layout.units[unit].shard_bytes());
  const bool wants = said_.says(own, Say::wants, unit);
  const std::byte* shard = nullptr;
  std::byte* room = nullptr;
  {
    const MutexLock guard(core_.mutex());
    shard = gatherer_.shard_in_memory(unit);
    if (wants) room = gatherer_.begin_collecting(unit);
  }
  // Who does not want it sends it from where it is.
  exchange.on_device = wants ? gatherer_.collects_on_device() : setup_.lives_on_device(unit);
  if (wants && exchange.on_device) shard = room + own * bytes;
  exchange.send.assign(static_cast<size_t>(said_.ranks()), {});
  exchange.receive.assign(static_cast<size_t>(said_.ranks()), {});
  for (int rank = 0; rank < said_.ranks(); ++rank) {
    if (rank == own) continue;
    if (said_.says(rank, Say::wants, unit)) exchange.send[rank] = std::span(shard, bytes);
    if (wants) exchange.receive[rank] = std::span(room + rank * bytes, bytes);
  }
}

/// A rank whose caller waits is not hanging: it waits for another. Of the others one that has made no call
/// for so long is.
void Rounds::look_for_hanging_ranks() {
  const int64_t now = kernels::steady_now_ns();
  int waits = -1;
  for (int rank = 0; rank < said_.ranks(); ++rank) {
    const Standing own = said_.standing(rank);
    const bool waiting = own.meeting != 0 || own.stuck != 0 || own.leaving != 0;
    if (waiting && waits < 0) waits = rank;
    if (waiting || own.progress != seen_progress_[rank]) {
      seen_progress_[rank] = own.progress;
      seen_ns_[rank] = now;
    }
  }
  if (waits < 0) std::fill(seen_ns_.begin(), seen_ns_.end(), now);
  for (int rank = 0; rank < said_.ranks() && waits >= 0; ++rank) {
    if (now - seen_ns_[rank] < setup_.config.rank_timeout_ms * 1'000'000) continue;
    throw CommunicatorError(fmt::format("rank {} has made no call for {} ms, and rank {} waits for it", rank,
                                        setup_.config.rank_timeout_ms, waits));
  }
}

}  // namespace overspill::engine
