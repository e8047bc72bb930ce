#include "inference/run/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>

#include "cpu_optim/floating_point.h"
#include "inference/error.h"
#include "inference/run/pack.h"

namespace overspill::inference {
namespace {

constexpr int kSlots = 2;  // one is read into while the other is multiplied by
// Of experts, at least: a thread may be at one while another is at the one before, and two are read ahead.
constexpr int64_t kExpertSlots = 4;

/// Collects what the spec wants, checks it against the folder, and reads it.
class Loader {
 public:
  Loader(const ModelFolder& folder, const ModelSpec& spec, WeightFormat format)
      : folder_(folder), spec_(spec), format_(format) {}

  Weights load(Team& team, const std::function<int64_t(bool)>& bytes_max_of) {
    Weights weights;
    plan(weights);
    check_rest();
    const int64_t bytes_max = bytes_max_of ? bytes_max_of(has_fp32()) : std::numeric_limits<int64_t>::max();
    for (;;) {
      const std::vector<WantedMatrix> resident = place(weights, bytes_max);
      if (read(team, resident)) break;  // else some are now known not to fit, and take more room
    }
    weights.has_fp32 = has_fp32();
    start_stream(weights, team.size());
    if (!spec_.head) weights.head = weights.embedding;
    return weights;
  }

 private:
  void plan(Weights& weights) {
    matrix(spec_.embedding, weights.embedding);
    if (spec_.head) matrix(*spec_.head, weights.head);
    if (spec_.positions) exact_matrix(*spec_.positions, weights.positions.emplace());
    norm(spec_.final_norm, weights.final_norm);
    weights.layers.resize(spec_.layers.size());
    top_ = take_wanted();
    first_layer_ = weights.layers.data();
    for (size_t i = 0; i < spec_.layers.size(); ++i)
      layer(spec_.layers[i], weights.layers[i], [&](Part part) { end_part(i, part); });
  }

  /// What was wanted since the end of the part before.
  void end_part(size_t layer, Part part) {
    parts_.push_back({.layer = layer, .part = part, .matrices = take_wanted()});
  }

  /// Calls end(part) behind the matrices of each part, in the order in which a pass uses them.
  template <class End>
  void layer(const Layer& spec, LayerWeights& to, End end) {
    norm(spec.attention_norm, to.attention_norm);
    matrix(spec.attention.qkv, to.qkv);
    end(Part::qkv);
    to.qkv_bias = vector(spec.attention.qkv_bias);
    if (spec.attention.query_norm) norm(*spec.attention.query_norm, to.query_norm);
    if (spec.attention.key_norm) norm(*spec.attention.key_norm, to.key_norm);
    matrix(spec.attention.out, to.out);
    end(Part::out);
    to.out_bias = vector(spec.attention.out_bias);
    if (spec.after_attention) norm(*spec.after_attention, to.after_attention);
    norm(spec.feed_forward_norm, to.feed_forward_norm);
    if (const auto* mixture = std::get_if<Mixture>(&spec.feed_forward)) {
      auto& made = to.feed_forward.emplace<MixtureWeights>();
      exact_matrix(mixture->router, made.router);
      top_.push_back(take_wanted().front());  // small, and it says which experts are wanted
      made.experts.resize(mixture->experts.size());
      experts_.push_back({static_cast<size_t>(&to - first_layer_), mixture->chosen, {}});
      for (size_t i = 0; i < made.experts.size(); ++i) {
        dense(mixture->experts[i], made.experts[i], [](Part) {});
        experts_.back().experts.push_back(take_wanted());
      }
    } else {
      dense(std::get<Dense>(spec.feed_forward), to.feed_forward.emplace<DenseWeights>(), end);
    }
    if (spec.after_feed_forward) norm(*spec.after_feed_forward, to.after_feed_forward);
  }

  template <class End>
  void dense(const Dense& spec, DenseWeights& to, End end) {
    matrix(spec.up, to.up);
    end(Part::up);
    if (spec.gate) {
      matrix(*spec.gate, to.gate.emplace());
      end(Part::gate);
    }
    to.up_bias = vector(spec.up_bias);
    matrix(spec.down, to.down);
    end(Part::down);
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
    }
    to.element = wanted_element(element_of(folder_, spec), spec.columns);
    wanted_.push_back({&spec, &to});
  }

  /// `stored`, or what the format makes of it.
  Element wanted_element(Element stored, int64_t columns) const {
    if (format_ == WeightFormat::int8) return Element::int8;
    const bool codes = format_ == WeightFormat::coded && stored == Element::bf16;
    return codes && columns <= kCodedColumnsMax ? Element::coded : stored;
  }

  /// A small matrix whose exactness is worth more than its bytes.
  void exact_matrix(const MatrixSpec& spec, Matrix& to) {
    matrix(spec, to);
    if (to.element == Element::int8) to.element = element_of(folder_, spec);
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

  /// The same matrix where it is read for each pass: nobody codes it each time.
  static Matrix when_streamed(Matrix matrix) {
    if (matrix.element == Element::coded) matrix.element = Element::bf16;
    return matrix;
  }
  static int64_t streamed_bytes_of(const std::vector<WantedMatrix>& matrices) {
    int64_t bytes = 0;
    for (const WantedMatrix& matrix : matrices) bytes += aligned_bytes(when_streamed(*matrix.to));
    return bytes;
  }

  /// What is held of the matrices while they are packed: one that is stored transposed becomes another
  /// element from a copy of the whole (pack.h).
  template <class Form>
  int64_t copied_bytes_of(const std::vector<WantedMatrix>& matrices, Form form) const {
    int64_t bytes = 0;
    for (const WantedMatrix& matrix : matrices) {
      const Element stored = element_of(folder_, *matrix.spec);
      if (matrix.spec->stored_transposed && form(*matrix.to).element != stored)
        bytes += matrix.to->panels() * panel_bytes(stored, matrix.to->columns);
    }
    return bytes;
  }

  /// Gives every matrix that stays its memory, and returns those.
  std::vector<WantedMatrix> place(Weights& weights, int64_t bytes_max) {
    std::vector<WantedMatrix> resident = top_;
    choose(bytes_max);
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (stays_[i]) resident.insert(resident.end(), parts_[i].matrices.begin(), parts_[i].matrices.end());
    }
    if (expert_slots_ == 0)
      for_each_expert(
          [&](const auto& matrices) { resident.insert(resident.end(), matrices.begin(), matrices.end()); });
    weights.memory = kernels::HostPages();  // the one of another try
    weights.memory = kernels::HostPages(memory_bytes(resident));
    place_at(resident, weights.memory.data());
    return resident;
  }

  /// Reads the matrices. False where some do not fit, which are bf16 from then on.
  bool read(Team& team, const std::vector<WantedMatrix>& matrices) const {
    std::vector<std::atomic<bool>> misfits(matrices.size());
    // Where not all fits, the page cache has no room for a copy.
    const bool all_stay = expert_slots_ == 0 && std::ranges::all_of(stays_, [](bool stays) { return stays; });
    const ReadPath path = all_stay ? ReadPath::cached : ReadPath::direct;
    team.run([&](int thread) {
      TensorReader reader(folder_, path);
      for (size_t i = 0; i < matrices.size(); ++i) {
        const Matrix& to = *matrices[i].to;
        if (!pack_panels(reader, *matrices[i].spec, to, own_panels(to.panels(), thread, team.size())))
          misfits[i] = true;
      }
    });
    bool all_fit = true;
    for (size_t i = 0; i < matrices.size(); ++i) {
      if (!misfits[i]) continue;
      all_fit = false;
      matrices[i].to->element = Element::bf16;
    }
    return all_fit;
  }

  bool has_fp32() const {
    bool found = false;
    const auto look = [&](const std::vector<WantedMatrix>& matrices) {
      for (const WantedMatrix& matrix : matrices) found = found || matrix.to->element == Element::fp32;
    };
    look(top_);
    for (const StreamedPart& part : parts_) look(part.matrices);
    for_each_expert(look);
    return found;
  }

  template <class Take>
  void for_each_expert(Take take) const {
    for (const LayerExperts& layer : experts_) {
      for (const std::vector<WantedMatrix>& matrices : layer.experts) take(matrices);
    }
  }

  void start_stream(Weights& weights, int users) {
    std::vector<StreamedPart> streamed;
    for (size_t i = 0; i < parts_.size(); ++i) {
      if (stays_[i]) continue;
      StreamedPart& part = streamed.emplace_back(parts_[i]);
      for (const WantedMatrix& matrix : part.matrices) *matrix.to = when_streamed(*matrix.to);
      part.bytes = memory_bytes(part.matrices);
      part.read_bytes = folder_bytes(folder_, part.matrices);
    }
    if (!streamed.empty())
      weights.stream = std::make_unique<LayerStream>(folder_, std::move(streamed), kSlots, users);
    if (expert_slots_ == 0) return;
    for_each_expert([](const auto& matrices) {
      for (const WantedMatrix& matrix : matrices) *matrix.to = when_streamed(*matrix.to);
    });
    weights.experts = std::make_unique<ExpertStore>(folder_, experts_, expert_slots_, users);
  }

  /// Which parts and experts stay. What every pass uses comes before experts, which few tokens use.
  void choose(int64_t bytes_max) {
    int64_t experts = 0, slot = 0, count = 0;
    for_each_expert([&](const auto& matrices) {
      experts += memory_bytes(matrices);
      slot = std::max(slot, streamed_bytes_of(matrices));
      ++count;
    });
    expert_slots_ = 0;
    if (count == 0 || experts <= bytes_max - bytes_of_all_else()) {
      stays_ = parts_that_stay(bytes_max, experts);
      return;
    }
    const int64_t least = std::min(count, kExpertSlots);
    stays_ = parts_that_stay(bytes_max, least * slot);
    const bool all_else = std::ranges::all_of(stays_, [](bool stays) { return stays; });
    const int64_t fit = all_else ? (bytes_max - bytes_of_all_else()) / slot : least;
    expert_slots_ = std::clamp(fit, least, count);
  }

  /// The embedding, the head and all parts of layers.
  int64_t bytes_of_all_else() const {
    int64_t bytes = memory_bytes(top_);
    for (const StreamedPart& part : parts_) bytes += memory_bytes(part.matrices);
    return bytes;
  }

  /// All, or what fits beside the slots. Spread evenly over the pass, so that while some are computed the
  /// next are read; then what still fits.
  std::vector<bool> parts_that_stay(int64_t bytes_max, int64_t of_experts) const {
    int64_t all = 0, slot = 0, copied = 0, copied_to_stay = 0;
    std::vector<int64_t> bytes;  // of each part, where it stays
    for (const StreamedPart& part : parts_) {
      bytes.push_back(memory_bytes(part.matrices));
      all += bytes.back();
      slot = std::max(slot, streamed_bytes_of(part.matrices));
      copied = std::max(copied, copied_bytes_of(part.matrices, when_streamed));
      copied_to_stay = std::max(copied_to_stay, copied_bytes_of(part.matrices, std::identity()));
    }
    slot += copied;  // each part that is in a slot may be packed at the same time
    const int64_t top = memory_bytes(top_);
    if (top + all + copied_to_stay <= bytes_max - of_experts) return std::vector<bool>(parts_.size(), true);
    const int64_t least = top + kSlots * slot + of_experts, room = bytes_max - least;
    if (room < 0) {
      throw NoRoom(fmt::format(
          "{}: {} bytes are left for its weights, and they need at least {}: {} for the "
          "embedding, the head and routers, {} parts of a layer of {}, and {} for experts; give a "
          "larger budget",
          folder_.path().string(), bytes_max, least, top, kSlots, slot, of_experts));
    }
    std::vector<bool> stays(parts_.size());
    const double share = static_cast<double>(room) / static_cast<double>(all);
    int64_t stay = 0;
    const auto take = [&](size_t i, double most) {
      if (stays[i] || static_cast<double>(stay + bytes[i]) > most) return;
      stays[i] = true;
      stay += bytes[i];
    };
    int64_t seen = 0;
    for (size_t i = 0; i < parts_.size(); ++i) {
      seen += bytes[i];
      take(i, share * static_cast<double>(seen));
    }
    for (size_t i = 0; i < parts_.size(); ++i) take(i, static_cast<double>(room));
    return stays;
  }

  struct Use {
    int64_t rows = 0;  // that the spec takes
    int64_t of = 0;    // that there are
  };

  const ModelFolder& folder_;
  const ModelSpec& spec_;
  const WeightFormat format_;
  std::vector<WantedMatrix> wanted_;  // since the last take
  std::vector<WantedMatrix> top_;     // embedding, positions, head, routers
  std::vector<StreamedPart> parts_;   // of the layers, in the order of a pass
  std::vector<bool> stays_;           // by part
  std::vector<LayerExperts> experts_;
  int64_t expert_slots_ = 0;  // 0: all experts stay
  const LayerWeights* first_layer_ = nullptr;
  std::unordered_map<std::string, Use> used_;
};

}  // namespace

void Matrix::copy_row(int64_t row, float* to) const {
  const std::byte* const at = panel(row / kPanelRows);
  const int64_t lane = row % kPanelRows;
  const auto widen = [](uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); };
  switch (element) {
    case Element::fp32:
      for (int64_t c = 0; c < columns; ++c)
        std::memcpy(to + c, at + 4 * (c * kPanelRows + lane), sizeof(float));
      return;
    case Element::bf16:
      for (int64_t c = 0; c < columns; ++c) {
        uint16_t bits;
        std::memcpy(&bits, at + 2 * (c / 2 * 2 * kPanelRows + 2 * lane + c % 2), sizeof bits);
        to[c] = widen(bits);
      }
      return;
    case Element::coded:
      return decode_row(at, columns, lane, to);
    case Element::int8:
      return dequantise_row(at, columns, lane, to);
  }
}

Weights load_weights(const ModelFolder& folder, const ModelSpec& spec, Team& team, WeightFormat format,
                     const std::function<int64_t(bool)>& bytes_max) {
  const optim::FloatingPointMode mode;  // that of the team, which packs the most
  return Loader(folder, spec, format).load(team, bytes_max);
}

}  // namespace overspill::inference
