// A model in memory, and texts that it reads and goes on with.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "inference/format/model_folder.h"
#include "inference/kernels/forms.h"
#include "inference/model/families.h"
#include "inference/run/cache.h"
#include "inference/run/forward.h"
#include "inference/run/sampler.h"
#include "inference/run/team.h"
#include "inference/run/turns.h"
#include "inference/run/weights.h"

namespace overspill::inference {

/// Of a text: far beyond what any model was trained for; above it a position is no exact float.
inline constexpr int64_t kPositionsMax = int64_t{1} << 24;

/// What a cache keeps of keys and values.
enum class CacheFormat : uint8_t {
  as_computed,  // bf16, or fp32 where a matrix of the model is
  int8,         // integers from -127 to 127, and a scale for each position of a head; loses bits
};

struct ModelOptions {
  int threads = 1;
  /// Positions computed together, at most: a long prompt goes in so many at a time. More cost memory, about
  /// forty bytes a position and hidden element.
  int64_t rows_max = 128;
  WeightFormat weights = WeightFormat::as_stored;
  CacheFormat cache = CacheFormat::as_computed;
  /// Of memory, for weights, caches and buffers; none: as much as they take. Layers that it does not hold are
  /// read for each pass.
  std::optional<int64_t> budget_bytes{};
  /// With a budget: positions of all texts at a time for which room is kept.
  int64_t positions = 2048;
};

/// Of the rows that were wanted of a forward, in their order. Valid until the next one.
struct Logits {
  const float* data;
  int64_t stride;

  const float* of(int64_t i) const { return data + i * stride; }
};

/// Threads: any; those that compute take turns, in the order in which they ask. What a computation calls (a
/// sampler's constraint) may not compute with the same model: std::logic_error.
class Model {
 public:
  /// Reads the folder whole. Throws ModelError, io::StoreError, std::bad_alloc; NoRoom where the budget does
  /// not hold the least.
  Model(const std::filesystem::path& folder, const ModelOptions& options, const Kernels& kernels);

  const ModelSpec& spec() const { return spec_; }
  const std::vector<int32_t>& end_tokens() const { return folder_.end_tokens(); }
  const Kernels& kernels() const { return kernels_; }
  int threads() const { return team_.size(); }
  /// Of the matrices that stay in memory, and of the room for experts of which some do.
  int64_t weight_bytes() const;
  /// Of those that do not: what a pass of one token reads. Of experts it is what a token reads where a router
  /// likes all alike, and where it stays with some, less is read.
  int64_t streamed_bytes() const;
  /// What passes have read so far.
  int64_t read_bytes() const;
  /// How long a pass takes at the speeds of disk and memory, which are measured now: half a second of what
  /// is read, and one read of what stays. The longer of both counts, since they go on at the same
  /// time. Throws what reading threw.
  double seconds_a_pass();
  /// Whether this thread is in a call that a computation of this model makes.
  bool is_inside() const;
  /// Of the caches of all texts.
  Pool& pool() { return pool_; }
  /// Of one call of `compute`, at most. Never changes, so it needs no turn.
  int64_t rows_max() const NO_THREAD_SAFETY_ANALYSIS { return forward_.rows_max(); }

  /// Throws std::invalid_argument unless there is a token and all are of the vocabulary.
  void check_tokens(std::span<const int32_t> tokens) const;
  /// Throws std::invalid_argument for a text of more tokens than the model can compute, or of none.
  void check_length(int64_t tokens) const;
  /// See Forward::run: `wanted` has up to kLogitsMax rows. Then calls work(job, logits, drafts) for each job
  /// from 0 to jobs - 1, several at a time, on the threads that computed: to draw from the logits of many
  /// rows takes as long as to multiply by a matrix. The drafts are the thread's. Rethrows what work threw.
  /// Throws WrongProcess in a forked child, and never waits there.
  void compute(std::span<const Row> rows, std::span<const int32_t> wanted, int64_t jobs,
               const std::function<void(int64_t, const Logits&, Drafts&)>& work);
  /// The same for any number of rows: take(i, logits, drafts) has those of wanted[i], one after the other.
  void compute_each(std::span<const Row> rows, std::span<const int32_t> wanted,
                    const std::function<void(int64_t, const float*, Drafts&)>& take);

 private:
  int64_t weight_bytes_max(const ModelOptions& options, bool has_fp32);
  /// Throws WrongProcess, and std::logic_error inside.
  void check_may_compute() const;

  ModelFolder folder_;
  ModelSpec spec_;
  const Kernels& kernels_;
  Team team_;
  int64_t cache_pages_ = Pool::kUnlimited;
  Weights weights_;
  Pool pool_;
  Turns turns_;
  Forward forward_ GUARDED_BY(turns_);
  std::vector<Drafts> drafts_ GUARDED_BY(turns_);  // by thread
};

/// One text: its cache, and how far it was read. Threads: one at a time.
class Session {
 public:
  /// Room for `capacity` positions. Throws std::invalid_argument for more than the model can compute.
  /// NoRoom where the model's budget has too little left for its cache.
  Session(std::shared_ptr<Model> model, int64_t capacity);

  int64_t length() const { return cache_.length(); }
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
  Share share_;
  Cache cache_;
  std::vector<int32_t> tokens_;
};

}  // namespace overspill::inference
