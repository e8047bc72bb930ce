// The next token, drawn from logits.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace overspill::inference {

/// Excludes tokens that may not come next, by logits of -infinity. `history`: as of `Sampler::draw`. Called
/// by the thread that draws, once for each token. Throws std::invalid_argument.
using Constraint = std::function<void(std::span<const int32_t> history, std::span<float> logits)>;

/// In the order of transformers' processors: repetition, then bias and the constraint, then temperature, then
/// top-k, top-p and min-p.
struct Sampling {
  float temperature = 0;  // 0: the likeliest token, the first of equal ones
  int64_t top_k = 0;      // 0: all
  float top_p = 1;        // the fewest tokens whose probability is at least this (Holtzman et al. 2020)
  float min_p = 0;        // tokens of at least this part of the largest probability (Nguyen et al. 2024)
  float repetition = 1;   // divides positive logits of tokens in the text, multiplies others (Keskar 2019)
  uint64_t seed = 0;
  std::vector<std::pair<int32_t, float>> bias{};  // added to a token's logit
  Constraint constraint{};
};

/// What drawing a token takes beside the logits. Whoever draws has one, for all samplers. Threads: one at a
/// time.
class Drafts {
 public:
  /// What one takes in memory, at most.
  static int64_t bytes(int64_t vocabulary) {
    const auto each = static_cast<int64_t>(sizeof(float) + sizeof(Candidate) + sizeof(int32_t));
    return vocabulary * each + vocabulary / 8;
  }
  /// All tokens in the order of their numbers.
  std::span<int32_t> tokens(int64_t vocabulary);

 private:
  friend class Sampler;
  struct Candidate {
    int32_t token;
    float logit;
  };

  std::vector<float> logits_;
  std::vector<bool> seen_;
  std::vector<Candidate> candidates_;
  std::vector<int32_t> tokens_;
};

/// Draws token after token of one text: the same seed, logits and history give the same tokens.
class Sampler {
 public:
  /// Throws std::invalid_argument, which names the value.
  explicit Sampler(Sampling sampling);

  /// `history`: the tokens of the text before. Throws std::invalid_argument where a logit is no number, or a
  /// token of the bias or the history is none of the vocabulary.
  int32_t draw(std::span<const float> logits, std::span<const int32_t> history, Drafts& drafts);

 private:
  using Candidate = Drafts::Candidate;

  void adjust(std::span<const int32_t> history, Drafts& drafts) const;
  void keep_likely(Drafts& drafts, float best) const;  // of the logits

  Sampling sampling_;
  std::mt19937_64 random_;
};

}  // namespace overspill::inference
