#include "inference/run/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>

#include "inference/error.h"
#include "inference/run/pack.h"

namespace overspill::inference {
namespace {

constexpr int kSlots = 2;  // one is read into while the other is multiplied by

/// Collects what the spec wants, checks it against the folder, and reads it.
class Loader {
 public:
  Loader(const ModelFolder& folder, const ModelSpec& spec) : folder_(folder), spec_(spec) {}

  Weights load(Team& team, int64_t bytes_max) {
    Weights weights;
    plan(weights);
    check_rest();
    const std::vector<WantedMatrix> resident = place(weights, bytes_max);
    team.run([&](int thread) {
      for (const WantedMatrix& wanted : resident)
        pack_panels(folder_, *wanted.spec, *wanted.to, own_panels(wanted.to->panels(), thread, team.size()));
    });
    if (weights.stream) {
      for (const StoredTensor& tensor : folder_.tensors()) folder_.forget(tensor);
    }
    if (!spec_.head) weights.head = weights.embedding;
    return weights;
  }

 private:
  void plan(Weights& weights) {
    matrix(spec_.embedding, weights.embedding);
    if (spec_.head) matrix(*spec_.head, weights.head);
    if (spec_.positions) matrix(*spec_.positions, weights.positions.emplace());
    norm(spec_.final_norm, weights.final_norm);
    weights.layers.resize(spec_.layers.size());
    top_ = take_wanted();
    for (size_t i = 0; i < spec_.layers.size(); ++i) {
      layer(spec_.layers[i], weights.layers[i]);
      const StreamedLayer& made = layers_.emplace_back(StreamedLayer{i, take_wanted(), 0});
      layers_.back().bytes = bytes_of(made.matrices);
    }
  }

  void layer(const Layer& spec, LayerWeights& to) {
    norm(spec.attention_norm, to.attention_norm);
    matrix(spec.attention.qkv, to.qkv);
    to.qkv_bias = vector(spec.attention.qkv_bias);
    if (spec.attention.query_norm) norm(*spec.attention.query_norm, to.query_norm);
    if (spec.attention.key_norm) norm(*spec.attention.key_norm, to.key_norm);
    matrix(spec.attention.out, to.out);
    to.out_bias = vector(spec.attention.out_bias);
    if (spec.after_attention) norm(*spec.after_attention, to.after_attention);
    norm(spec.feed_forward_norm, to.feed_forward_norm);
    if (const auto* mixture = std::get_if<Mixture>(&spec.feed_forward)) {
      auto& made = to.feed_forward.emplace<MixtureWeights>();
      matrix(mixture->router, made.router);
      made.experts.resize(mixture->experts.size());
      for (size_t i = 0; i < made.experts.size(); ++i) dense(mixture->experts[i], made.experts[i]);
    } else {
      dense(std::get<Dense>(spec.feed_forward), to.feed_forward.emplace<DenseWeights>());
    }
    if (spec.after_feed_forward) norm(*spec.after_feed_forward, to.after_feed_forward);
  }

  void dense(const Dense& spec, DenseWeights& to) {
    if (spec.gate) matrix(*spec.gate, to.gate.emplace());
    matrix(spec.up, to.up);
    to.up_bias = vector(spec.up_bias);
    matrix(spec.down, to.down);
    to.down_bias = vector(spec.down_bias);
  }

  void norm(const Norm& spec, NormWeights& to) {
    to.weight = vector(spec.weight);
    to.bias = vector(spec.bias);
  }

  void matrix(const MatrixSpec& spec, Matrix& to) {
    to.rows = spec.rows();
    to.columns = spec.columns;
    for (const Rows& part : spec.parts) {
      const StoredTensor& tensor = use(part);
      const auto& shape = tensor.shape;
      const size_t outputs = spec.stored_transposed ? 1 : 0;
      if (shape.size() != 2 || shape[1 - outputs] != spec.columns ||
          shape[outputs] < part.first + part.count) {
        wrong_shape(tensor, spec.stored_transposed
                                ? fmt::format("[{}, {}]", spec.columns, part.first + part.count)
                                : fmt::format("[{}, {}]", part.first + part.count, spec.columns));
      }
      used_[part.tensor].of = shape[outputs];
      if (element_of(tensor) == Element::fp32) to.element = Element::fp32;
    }
    wanted_.push_back({&spec, &to});
  }

  std::vector<float> vector(const VectorSpec& spec) {
    for (const Rows& part : spec.parts) {
      const StoredTensor& tensor = use(part);
      element_of(tensor);
      if (tensor.shape != std::vector<int64_t>{part.first + part.count})
        wrong_shape(tensor, fmt::format("[{}]", part.first + part.count));
      used_[part.tensor].of = tensor.shape[0];
    }
    return read_vector(folder_, spec);
  }

  const StoredTensor& use(const Rows& part) {
    const StoredTensor* const tensor = folder_.find(part.tensor);
    if (tensor == nullptr) {
      throw ModelError(fmt::format("{} lacks '{}', which a {} of this config.json has; fetch the model again",
                                   folder_.path().string(), part.tensor, spec_.family));
    }
    used_[part.tensor].rows += part.count;
    return *tensor;
  }

  [[noreturn]] void wrong_shape(const StoredTensor& tensor, const std::string& wanted) const {
    throw ModelError(
        fmt::format("{}: '{}' has the shape [{}], and by config.json it has {}: they are of two models; "
                    "fetch the model again",
                    folder_.path().string(), tensor.name, fmt::join(tensor.shape, ", "), wanted));
  }

  /// What nobody asked for would change what the model computes, if config.json said so.
  void check_rest() const {
    std::vector<std::string> rest;
    for (const StoredTensor& tensor : folder_.tensors()) {
      const auto found = used_.find(tensor.name);
      if (found == used_.end() ? !is_no_weight(tensor.name) : found->second.rows != found->second.of)
        rest.push_back(tensor.name);
    }
    if (rest.empty()) return;
    const size_t more = rest.size() > 3 ? rest.size() - 3 : 0;
    rest.resize(rest.size() - more);
    throw UnknownModel(fmt::format(
        "{}: {}{} is not what a {} of this config.json has, and would be left out; run it with transformers",
        folder_.path().string(), fmt::join(rest, ", "), more == 0 ? "" : fmt::format(" and {} more", more),
        spec_.family));
  }

  /// Buffers that old files have (a causal mask, rotary frequencies), and the head of a model that is tied.
  bool is_no_weight(const std::string& name) const {
    return name.ends_with("rotary_emb.inv_freq") || name.ends_with(".attn.bias") ||
           name.ends_with(".attn.masked_bias") || (name == "lm_head.weight" && !spec_.head);
  }

  std::vector<WantedMatrix> take_wanted() { return std::exchange(wanted_, {}); }

  static int64_t bytes_of(const std::vector<WantedMatrix>& matrices) {
    int64_t bytes = 0;
    for (const WantedMatrix& matrix : matrices) {
      // Each element is stored in a file that is there, so the sum overflows nothing.
      bytes += aligned_bytes(*matrix.to);
    }
    return bytes;
  }

  /// Gives every matrix that stays its memory, and returns those; the others become the stream's.
  std::vector<WantedMatrix> place(Weights& weights, int64_t bytes_max) {
    std::vector<WantedMatrix> resident = top_;
    std::vector<StreamedLayer> streamed;
    const std::vector<bool> stays = layers_that_stay(bytes_max);
    for (size_t i = 0; i < layers_.size(); ++i) {
      for (const WantedMatrix& matrix : layers_[i].matrices)
        weights.has_fp32 = weights.has_fp32 || matrix.to->element == Element::fp32;
      if (stays[i]) {
        resident.insert(resident.end(), layers_[i].matrices.begin(), layers_[i].matrices.end());
      } else {
        streamed.push_back(layers_[i]);
      }
    }
    for (const WantedMatrix& matrix : top_)
      weights.has_fp32 = weights.has_fp32 || matrix.to->element == Element::fp32;
    weights.memory = kernels::HostPages(bytes_of(resident));
    std::byte* data = weights.memory.data();
    for (const WantedMatrix& matrix : resident) {
      matrix.to->data = data;
      data += aligned_bytes(*matrix.to);
    }
    if (!streamed.empty())
      weights.stream = std::make_unique<LayerStream>(folder_, std::move(streamed), kSlots);
    return resident;
  }

  /// All, or as many as fit beside the slots, evenly apart: while one is computed the next is read.
  std::vector<bool> layers_that_stay(int64_t bytes_max) const {
    int64_t all = 0, largest = 0;
    for (const StreamedLayer& layer : layers_) {
      all += layer.bytes;
      largest = std::max(largest, layer.bytes);
    }
    const int64_t top = bytes_of(top_);
    const auto count = static_cast<int64_t>(layers_.size());
    if (top + all <= bytes_max) return std::vector<bool>(layers_.size(), true);
    const int64_t room = bytes_max - top - kSlots * largest;
    if (room < 0) {
      throw NoRoom(
          fmt::format("{}: {} bytes are left for its weights, and they need at least {}: {} for the "
                      "embedding and the head, "
                      "and two layers of {}; give a larger budget",
                      folder_.path().string(), bytes_max, top + kSlots * largest, top, largest));
    }
    const int64_t stay = room / largest;
    std::vector<bool> stays;
    for (int64_t i = 0; i < count; ++i) stays.push_back((i + 1) * stay / count > i * stay / count);
    return stays;
  }

  struct Use {
    int64_t rows = 0;  // that the spec takes
    int64_t of = 0;    // that there are
  };

  const ModelFolder& folder_;
  const ModelSpec& spec_;
  std::vector<WantedMatrix> wanted_;  // since the last take
  std::vector<WantedMatrix> top_;     // embedding, positions, head
  std::vector<StreamedLayer> layers_;
  std::unordered_map<std::string, Use> used_;
};

}  // namespace

void Matrix::copy_row(int64_t row, float* to) const {
  const std::byte* const at = panel(row / kPanelRows);
  const int64_t lane = row % kPanelRows;
  for (int64_t c = 0; c < columns; ++c) {
    if (element == Element::fp32) {
      std::memcpy(to + c, at + 4 * (c * kPanelRows + lane), sizeof(float));
    } else {
      uint16_t bits;
      std::memcpy(&bits, at + 2 * (c / 2 * 2 * kPanelRows + 2 * lane + c % 2), sizeof bits);
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      std::memcpy(to + c, &wide, sizeof wide);
    }
  }
}

Weights load_weights(const ModelFolder& folder, const ModelSpec& spec, Team& team, int64_t bytes_max) {
  return Loader(folder, spec).load(team, bytes_max);
}

}  // namespace overspill::inference
