// A text that a model reads and goes on with.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace overspill::inference {

class Cache;    // cache.h
class Model;    // model.h
class Sampler;  // sampler.h
class Share;    // cache.h

/// One text: its cache, and how far it was read. Threads: one at a time.
class Session {
 public:
  /// Room for `capacity` positions. Throws std::invalid_argument for more than the model can compute.
  /// NoRoom where the model's budget has too little left for its cache.
  Session(std::shared_ptr<Model> model, int64_t capacity);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

  int64_t length() const;
  /// What was read: `length` tokens.
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int64_t capacity() const { return capacity_; }
  const Model& model() const { return *model_; }
  /// Forgets what lies behind the first `length` positions. With windowed attention, positions that no window
  /// saw any more may be needed again: then the session reads the first `length` tokens anew.
  void rewind(int64_t length);

  /// Reads the tokens, at least one, behind what was read. `logits`, with vocabulary elements, becomes those
  /// of the token after the last. Throws std::invalid_argument for tokens outside of the vocabulary or more
  /// than there is room for; then nothing was read.
  void extend(std::span<const int32_t> tokens, std::span<float> logits);
  /// The same with logits [tokens][vocabulary].
  void extend_all(std::span<const int32_t> tokens, std::span<float> logits);
  /// Reads the tokens, at least one, and draws those behind them: one, or, where look_up (lookup.h) guessed
  /// up to `lookup` of them right, several. All that were drawn but the last were read too. They are what
  /// `extend` and a draw would give one by one. Needs room for the tokens only; guesses take what room there
  /// is.
  std::vector<int32_t> draw(std::span<const int32_t> tokens, Sampler& sampler, int64_t lookup);
  /// The same as extend_all; returns for each token but the first the logarithm of its probability after the
  /// ones before it.
  std::vector<float> score(std::span<const int32_t> tokens);

 private:
  /// Calls take(i, logits, drafts) for the last so many of the tokens.
  template <class Take>
  void read(std::span<const int32_t> tokens, int64_t wanted_of_last, Take take);

  std::shared_ptr<Model> model_;
  int64_t capacity_;
  std::unique_ptr<Share> share_;
  std::unique_ptr<Cache> cache_;
  std::vector<int32_t> tokens_;
};

}  // namespace overspill::inference
