// One forward, of any model spec, for one position or many, of one text or several.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "inference/kernels/forms.h"
#include "inference/model/spec.h"
#include "inference/run/cache.h"
#include "inference/run/row.h"
#include "inference/run/team.h"
#include "inference/run/weights.h"

namespace overspill::inference {

/// Vectors as matrices read them: fp32, and the same narrowed for bf16 matrices. What lies behind a vector's
/// end, up to the stride, is zeros.
class Operand {
 public:
  Operand() = default;
  Operand(int64_t vectors, int64_t size)
      : stride_(round_up(size, kPanelRows)),
        values_(static_cast<size_t>(vectors * stride_)),
        narrow_(static_cast<size_t>(vectors * stride_)) {}

  int64_t stride() const { return stride_; }
  float* values(int64_t i) { return values_.data() + i * stride_; }
  uint16_t* narrow(int64_t i) { return narrow_.data() + i * stride_; }

 private:
  int64_t stride_ = 0;
  std::vector<float> values_;
  std::vector<uint16_t> narrow_;
};

/// fp32 vectors with room for whole panels.
class Block {
 public:
  Block() = default;
  Block(int64_t vectors, int64_t size)
      : stride_(round_up(size, kPanelRows)), values_(static_cast<size_t>(vectors * stride_)) {}

  int64_t stride() const { return stride_; }
  float* at(int64_t i) { return values_.data() + i * stride_; }

 private:
  int64_t stride_ = 0;
  std::vector<float> values_;
};

/// Owns what a forward needs beside weights and caches. The threads share it; between two barriers each
/// writes what no other one reads or writes.
class Forward {
 public:
  /// `rows_max`: of one call. All three outlive this.
  Forward(const ModelSpec& spec, const Weights& weights, Team& team, const Kernels& kernels,
          int64_t rows_max);

  /// What one takes in memory, at most, but for the scores of attention, which grow with the text.
  static int64_t bytes(const ModelSpec& spec, int threads, int64_t rows_max);

  int64_t rows_max() const { return rows_max_; }
  /// Computes the rows and adds them to their caches, whose lengths the caller sets. Returns the logits of
  /// the rows in `wanted`, at most kLogitsMax, one behind the other, `logits_stride` apart; valid until the
  /// next call.
  const float* run(std::span<const Row> rows, std::span<const int32_t> wanted);
  /// The same of other rows of the last run: a vocabulary's logits are much memory for all at once.
  const float* more_logits(std::span<const int32_t> wanted);
  int64_t logits_stride() const { return logits_.stride(); }

  /// Throws what reading weights threw in an earlier pass, if it did.
  void throw_if_unread() const;

 private:
  /// An expert and the row that the router sends to it.
  struct Sent {
    int32_t expert, row;
    float weight;
  };
  /// What one thread has for itself.
  struct Own {
    Operand input;                               // of the matrices that follow a norm
    Block panel;                                 // a product before it is added to something
    Block router;                                // scores
    std::vector<int32_t> order;                  // of the experts, by score
    std::vector<Sent> sent;                      // by expert, then row
    Operand gathered;                            // the rows of one expert
    std::vector<uint16_t> key;                   // narrowed
    std::vector<int8_t> integers;                // of a key
    std::vector<float> queries, weights, mixed;  // of one item of attention
    int64_t weight_stride = 0;
  };
  /// Rotary angles of the call's rows.
  struct Angles {
    const Rope* rope;
    std::vector<float> cosines, sines;  // [row][frequency]
  };
  /// Rows that lie behind each other in one text and look at it together.
  struct Run {
    int64_t first, count;
  };

  void prepare();
  void want(std::span<const int32_t> wanted);
  bool begin(int thread, size_t layer, Part part);
  void end(int thread, size_t layer, Part part);
  void compute(int thread);
  void embed(int thread);
  bool attention(int thread, size_t layer);
  void append(Own& own, size_t layer, int64_t head);
  void write_to_cache(Own& own, size_t layer, int64_t head, const Row& row, const float* key,
                      const float* value);
  void attend(Own& own, size_t layer, int64_t head, const Run& run);
  void score(const AttentionRows& at, const Cache& cache, size_t layer, int64_t head, int64_t block,
             const float* queries, float* scores, int64_t stride) const;
  void mix(const AttentionRows& at, const Cache& cache, size_t layer, int64_t head, int64_t block,
           const float* weights, int64_t stride, float* out) const;
  bool feed_forward(int thread, size_t layer);
  bool dense(int thread, size_t layer, Block& to);
  void gate(int thread, const Dense& spec, const DenseWeights& weights, Operand& x, int64_t vectors,
            int64_t first);
  bool mixture(int thread, size_t layer, Block& to);
  void experts(int thread, size_t layer, size_t first, size_t last, Block& to);
  void route(Own& own, const Mixture& spec, const MixtureWeights& weights);
  void head(int thread);

  void normalise(const Norm& norm, const NormWeights& weights, const float* x, float* to, int64_t n) const;
  void norm_rows(Own& own, const Norm& norm, const NormWeights& weights);
  void add_normed(int thread, const Norm& norm, const NormWeights& weights);
  void rotate(size_t layer, int64_t row, float* head) const;
  void multiply(const Matrix& matrix, int64_t panel, Operand& x, int64_t first, int64_t vectors, float* out,
                int64_t out_stride) const;
  void multiply_own(int thread, const Matrix& matrix, std::span<const float> bias, Operand& x,
                    int64_t vectors, Block& out, int64_t first) const;
  void add_own(int thread, const Matrix& matrix, std::span<const float> bias, Operand& x, Block& to);
  void activate(const Dense& spec, float* x, const float* up, int64_t n) const;
  PanelRange own(int thread, const Matrix& matrix) const {
    return own_panels(matrix.panels(), thread, team_.size());
  }
  int64_t count() const { return static_cast<int64_t>(rows_.size()); }

  const ModelSpec& spec_;
  const Weights& weights_;
  Team& team_;
  const Kernels& kernels_;
  const int64_t rows_max_;

  std::span<const Row> rows_;
  std::span<const int32_t> wanted_;
  std::vector<Angles> angles_;
  std::vector<size_t> angles_of_layer_;
  std::vector<Run> runs_;

  Block x_;       // the residual stream
  Block branch_;  // what is normed before it is added to it
  Block qkv_;
  Operand mixed_;  // what attention gives to its out matrix
  Block up_;
  Operand inner_;  // what the feed-forward gives to its down matrix; by row, or by Sent
  Block logits_;
  int64_t logits_rows_ = 0;
  std::vector<Own> owns_;
  bool stopped_ = false;  // every thread has left the forward at the same part, which could not be read
};

}  // namespace overspill::inference
