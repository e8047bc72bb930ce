#include "inference/run/forward.h"

#include <algorithm>
#include <cmath>
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
