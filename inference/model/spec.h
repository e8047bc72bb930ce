// A model as data: what is computed, and which stored tensors it is computed from. One forward
// (inference/run/forward.h) runs every spec; a family (families.h) is a function that fills one in.
//
// Shapes are as Hugging Face stores them: a matrix is [rows = outputs, columns = inputs].
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace overspill::inference {

/// Rows [first, first + count) of a stored matrix, or elements of a stored vector.
struct Rows {
  std::string tensor{};
  int64_t count = 0;
  int64_t first = 0;
};

/// A matrix that is several stored ones below each other.
struct MatrixSpec {
  std::vector<Rows> parts{};
  int64_t columns = 0;
  bool stored_transposed = false;  // stored as [inputs, outputs]: GPT-2's Conv1D

  int64_t rows() const;
};

/// A vector that is several stored ones behind each other; no parts: there is none.
struct VectorSpec {
  std::vector<Rows> parts{};

  int64_t size() const;
};

/// RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016).
struct Norm {
  enum class Kind : uint8_t { root_mean_square, layer };
  Kind kind = Kind::root_mean_square;
  float epsilon = 0;
  float weight_offset = 0;  // Gemma stores weight - 1
  VectorSpec weight{};
  VectorSpec bias{};
};

/// Rotary position embedding (Su et al. 2021), Hugging Face's halves: dimension i is rotated with i + n,
/// where n is the number of frequencies. Dimensions from 2 n on stay as they are.
struct Rope {
  std::vector<float> frequencies{};  // radians a position
  bool operator==(const Rope&) const = default;
};

/// Attention with one key and value head for each group of query heads (Ainslie et al. 2023).
struct Attention {
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_size = 0;
  MatrixSpec qkv{};  // all query heads, then all key heads, then all value heads
  VectorSpec qkv_bias{};
  MatrixSpec out{};
  VectorSpec out_bias{};
  std::optional<Rope> rope{};
  std::optional<int64_t> window{};   // a position sees itself and window - 1 before it
  float scale = 0;                   // of scores
  std::optional<float> softcap{};    // scores become cap * tanh(score / cap)
  std::optional<Norm> query_norm{};  // over each head
  std::optional<Norm> key_norm{};
};

enum class Activation : uint8_t { silu, gelu, gelu_tanh };

/// down(act(up x)), or down(act(gate x) * up x) (Shazeer 2020).
struct Dense {
  Activation activation = Activation::silu;
  std::optional<MatrixSpec> gate{};
  MatrixSpec up{};
  VectorSpec up_bias{};
  MatrixSpec down{};
  VectorSpec down_bias{};
};

/// The `chosen` experts of the largest router scores, weighted by softmax over all scores and, if
/// `normalised`, divided by the sum of the chosen weights.
struct Mixture {
  MatrixSpec router{};
  std::vector<Dense> experts{};
  int64_t chosen = 0;
  bool normalised = false;
};

using FeedForward = std::variant<Dense, Mixture>;

/// x += after(attention(before x)); then the same with the feed-forward. `after` is there in Gemma 2 and 3.
struct Layer {
  Norm attention_norm{};
  Attention attention{};
  std::optional<Norm> after_attention{};
  Norm feed_forward_norm{};
  FeedForward feed_forward{};
  std::optional<Norm> after_feed_forward{};
};

struct ModelSpec {
  std::string family{};
  int64_t vocabulary = 0;
  int64_t hidden = 0;
  /// Positions the model was trained for; with `positions` no other can be computed.
  int64_t context = 0;
  MatrixSpec embedding{};  // a row a token
  float embedding_scale = 1;
  std::optional<MatrixSpec> positions{};  // learned, a row a position
  std::vector<Layer> layers{};
  Norm final_norm{};
  std::optional<MatrixSpec> head{};  // none: the embedding is the head too
  std::optional<float> logit_softcap{};
};

}  // namespace overspill::inference
