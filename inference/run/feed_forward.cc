// The feed-forward of a forward (forward.h): dense, or a mixture of experts.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <variant>

#include "inference/run/forward.h"

namespace overspill::inference {

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

}  // namespace overspill::inference
