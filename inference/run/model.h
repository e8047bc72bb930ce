// A model in memory, and texts that it reads and goes on with.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "inference/format/model_folder.h"
#include "inference/kernels/forms.h"
#include "inference/model/families.h"
#include "inference/run/cache.h"
#include "inference/run/forward.h"
#include "inference/run/team.h"
#include "inference/run/weights.h"

namespace overspill::inference {

struct ModelOptions {
  int threads = 1;
  /// Positions computed together, at most: a long prompt goes in so many at a time. More cost memory, about
  /// forty bytes a position and hidden element.
  int64_t rows_max = 128;
};

/// Threads: any; the calls of all sessions take turns.
class Model {
 public:
  /// Reads the folder whole. Throws ModelError, io::StoreError, std::bad_alloc.
  Model(const std::filesystem::path& folder, const ModelOptions& options, const Kernels& kernels);

  const ModelSpec& spec() const { return spec_; }
  const std::vector<int32_t>& end_tokens() const { return end_tokens_; }
  const Kernels& kernels() const { return kernels_; }
  int threads() const { return team_.size(); }
  /// Of the matrices, as they lie in memory.
  int64_t weight_bytes() const { return weights_.memory.bytes(); }
  /// What the cache holds: bf16, unless a matrix is fp32.
  Element cache_element() const { return weights_.has_fp32 ? Element::fp32 : Element::bf16; }

 private:
  friend class Session;

  ModelSpec spec_;
  std::vector<int32_t> end_tokens_;
  const Kernels& kernels_;
  Team team_;
  Weights weights_;
  std::mutex mutex_;  // of forward_
  Forward forward_;
};

/// One text: its cache, and how far it was read. Threads: one at a time.
class Session {
 public:
  /// Room for `capacity` positions. Throws std::invalid_argument for more than the model can compute.
  Session(std::shared_ptr<Model> model, int64_t capacity);

  int64_t length() const { return cache_.length(); }
  /// What was read: `length` tokens.
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int64_t capacity() const { return cache_.capacity(); }
  const Model& model() const { return *model_; }
  /// Forgets what lies behind the first `length` positions.
  void rewind(int64_t length);

  /// Reads the tokens, at least one, behind what was read. `logits`, with vocabulary elements, becomes those
  /// of the token after the last. Throws std::invalid_argument for tokens outside of the vocabulary or more
  /// than there is room for; then nothing was read.
  void extend(std::span<const int32_t> tokens, std::span<float> logits);
  /// The same with logits [tokens][vocabulary].
  void extend_all(std::span<const int32_t> tokens, std::span<float> logits);
  /// The same; returns for each token but the first the logarithm of its probability after the ones before
  /// it.
  std::vector<float> score(std::span<const int32_t> tokens);

 private:
  template <class Take>
  void read(std::span<const int32_t> tokens, bool all, Take take);

  std::shared_ptr<Model> model_;
  Cache cache_;
  std::vector<int32_t> tokens_;
};

}  // namespace overspill::inference
