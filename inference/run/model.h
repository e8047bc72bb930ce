// A model in memory, which computes rows of any texts. session.h has one text, batch.h answers to many.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "inference/model/spec.h"
#include "inference/run/model_options.h"
#include "inference/run/row.h"

namespace overspill::inference {

class Drafts;    // sampler.h
struct Kernels;  // inference/kernels/forms.h
class Pool;      // cache.h

/// Of a text: far beyond what any model was trained for; above it a position is no exact float.
inline constexpr int64_t kPositionsMax = int64_t{1} << 24;

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
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  ~Model();

  const ModelSpec& spec() const;
  const std::vector<int32_t>& end_tokens() const;
  const Kernels& kernels() const;
  int threads() const;
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
  Pool& pool();
  /// Of one call of `compute`, at most.
  int64_t rows_max() const;

  /// Throws std::invalid_argument unless there is a token and all are of the vocabulary.
  void check_tokens(std::span<const int32_t> tokens) const;
  /// Throws std::invalid_argument for a text of more tokens than the model can compute, or of none.
  void check_length(int64_t tokens) const;
  /// Computes the rows and adds them to their caches, whose lengths the caller sets. `wanted` has the numbers
  /// of up to kLogitsMax rows. Then calls work(job, logits, drafts) for each job from 0 to jobs - 1, several
  /// at a time, on the threads that computed: to draw from the logits of many rows takes as long as to
  /// multiply by a matrix. The drafts are the thread's. Rethrows what work threw. Throws WrongProcess in a
  /// forked child, and never waits there.
  void compute(std::span<const Row> rows, std::span<const int32_t> wanted, int64_t jobs,
               const std::function<void(int64_t, const Logits&, Drafts&)>& work);
  /// The same for any number of rows: take(i, logits, drafts) has those of wanted[i], one after the other.
  void compute_each(std::span<const Row> rows, std::span<const int32_t> wanted,
                    const std::function<void(int64_t, const float*, Drafts&)>& take);

 private:
  struct Parts;  // model.cc

  /// Throws WrongProcess, and std::logic_error inside.
  void check_may_compute() const;

  std::unique_ptr<Parts> parts_;
};

}  // namespace overspill::inference
