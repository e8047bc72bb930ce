// What a batch writes for one text, handed from the batch's thread to whoever reads it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "io/own_process.h"

namespace overspill::inference {

/// A token of an answer. The logarithms are of the model's probabilities, before the sampler changes them.
struct Drawn {
  int32_t token = 0;
  float log_probability = 0;                           // 0 where none is asked for
  std::vector<std::pair<int32_t, float>> likeliest{};  // the likeliest first
};

/// Why an answer has no more tokens: an end token, as many as were asked for, a call of cancel or the batch's
/// close, an error.
enum class End : uint8_t { stop, length, cancelled, failed };

/// Threads: one writes, any read. In a forked child of the process that made it every call of a reader throws
/// WrongProcess.
class Answer {
 public:
  /// By the batch. After the end they do nothing.
  void add(Drawn drawn);
  void end(End end, std::exception_ptr error = nullptr);

  /// Returns true once there is a token to take or an end, false after the timeout.
  bool wait(std::chrono::nanoseconds timeout);
  /// The next token; none at the end. Throws the error of an answer that failed, after its last token.
  /// Blocks until there is one of these.
  std::optional<Drawn> take();
  /// None while tokens are still drawn.
  std::optional<End> ended() const;
  /// The tokens that were not taken are dropped, and no more are drawn.
  void cancel();

 private:
  void check_process() const;
  bool has_news() const REQUIRES(mutex_) { return !drawn_.empty() || end_; }

  io::OwnProcess process_;
  mutable Mutex mutex_;
  Condition changed_;
  std::deque<Drawn> drawn_ GUARDED_BY(mutex_);
  std::optional<End> end_ GUARDED_BY(mutex_);
  std::exception_ptr error_ GUARDED_BY(mutex_);
};

}  // namespace overspill::inference
