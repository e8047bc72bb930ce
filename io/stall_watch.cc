#include "io/stall_watch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <memory>
#include <system_error>
#include <utility>
#include <variant>

#include "base/mutex.h"
#include "io/files.h"
#include "io/say.h"
#include "io/unique_fd.h"

namespace overspill::io {
namespace {

using namespace std::chrono_literals;
using std::chrono::nanoseconds;

nanoseconds watch_clock() {
  return std::chrono::steady_clock::now().time_since_epoch();
}

double in_seconds(nanoseconds time) {
  return std::chrono::duration<double>(time).count();
}

// How long the thread sleeps between looks: a stall is noticed late by a tenth of its time at most.
nanoseconds pause_of(const StallPolicy& policy) {
  nanoseconds shortest = policy.tell_after;
  if (policy.give_up_after > 0ns) shortest = std::min(shortest, policy.give_up_after);
  return std::clamp<nanoseconds>(shortest / 10, 1ms, 1s);
}

std::string request_of(const Unanswered& what) {
  std::string text = fmt::format("{} of ", name_of(what.operation));
  if (what.length_bytes > 0)
    text += fmt::format("{} bytes at offset {} of ", what.length_bytes, what.offset_bytes);
  text += what.file;
  if (what.requests > 1) text += fmt::format(" and {} other requests", what.requests - 1);
  return text;
}

}  // namespace

// ---- the board

std::string StallBoard::text() const {
  const MutexLock lock(mutex_);
  std::string all;
  for (const auto& [who, text] : texts_) all += (all.empty() ? "" : "; ") + text;
  return all;
}

void StallBoard::set(const void* who, std::string text) {
  const MutexLock lock(mutex_);
  std::erase_if(texts_, [&](const auto& one) { return one.first == who; });
  if (!text.empty()) texts_.emplace_back(who, std::move(text));
}

// ---- the watch

StallWatch::StallWatch(const StallPolicy& policy, Say say, Clock clock)
    : policy_(policy),
      say_(say != nullptr ? std::move(say) : Say(say_on_stderr)),
      clock_(clock != nullptr ? std::move(clock) : watch_clock),
      pause_(pause_of(policy)) {}

StallWatch::~StallWatch() {
  if (thread_.joinable()) stop();
}

void StallWatch::add(Party party) {
  const MutexLock looking(look_mutex_);
  parties_.emplace_back().party = std::move(party);
}

void StallWatch::start() {
  try {
    thread_ = std::thread([this] { work(); });
  } catch (const std::system_error& error) {
    throw no_threads(error, "the watch of the disks needs a thread and was given none");
  }
}

void StallWatch::stop() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  const MutexLock looking(look_mutex_);
  for (State& state : parties_) {  // nobody will see that it answers again
    if (!state.given_up) forget_stall(state);
  }
}

void StallWatch::wake() {
  {
    const MutexLock lock(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

void StallWatch::work() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    look();
    lock.lock();
    const auto next_look = std::chrono::steady_clock::now() + pause_;
    while (!stopping_ && !woken_ && changed_.wait_until(mutex_, next_look)) {
    }
    woken_ = false;
  }
}

void StallWatch::look() {
  const MutexLock looking(look_mutex_);
  for (State& state : parties_) {
    look_at(state);
    if (state.party.tend != nullptr) state.party.tend();
  }
  const MutexLock lock(calls_mutex_);
  for (State& state : calls_) look_at(state);
}

// ---- one call

namespace {

/// Of a call that another thread makes: its errno, or that it was given up, whichever is there first.
class Outcome {
 public:
  using Value = std::variant<int, Error>;

  void set(Value value) {
    {
      const MutexLock lock(mutex_);
      if (!value_) value_ = std::move(value);
    }
    there_.notify_all();
  }
  Value wait() {
    const MutexLock lock(mutex_);
    while (!value_) there_.wait(mutex_);
    return *value_;
  }

 private:
  Mutex mutex_;
  Condition there_;
  std::optional<Value> value_ GUARDED_BY(mutex_);
};

// False where the machine gives no thread.
bool in_background(std::function<void()> work) {
  try {
    std::thread(std::move(work)).detach();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace

/// Looked after while it lives, also where an exception ends it.
class StallWatch::WatchedCall {
 public:
  WatchedCall(StallWatch& watch, Party party) : watch_(watch) {
    const MutexLock lock(watch.calls_mutex_);
    watch.calls_.emplace_back().party = std::move(party);
    state_ = std::prev(watch.calls_.end());
  }
  ~WatchedCall() {
    const MutexLock lock(watch_.calls_mutex_);
    watch_.told_enough(*state_, watch_.clock_());
    watch_.forget_stall(*state_);  // also where it was given up: nobody waits for it any more
    watch_.calls_.erase(state_);
  }
  WatchedCall(const WatchedCall&) = delete;
  WatchedCall& operator=(const WatchedCall&) = delete;

 private:
  StallWatch& watch_;
  std::list<State>::iterator state_;
};

StallWatch::Party StallWatch::party_of(Operation operation, const std::string& path,
                                       std::function<std::optional<nanoseconds>()> silent_since,
                                       std::function<void(const Error&)> give_up) {
  return {.path = path,
          .silent_since = std::move(silent_since),
          .unanswered = [=] { return std::optional(Unanswered{.operation = operation, .file = path}); },
          .give_up = std::move(give_up),
          .tend = nullptr};
}

int StallWatch::call(Operation operation, int file, const std::string& path, const Call& make) {
  const auto outcome = std::make_shared<Outcome>();
  const WatchedCall watched(*this, party_of(
                                       operation, path, [since = clock_()] { return std::optional(since); },
                                       [outcome](const Error& why) { outcome->set(why); }));
  UniqueFd own(policy_.give_up_after > 0ns ? ::fcntl(file, F_DUPFD_CLOEXEC, 0) : -1);
  if (!own || !in_background([outcome, make, file = std::make_shared<UniqueFd>(std::move(own))] {
        outcome->set(make(file->get()));
      })) {
    outcome->set(make(file));
  }
  const Outcome::Value value = outcome->wait();
  if (const Error* const error = std::get_if<Error>(&value)) throw StoreError(*error);
  return std::get<int>(value);
}

// ---- work of many calls

struct StallWatch::Progress::Since {
  explicit Since(nanoseconds now) : last(now) {}
  std::atomic<nanoseconds> last;
};

StallWatch::Progress::Progress(StallWatch* watch, Operation operation, const std::string& path)
    : watch_(watch) {
  if (watch_ == nullptr) return;
  since_ = std::make_shared<Since>(watch_->clock_());
  watched_ = std::make_unique<WatchedCall>(
      *watch_, party_of(
                   operation, path, [since = since_] { return std::optional(since->last.load()); }, nullptr));
}

StallWatch::Progress::~Progress() = default;

void StallWatch::Progress::moved() {
  if (watch_ != nullptr) since_->last = watch_->clock_();
}

// ---- under a watch, or without one

int watched(StallWatch* watch, Operation operation, int file, const std::string& path,
            const StallWatch::Call& make) {
  return watch == nullptr ? make(file) : watch->call(operation, file, path, make);
}

namespace {

int sync(StallWatch* watch, int file, const std::string& path, int (*sync)(int)) {
  return watched(watch, Operation::sync, file, path, [sync](int own) { return sync(own) == 0 ? 0 : errno; });
}

}  // namespace

int sync_data(StallWatch* watch, int file, const std::string& path) {
  return sync(watch, file, path, ::fdatasync);
}

int sync_file(StallWatch* watch, int file, const std::string& path) {
  return sync(watch, file, path, ::fsync);
}

int sync_file_system(StallWatch* watch, int file, const std::string& path) {
  return sync(watch, file, path, ::syncfs);
}

// ---- looking

void StallWatch::look_at(State& state) {
  const nanoseconds now = clock_();
  const auto since = state.given_up ? std::nullopt : state.party.silent_since();
  if (!since || *since != state.since) told_enough(state, now);
  if (!since) return;
  state.since = *since;
  if (state.tell_at == 0ns) state.tell_at = policy_.tell_after;
  const nanoseconds silent = now - *since;
  if (silent >= state.tell_at) tell(state, silent);
  if (!gives_up(state) || silent < policy_.give_up_after) return;
  const Unanswered what = state.party.unanswered().value_or(Unanswered{.file = state.party.path});
  state.given_up = true;
  state.party.give_up(
      {.kind = ErrorKind::stalled,
       .operation = what.operation,
       .path = what.file,
       .offset_bytes = what.offset_bytes,
       .length_bytes = what.length_bytes,
       .detail = fmt::format("{} has not answered for {:.3g} s, engine.io_deadline_seconds allows {:.3g}",
                             state.party.path, in_seconds(silent), in_seconds(policy_.give_up_after))});
}

void StallWatch::tell(State& state, nanoseconds silent) {
  const std::optional<Unanswered> what = state.party.unanswered();
  if (!what) return;  // it has just answered
  while (state.tell_at <= silent) state.tell_at *= 2;
  const std::string text = fmt::format("{} has not answered for {:.3g} s: {}", state.party.path,
                                       in_seconds(silent), request_of(*what));
  {
    const MutexLock lock(state.stats_mutex);
    if (state.stats.now_ns == 0) ++state.stats.count;
    state.stats.now_ns = silent.count();
    state.stats.longest_ns = std::max(state.stats.longest_ns, state.stats.now_ns);
  }
  board_->set(&state, text);
  std::string then = "the engine waits";
  if (gives_up(state))
    then = fmt::format("the engine gives up after {:.3g} s", in_seconds(policy_.give_up_after));
  else if (state.party.give_up != nullptr)
    then += " (engine.io_deadline_seconds ends that)";
  say_(fmt::format("overspill: warning: {}; {}", text, then));
}

bool StallWatch::gives_up(const State& state) const {
  return state.party.give_up != nullptr && policy_.give_up_after > 0ns;
}

/// The path answers again, or nobody asks any more.
void StallWatch::told_enough(State& state, nanoseconds now) {
  state.tell_at = 0ns;
  {
    const MutexLock lock(state.stats_mutex);
    if (state.stats.now_ns == 0) return;
    state.stats.now_ns = 0;
    if (state.given_up) return;
    state.stats.longest_ns = std::max(state.stats.longest_ns, (now - state.since).count());
  }
  say_(fmt::format("overspill: {} answers again, after {:.3g} s", state.party.path,
                   in_seconds(now - state.since)));
  board_->set(&state, "");  // last: whoever sees it empty has been told
}

void StallWatch::forget_stall(State& state) {
  {
    const MutexLock lock(state.stats_mutex);
    state.stats.now_ns = 0;
  }
  board_->set(&state, "");
}

/// Without look_mutex_, which is held while a disk hangs: parties are added before start(), and stay.
const StallWatch::State& StallWatch::party(size_t number) const NO_THREAD_SAFETY_ANALYSIS {
  return *std::next(parties_.begin(), static_cast<std::ptrdiff_t>(number));
}

StallStats StallWatch::stats(size_t party) const {
  const State& state = this->party(party);
  const MutexLock lock(state.stats_mutex);
  return state.stats;
}

}  // namespace overspill::io
