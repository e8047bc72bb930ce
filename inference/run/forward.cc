#include "inference/run/forward.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <variant>

namespace overspill::inference {
namespace {

// Rows of one text that share each key and value that is read.
constexpr int64_t kRunRows = 4;

struct Widest {
  int64_t qkv = 0, mixed = 0, inner = 0, inner_slots = 1, experts = 0, group_values = 0, head_size = 0;

  explicit Widest(const ModelSpec& spec) {
    for (const Layer& layer : spec.layers) {
      const Attention& attention = layer.attention;
      qkv = std::max(qkv, attention.qkv.rows());
      mixed = std::max(mixed, attention.out.columns);
      head_size = std::max(head_size, attention.head_size);
      const int64_t group = attention.heads / attention.kv_heads;
      group_values = std::max(group_values, group * Cache::value_stride(attention));
      if (const auto* mixture = std::get_if<Mixture>(&layer.feed_forward)) {
        inner_slots = std::max(inner_slots, mixture->chosen);
        experts = std::max(experts, mixture->router.rows());
        for (const Dense& dense : mixture->experts) inner = std::max(inner, dense.up.rows());
      } else {
        inner = std::max(inner, std::get<Dense>(layer.feed_forward).up.rows());
      }
    }
  }
};

}  // namespace

Forward::Forward(const ModelSpec& spec, const Weights& weights, Team& team, const Kernels& kernels,
                 int64_t rows_max)
    : spec_(spec), weights_(weights), team_(team), kernels_(kernels), rows_max_(rows_max) {
  const Widest widest(spec);
  x_ = Block(rows_max, spec.hidden);
  branch_ = Block(rows_max, spec.hidden);
  qkv_ = Block(rows_max, widest.qkv);
  mixed_ = Operand(rows_max, widest.mixed);
  up_ = Block(rows_max * widest.inner_slots, widest.inner);
  inner_ = Operand(rows_max * widest.inner_slots, widest.inner);
  owns_.resize(static_cast<size_t>(team.size()));
  for (Own& own : owns_) {
    own.input = Operand(rows_max, spec.hidden);
    own.panel = Block(rows_max, kPanelRows);
    own.router = Block(rows_max, widest.experts);
    // Between barriers nothing may throw.
    own.order.reserve(static_cast<size_t>(widest.experts));
    own.sent.reserve(static_cast<size_t>(widest.experts > 0 ? rows_max * widest.inner_slots : 0));
    own.gathered = Operand(widest.experts > 0 ? rows_max : 0, std::max(spec.hidden, widest.inner));
    own.key.resize(static_cast<size_t>(widest.head_size));
    own.integers.resize(static_cast<size_t>(widest.head_size));
    own.queries.resize(static_cast<size_t>(kRunRows * widest.group_values));
    own.mixed.resize(static_cast<size_t>(kRunRows * widest.group_values));
  }
  for (const Layer& layer : spec.layers) {
    const auto& rope = layer.attention.rope;
    const auto has = [&](const Angles& known) { return *known.rope == *rope; };
    const auto known = rope ? std::ranges::find_if(angles_, has) : angles_.end();
    angles_of_layer_.push_back(static_cast<size_t>(known - angles_.begin()));
    if (rope && known == angles_.end()) {
      const size_t size = static_cast<size_t>(rows_max) * rope->frequencies.size();
      angles_.push_back({&*rope, std::vector<float>(size), std::vector<float>(size)});
    }
  }
}

int64_t Forward::bytes(const ModelSpec& spec, int threads, int64_t rows_max) {
  const Widest widest(spec);
  const auto block = [&](int64_t vectors, int64_t size) { return 4 * vectors * round_up(size, kPanelRows); };
  const auto operand = [&](int64_t vectors, int64_t size) { return block(vectors, size) * 3 / 2; };
  const int64_t slots = rows_max * widest.inner_slots;
  const int64_t shared = 2 * block(rows_max, spec.hidden) + block(rows_max, widest.qkv) +
                         operand(rows_max, widest.mixed) + block(slots, widest.inner) +
                         operand(slots, widest.inner) +
                         block(std::min(rows_max, kLogitsMax), spec.vocabulary);
  const int64_t gathered = widest.experts > 0 ? operand(rows_max, std::max(spec.hidden, widest.inner)) : 0;
  const int64_t own = operand(rows_max, spec.hidden) + block(rows_max, kPanelRows) +
                      block(rows_max, widest.experts) + gathered;
  return shared + threads * own;
}

const float* Forward::run(std::span<const Row> rows, std::span<const int32_t> wanted) {
  if (rows.empty() || static_cast<int64_t>(rows.size()) > rows_max_)
    throw std::invalid_argument("a forward takes from 1 to rows_max rows");
  for (const Row& row : rows) {
    if (row.token < 0 || row.token >= spec_.vocabulary || row.position < 0 ||
        !row.cache->holds(row.position) || (spec_.positions && row.position >= spec_.context))
      throw std::invalid_argument("a forward's token or position is outside of the model or its cache");
  }
  // What could not be read for one pass is not tried again: a stream has stopped in the middle of it.
  throw_if_unread();
  rows_ = rows;
  want(wanted);
  prepare();
  stopped_ = false;
  team_.run([this](int thread) { compute(thread); });
  if (stopped_) throw_if_unread();
  return logits_.at(0);
}

/// Throws what reading weights threw, if it did.
void Forward::throw_if_unread() const {
  const auto look = [](const auto& source) {
    if (source == nullptr) return;
    if (const std::exception_ptr error = source->error()) std::rethrow_exception(error);
  };
  look(weights_.stream);
  look(weights_.experts);
}

const float* Forward::more_logits(std::span<const int32_t> wanted) {
  want(wanted);
  team_.run([this](int thread) { head(thread); });
  return logits_.at(0);
}

void Forward::want(std::span<const int32_t> wanted) {
  const auto is_row = [&](int32_t i) { return i >= 0 && i < count(); };
  if (std::ssize(wanted) > kLogitsMax || !std::ranges::all_of(wanted, is_row))
    throw std::invalid_argument("logits are of a few of a forward's rows");
  wanted_ = wanted;
  if (logits_.stride() == 0 || std::ssize(wanted) > logits_rows_) {
    logits_ = Block();  // so that there are never two
    logits_ = Block(std::ssize(wanted), spec_.vocabulary);
    logits_rows_ = std::ssize(wanted);
  }
}

void Forward::prepare() {
  for (Angles& angles : angles_) {
    const size_t n = angles.rope->frequencies.size();
    for (size_t r = 0; r < rows_.size(); ++r) {
      for (size_t i = 0; i < n; ++i) {
        const float angle = static_cast<float>(rows_[r].position) * angles.rope->frequencies[i];
        angles.cosines[r * n + i] = std::cos(angle);
        angles.sines[r * n + i] = std::sin(angle);
      }
    }
  }
  runs_.clear();
  int64_t end_max = 0;
  for (int64_t i = 0; i < count(); ++i) {
    const Row& row = rows_[static_cast<size_t>(i)];
    end_max = std::max(end_max, row.position + 1);
    const bool follows = i > 0 && rows_[static_cast<size_t>(i - 1)].cache == row.cache &&
                         rows_[static_cast<size_t>(i - 1)].position + 1 == row.position;
    if (follows && runs_.back().count < kRunRows) {
      ++runs_.back().count;
    } else {
      runs_.push_back({i, 1});
    }
  }
  int64_t group_max = 1;
  for (const Layer& layer : spec_.layers)
    group_max = std::max(group_max, layer.attention.heads / layer.attention.kv_heads);
  for (Own& own : owns_) {
    // Grows as the text does, by halves, so that a token seldom allocates.
    if (own.weight_stride < end_max) {
      const int64_t stride = round_up(end_max + end_max / 2, kKeyBlock);
      own.weights.resize(static_cast<size_t>(kRunRows * group_max * stride));
      own.weight_stride = stride;
    }
  }
}

void Forward::compute(int thread) {
  embed(thread);
  team_.barrier();
  for (size_t layer = 0; layer < spec_.layers.size(); ++layer) {
    if (attention(thread, layer) && feed_forward(thread, layer)) continue;
    if (thread == 0) stopped_ = true;
    return;
  }
  head(thread);
}

/// Waits for the part if it is one that is read for each pass. False, for every thread, where it cannot be
/// had.
bool Forward::begin(int thread, size_t layer, Part part) {
  return !weights_.stream || !weights_.stream->has(layer, part) ||
         weights_.stream->acquire(thread, layer, part);
}

/// The thread has used the part.
void Forward::end(int thread, size_t layer, Part part) {
  if (weights_.stream && weights_.stream->has(layer, part)) weights_.stream->release(thread);
}

void Forward::embed(int thread) {
  for (int64_t r = thread; r < count(); r += team_.size()) {
    const Row& row = rows_[static_cast<size_t>(r)];
    float* const x = x_.at(r);
    weights_.embedding.copy_row(row.token, x);
    for (int64_t i = 0; i < spec_.hidden; ++i) x[i] *= spec_.embedding_scale;
    if (weights_.positions) {
      float* const position = owns_[static_cast<size_t>(thread)].input.values(0);
      weights_.positions->copy_row(row.position, position);
      kernels_.add(position, x, spec_.hidden);
    }
  }
}

// Attention.

/// False: a part could not be had.
bool Forward::attention(int thread, size_t layer) {
  const Layer& spec = spec_.layers[layer];
  const LayerWeights& weights = weights_.layers[layer];
  const Attention& attention = spec.attention;
  Own& mine = owns_[static_cast<size_t>(thread)];
  const int threads = team_.size();

  norm_rows(mine, spec.attention_norm, weights.attention_norm);
  if (!begin(thread, layer, Part::qkv)) return false;
  multiply_own(thread, weights.qkv, weights.qkv_bias, mine.input, count(), qkv_, 0);
  end(thread, layer, Part::qkv);
  team_.barrier();
  for (int64_t head = thread; head < attention.kv_heads; head += threads) append(mine, layer, head);
  // With one row a head is appended and looked at by the same thread.
  if (count() > 1) team_.barrier();
  int64_t item = 0;
  for (const Run& run : runs_) {
    for (int64_t head = 0; head < attention.kv_heads; ++head, ++item) {
      if (item % threads == thread) attend(mine, layer, head, run);
    }
  }
  team_.barrier();
  if (!begin(thread, layer, Part::out)) return false;
  if (spec.after_attention) {
    multiply_own(thread, weights.out, weights.out_bias, mixed_, count(), branch_, 0);
  } else {
    add_own(thread, weights.out, weights.out_bias, mixed_, x_);
  }
  end(thread, layer, Part::out);
  team_.barrier();
  if (spec.after_attention) {
    add_normed(thread, *spec.after_attention, weights.after_attention);
    team_.barrier();
  }
  return true;
}

/// Norms and rotates one key head and the query heads that look at it, and writes key and value to the cache.
void Forward::append(Own& own, size_t layer, int64_t head) {
  const Attention& spec = spec_.layers[layer].attention;
  const LayerWeights& weights = weights_.layers[layer];
  const int64_t group = spec.heads / spec.kv_heads, size = spec.head_size;
  for (int64_t r = 0; r < count(); ++r) {
    float* const queries = qkv_.at(r) + head * group * size;
    float* const key = qkv_.at(r) + (spec.heads + head) * size;
    float* const value = key + spec.kv_heads * size;
    for (int64_t g = 0; g < group; ++g) {
      if (spec.query_norm)
        normalise(*spec.query_norm, weights.query_norm, queries + g * size, queries + g * size, size);
      rotate(layer, r, queries + g * size);
    }
    if (spec.key_norm) normalise(*spec.key_norm, weights.key_norm, key, key, size);
    rotate(layer, r, key);
    write_to_cache(own, layer, head, rows_[static_cast<size_t>(r)], key, value);
  }
}

void Forward::write_to_cache(Own& own, size_t layer, int64_t head, const Row& row, const float* key,
                             const float* value) {
  const Attention& spec = spec_.layers[layer].attention;
  const int64_t size = spec.head_size, block = row.position / kBlockPositions;
  const int64_t position = row.position % kBlockPositions;
  const int64_t key_at = position / kKeyBlock * kKeyBlock * size + position % kKeyBlock;
  const int64_t value_at = position * Cache::value_stride(spec);
  std::byte* const keys_at = row.cache->keys(layer, head, block);
  std::byte* const values_at = row.cache->values(layer, head, block);
  // A position's numbers lie kKeyBlock apart.
  const auto scatter = [&](const auto* from, auto* to) {
    for (int64_t d = 0; d < size; ++d) to[key_at + d * kKeyBlock] = from[d];
  };
  switch (row.cache->element()) {
    case Element::fp32:
      scatter(key, reinterpret_cast<float*>(keys_at));
      std::copy_n(value, size, reinterpret_cast<float*>(values_at) + value_at);
      return;
    case Element::int8:
      row.cache->key_scales(layer, head, block)[position] = kernels_.quantise(key, own.integers.data(), size);
      scatter(own.integers.data(), reinterpret_cast<int8_t*>(keys_at));
      row.cache->value_scales(layer, head, block)[position] =
          kernels_.quantise(value, reinterpret_cast<int8_t*>(values_at) + value_at, size);
      return;
    case Element::bf16:
    case Element::coded:  // which no cache is
      kernels_.narrow(key, own.key.data(), size);
      scatter(own.key.data(), reinterpret_cast<uint16_t*>(keys_at));
      kernels_.narrow(value, reinterpret_cast<uint16_t*>(values_at) + value_at, size);
  }
}

/// The query heads of one key and value head, for the rows of a run.
void Forward::attend(Own& own, size_t layer, int64_t head, const Run& run) {
  const Attention& spec = spec_.layers[layer].attention;
  const int64_t group = spec.heads / spec.kv_heads, size = spec.head_size;
  const auto first_of = [&](int64_t position) {
    return spec.window ? std::max<int64_t>(0, position - *spec.window + 1) : 0;
  };
  const Row& row = rows_[static_cast<size_t>(run.first)];
  const int64_t rows = run.count * group, stride = Cache::value_stride(spec);
  const int64_t begin = first_of(row.position) / kKeyBlock * kKeyBlock, end = row.position + run.count;
  for (int64_t r = 0; r < run.count; ++r)
    std::copy_n(qkv_.at(run.first + r) + head * group * size, group * size,
                own.queries.data() + r * group * size);

  // Calls body(positions of the block, counted from its first; the block; its first position).
  const auto for_each_block = [&](auto body) {
    for (int64_t block = begin / kBlockPositions; block * kBlockPositions < end; ++block) {
      const int64_t first = block * kBlockPositions;
      body(AttentionRows{.rows = rows,
                         .begin = std::max(begin, first) - first,
                         .end = std::min(end, first + kBlockPositions) - first,
                         .head_size = size,
                         .value_stride = stride},
           block, first);
    }
  };
  for_each_block([&](const AttentionRows& at, int64_t block, int64_t first) {
    score(at, *row.cache, layer, head, block, own.queries.data(), own.weights.data() + first,
          own.weight_stride);
  });
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t position = row.position + i / group;
    // Every row's sums begin at a block of its own window, so that they do not depend on the run's other
    // rows.
    kernels_.softmax(own.weights.data() + i * own.weight_stride, begin, first_of(position), position + 1,
                     round_up(end, kKeyBlock), spec.scale, spec.softcap.value_or(0));
  }
  std::fill_n(own.mixed.data(), rows * stride, 0.0f);
  for_each_block([&](const AttentionRows& at, int64_t block, int64_t first) {
    mix(at, *row.cache, layer, head, block, own.weights.data() + first, own.weight_stride, own.mixed.data());
  });
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t r = run.first + i / group, offset = (head * group + i % group) * size;
    std::copy_n(own.mixed.data() + i * stride, size, mixed_.values(r) + offset);
    kernels_.narrow(mixed_.values(r) + offset, mixed_.narrow(r) + offset, size);
  }
}

/// Scores of a block's positions.
void Forward::score(const AttentionRows& at, const Cache& cache, size_t layer, int64_t head, int64_t block,
                    const float* queries, float* scores, int64_t stride) const {
  const std::byte* const keys = cache.keys(layer, head, block);
  switch (cache.element()) {
    case Element::fp32:
      return kernels_.score_fp32(at, queries, reinterpret_cast<const float*>(keys), scores, stride);
    case Element::int8:
      return kernels_.score_int8(at, queries, reinterpret_cast<const int8_t*>(keys),
                                 cache.key_scales(layer, head, block), scores, stride);
    case Element::bf16:
    case Element::coded:
      return kernels_.score_bf16(at, queries, reinterpret_cast<const uint16_t*>(keys), scores, stride);
  }
}

/// Adds a block's values, by their weights, to out.
void Forward::mix(const AttentionRows& at, const Cache& cache, size_t layer, int64_t head, int64_t block,
                  const float* weights, int64_t stride, float* out) const {
  const std::byte* const values = cache.values(layer, head, block);
  switch (cache.element()) {
    case Element::fp32:
      return kernels_.mix_fp32(at, weights, stride, reinterpret_cast<const float*>(values), out,
                               at.value_stride);
    case Element::int8:
      return kernels_.mix_int8(at, weights, stride, reinterpret_cast<const int8_t*>(values),
                               cache.value_scales(layer, head, block), out, at.value_stride);
    case Element::bf16:
    case Element::coded:
      return kernels_.mix_bf16(at, weights, stride, reinterpret_cast<const uint16_t*>(values), out,
                               at.value_stride);
  }
}

void Forward::rotate(size_t layer, int64_t row, float* head) const {
  if (!spec_.layers[layer].attention.rope) return;
  const Angles& angles = angles_[angles_of_layer_[layer]];
  const auto n = static_cast<int64_t>(angles.rope->frequencies.size());
  const float* const cosines = angles.cosines.data() + row * n;
  const float* const sines = angles.sines.data() + row * n;
  for (int64_t i = 0; i < n; ++i) {
    const float a = head[i], b = head[i + n];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + n] = b * cosines[i] + a * sines[i];
  }
}

// Feed-forward.

/// False: a part could not be had.
bool Forward::feed_forward(int thread, size_t layer) {
  const Layer& spec = spec_.layers[layer];
  const LayerWeights& weights = weights_.layers[layer];
  Own& mine = owns_[static_cast<size_t>(thread)];
  norm_rows(mine, spec.feed_forward_norm, weights.feed_forward_norm);
  Block& to = spec.after_feed_forward ? branch_ : x_;
  if (spec.after_feed_forward) {
    const PanelRange range = own_panels(panels_of(spec_.hidden), thread, team_.size());
    for (int64_t r = 0; r < count(); ++r)
      std::fill(to.at(r) + range.first * kPanelRows, to.at(r) + range.last * kPanelRows, 0.0f);
  }
  const bool is_mixture = std::holds_alternative<Mixture>(spec.feed_forward);
  if (!(is_mixture ? mixture(thread, layer, to) : dense(thread, layer, to))) return false;
  team_.barrier();
  if (!spec.after_feed_forward) return true;
  add_normed(thread, *spec.after_feed_forward, weights.after_feed_forward);
  team_.barrier();
  return true;
}

bool Forward::dense(int thread, size_t layer, Block& to) {
  const Dense& spec = std::get<Dense>(spec_.layers[layer].feed_forward);
  const DenseWeights& weights = std::get<DenseWeights>(weights_.layers[layer].feed_forward);
  Operand& input = owns_[static_cast<size_t>(thread)].input;
  if (!begin(thread, layer, Part::up)) return false;
  multiply_own(thread, weights.up, weights.up_bias, input, count(), up_, 0);
  end(thread, layer, Part::up);
  if (!begin(thread, layer, Part::gate)) return false;
  gate(thread, spec, weights, input, count(), 0);
  end(thread, layer, Part::gate);
  team_.barrier();
  if (!begin(thread, layer, Part::down)) return false;
  add_own(thread, weights.down, weights.down_bias, inner_, to);
  end(thread, layer, Part::down);
  return true;
}

/// The thread's columns of act(up x), or of act(gate x) * up x, for `vectors` of `x`, where up x is in up_
/// from `first`; to inner_ from `first`.
void Forward::gate(int thread, const Dense& spec, const DenseWeights& weights, Operand& x, int64_t vectors,
                   int64_t first) {
  const PanelRange range = own(thread, weights.up);
  Own& mine = owns_[static_cast<size_t>(thread)];
  for (int64_t panel = range.first; panel < range.last; ++panel) {
    const int64_t column = panel * kPanelRows, n = std::min(kPanelRows, weights.up.rows - column);
    if (weights.gate) multiply(*weights.gate, panel, x, 0, vectors, mine.panel.at(0), mine.panel.stride());
    for (int64_t v = 0; v < vectors; ++v) {
      float* const up = up_.at(first + v) + column;
      float* const activated = weights.gate ? mine.panel.at(v) : up;
      activate(spec, activated, weights.gate ? up : nullptr, n);
      std::copy_n(activated, n, inner_.values(first + v) + column);
      kernels_.narrow(activated, inner_.narrow(first + v) + column, n);
    }
  }
}

void Forward::activate(const Dense& spec, float* x, const float* up, int64_t n) const {
  switch (spec.activation) {
    case Activation::silu:
      return kernels_.silu(x, up, n);
    case Activation::gelu_tanh:
      return kernels_.gelu_tanh(x, up, n);
    case Activation::gelu:
      for (int64_t i = 0; i < n; ++i)
        x[i] = 0.5f * x[i] * (1 + std::erf(x[i] * 0.70710678f)) * (up == nullptr ? 1 : up[i]);
  }
}

bool Forward::mixture(int thread, size_t layer, Block& to) {
  Own& mine = owns_[static_cast<size_t>(thread)];
  route(mine, std::get<Mixture>(spec_.layers[layer].feed_forward),
        std::get<MixtureWeights>(weights_.layers[layer].feed_forward));
  ExpertStore* const store = weights_.experts.get();
  if (store == nullptr) {
    experts(thread, layer, 0, mine.sent.size(), to);
    return true;
  }
  // One expert at a time, since not all that are wanted may find room together.
  mine.order.clear();
  for (const Sent& sent : mine.sent) {
    if (mine.order.empty() || mine.order.back() != sent.expert) mine.order.push_back(sent.expert);
  }
  store->want(thread, layer, mine.order);
  for (size_t first = 0, last = 0; first < mine.sent.size(); first = last) {
    const int32_t expert = mine.sent[first].expert;
    while (last < mine.sent.size() && mine.sent[last].expert == expert) ++last;
    if (!store->acquire(thread, layer, expert)) return false;
    experts(thread, layer, first, last, to);
    store->release(thread);
  }
  return true;
}

/// Adds to `to` what experts give for the rows in `sent` from first to last, which are all of these experts'
/// rows.
void Forward::experts(int thread, size_t layer, size_t first, size_t last, Block& to) {
  const Mixture& spec = std::get<Mixture>(spec_.layers[layer].feed_forward);
  const MixtureWeights& weights = std::get<MixtureWeights>(weights_.layers[layer].feed_forward);
  Own& mine = owns_[static_cast<size_t>(thread)];
  const auto for_each_expert = [&](auto body) {
    for (size_t i = first; i < last;) {
      size_t end = i;
      while (end < last && mine.sent[end].expert == mine.sent[i].expert) ++end;
      body(static_cast<size_t>(mine.sent[i].expert), i, end);
      i = end;
    }
  };
  for_each_expert([&](size_t expert, size_t begin, size_t end) {
    const auto vectors = static_cast<int64_t>(end - begin);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t row = mine.sent[begin + static_cast<size_t>(v)].row;
      std::copy_n(mine.input.values(row), spec_.hidden, mine.gathered.values(v));
      std::copy_n(mine.input.narrow(row), spec_.hidden, mine.gathered.narrow(v));
    }
    const auto at = static_cast<int64_t>(begin);
    const DenseWeights& chosen = weights.experts[expert];
    multiply_own(thread, chosen.up, chosen.up_bias, mine.gathered, vectors, up_, at);
    gate(thread, spec.experts[expert], chosen, mine.gathered, vectors, at);
  });
  team_.barrier();
  for_each_expert([&](size_t expert, size_t begin, size_t end) {
    const Matrix& down = weights.experts[expert].down;
    const PanelRange range = own(thread, down);
    for (int64_t panel = range.first; panel < range.last; ++panel) {
      const int64_t column = panel * kPanelRows;
      multiply(down, panel, inner_, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin),
               mine.panel.at(0), mine.panel.stride());
      for (size_t i = begin; i < end; ++i) {
        const float* const product = mine.panel.at(static_cast<int64_t>(i - begin));
        float* const x = to.at(mine.sent[i].row) + column;
        for (int64_t c = 0; c < kPanelRows; ++c) x[c] += mine.sent[i].weight * product[c];
      }
    }
  });
}

/// Every thread decides for itself, and all decide the same: a router is small, and a barrier costs more.
void Forward::route(Own& mine, const Mixture& spec, const MixtureWeights& weights) {
  for (int64_t panel = 0; panel < weights.router.panels(); ++panel)
    multiply(weights.router, panel, mine.input, 0, count(), mine.router.at(0) + panel * kPanelRows,
             mine.router.stride());
  const int64_t experts = weights.router.rows;
  mine.sent.clear();
  for (int64_t r = 0; r < count(); ++r) {
    float* const scores = mine.router.at(r);
    kernels_.softmax(scores, 0, 0, experts, round_up(experts, kKeyBlock), 1, 0);
    mine.order.resize(static_cast<size_t>(experts));
    std::iota(mine.order.begin(), mine.order.end(), 0);
    const auto middle = mine.order.begin() + spec.chosen;
    // Of equal scores the first expert's counts for more, as in torch.topk on the CPU.
    std::partial_sort(mine.order.begin(), middle, mine.order.end(), [&](int32_t a, int32_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    float total = 0;
    for (auto it = mine.order.begin(); it != middle; ++it) total += scores[*it];
    for (auto it = mine.order.begin(); it != middle; ++it)
      mine.sent.push_back(
          {*it, static_cast<int32_t>(r), spec.normalised ? scores[*it] / total : scores[*it]});
  }
  std::ranges::sort(mine.sent, {}, [](const Sent& sent) { return std::pair(sent.expert, sent.row); });
}

void Forward::head(int thread) {
  Own& mine = owns_[static_cast<size_t>(thread)];
  const auto vectors = static_cast<int64_t>(wanted_.size());
  if (vectors == 0) return;
  for (int64_t v = 0; v < vectors; ++v) {
    normalise(spec_.final_norm, weights_.final_norm, x_.at(wanted_[static_cast<size_t>(v)]),
              mine.input.values(v), spec_.hidden);
    kernels_.narrow(mine.input.values(v), mine.input.narrow(v), spec_.hidden);
  }
  multiply_own(thread, weights_.head, {}, mine.input, vectors, logits_, 0);
  if (!spec_.logit_softcap) return;
  const PanelRange range = own(thread, weights_.head);
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t i = range.first * kPanelRows; i < range.last * kPanelRows; ++i)
      logits_.at(v)[i] = *spec_.logit_softcap * std::tanh(logits_.at(v)[i] / *spec_.logit_softcap);
  }
}

// What the parts share.

void Forward::normalise(const Norm& norm, const NormWeights& weights, const float* x, float* to,
                        int64_t n) const {
  const auto count = static_cast<float>(n);
  const float* const bias = weights.bias.empty() ? nullptr : weights.bias.data();
  if (norm.kind == Norm::Kind::root_mean_square) {
    const float factor = 1 / std::sqrt(kernels_.sum_of_squares(x, n) / count + norm.epsilon);
    return kernels_.normalise(x, 0, factor, weights.weight.data(), norm.weight_offset, bias, to, n);
  }
  const float mean = kernels_.sum(x, n) / count;
  float squares = 0;  // around the mean, since E(x^2) - mean^2 cancels
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float factor = 1 / std::sqrt(squares / count + norm.epsilon);
  kernels_.normalise(x, mean, factor, weights.weight.data(), norm.weight_offset, bias, to, n);
}

/// The residual stream, normed, as the thread's input: each thread does all rows, which costs less than to
/// wait for another one's.
void Forward::norm_rows(Own& own, const Norm& norm, const NormWeights& weights) {
  for (int64_t r = 0; r < count(); ++r) {
    normalise(norm, weights, x_.at(r), own.input.values(r), spec_.hidden);
    kernels_.narrow(own.input.values(r), own.input.narrow(r), spec_.hidden);
  }
}

/// x += norm(branch), a row a thread.
void Forward::add_normed(int thread, const Norm& norm, const NormWeights& weights) {
  for (int64_t r = thread; r < count(); r += team_.size()) {
    normalise(norm, weights, branch_.at(r), branch_.at(r), spec_.hidden);
    kernels_.add(branch_.at(r), x_.at(r), spec_.hidden);
  }
}

/// out[v] = 64 rows of the matrix times vector first + v of x.
void Forward::multiply(const Matrix& matrix, int64_t panel, Operand& x, int64_t first, int64_t vectors,
                       float* out, int64_t out_stride) const {
  const std::byte* const weights = matrix.panel(panel);
  const int64_t even = round_up(matrix.columns, 2);
  switch (matrix.element) {
    case Element::fp32:
      return kernels_.multiply_fp32(reinterpret_cast<const float*>(weights), x.values(first), x.stride(),
                                    matrix.columns, out, out_stride, vectors);
    case Element::bf16:
      return kernels_.multiply_bf16(reinterpret_cast<const uint16_t*>(weights), x.narrow(first), x.stride(),
                                    even, out, out_stride, vectors);
    case Element::coded:
      return kernels_.multiply_coded(weights, x.narrow(first), x.stride(), even, out, out_stride, vectors);
    case Element::int8:
      return kernels_.multiply_int8(weights, x.narrow(first), x.stride(), even, out, out_stride, vectors);
  }
}

/// The thread's rows of matrix times x, plus bias; out from vector `first` on.
void Forward::multiply_own(int thread, const Matrix& matrix, std::span<const float> bias, Operand& x,
                           int64_t vectors, Block& out, int64_t first) const {
  const PanelRange range = own(thread, matrix);
  for (int64_t panel = range.first; panel < range.last; ++panel) {
    const int64_t column = panel * kPanelRows;
    multiply(matrix, panel, x, 0, vectors, out.at(first) + column, out.stride());
    if (bias.empty()) continue;
    for (int64_t v = 0; v < vectors; ++v)
      kernels_.add(bias.data() + column, out.at(first + v) + column,
                   std::min(kPanelRows, matrix.rows - column));
  }
}

/// to += matrix times x plus bias, the thread's columns of it, for every row.
void Forward::add_own(int thread, const Matrix& matrix, std::span<const float> bias, Operand& x, Block& to) {
  const PanelRange range = own(thread, matrix);
  Own& mine = owns_[static_cast<size_t>(thread)];
  for (int64_t panel = range.first; panel < range.last; ++panel) {
    const int64_t column = panel * kPanelRows, n = std::min(kPanelRows, matrix.rows - column);
    multiply(matrix, panel, x, 0, count(), mine.panel.at(0), mine.panel.stride());
    for (int64_t v = 0; v < count(); ++v) {
      if (!bias.empty()) kernels_.add(bias.data() + column, mine.panel.at(v), n);
      kernels_.add(mine.panel.at(v), to.at(v) + column, n);
    }
  }
}

}  // namespace overspill::inference
