#include "tests/engine/batch_model.h"

#include <fmt/format.h>

#include <cmath>
#include <random>

#include "cpu_optim/gradient.h"

namespace overspill::testing {
namespace {

/// A segment as fp32, from the leased unit.
std::vector<float> values_of(const engine::Engine& engine, const engine::Lease& lease, int unit,
                             int segment) {
  const engine::Unit& u = engine.layout().units[unit];
  const engine::Segment& s = u.segments[segment];
  std::vector<std::byte> bytes(static_cast<size_t>(s.elements * u.element_bytes));
  lease.copy_to_host(s.begin * u.element_bytes, bytes);
  const std::byte* from = bytes.data();
  std::vector<float> out(static_cast<size_t>(s.elements));
  if (u.dtype == "F32") {
    std::copy_n(reinterpret_cast<const float*>(from), s.elements, out.begin());
  } else {
    optim::widen(std::span(reinterpret_cast<const uint16_t*>(from), out.size()), std::span(out));
  }
  return out;
}

void give(engine::Engine& engine, int unit, int segment, const std::vector<float>& gradient) {
  const std::string& dtype = engine.layout().units[unit].dtype;
  if (dtype == "F32") return engine.add_gradient(unit, segment, std::as_bytes(std::span(gradient)), dtype);
  std::vector<uint16_t> narrow(gradient.size());
  optim::narrow(std::span<const float>(gradient), std::span(narrow));
  engine.add_gradient(unit, segment, std::as_bytes(std::span(narrow)), dtype);
}

std::vector<float> random_values(uint64_t seed, size_t count, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> out(count);
  for (float& value : out) value = normal(random);
  return out;
}

}  // namespace

std::vector<engine::UnitSpec> BatchModel::units() const {
  std::vector<engine::UnitSpec> out;
  for (int l = 0; l < layers; ++l) {
    const std::string name = fmt::format("layer{}", l);
    out.push_back({name,
                   format,
                   std::string(engine::weights_dtype(format)),
                   {{name + ".weight", {width, width}, 0, {}}, {name + ".bias", {width}, 0, {}}}});
  }
  return out;
}

void BatchModel::load(engine::Engine& engine) const {
  for (int l = 0; l < layers; ++l) {
    const auto weight = random_values(static_cast<uint64_t>(l) + 1, static_cast<size_t>(width) * width,
                                      1.2F / std::sqrt(static_cast<float>(width)));
    const std::vector<float> bias(static_cast<size_t>(width));
    engine.load_weight(l, 0, std::as_bytes(std::span(weight)), "F32");
    engine.load_weight(l, 1, std::as_bytes(std::span(bias)), "F32");
  }
}

double BatchModel::train(engine::Engine& engine, int step, int rank, int world,
                         const Moments& moments) const {
  const int own = batch / world;  // samples
  const auto w = static_cast<size_t>(width);
  std::vector<std::vector<float>> x(static_cast<size_t>(layers) + 1);  // by layer: own x width
  x[0] = random_values(1000 + static_cast<uint64_t>(step), static_cast<size_t>(batch) * w, 1);
  std::vector<float> wanted(static_cast<size_t>(own) * w);
  x[0] = std::vector<float>(x[0].begin() + static_cast<int64_t>(rank) * own * width,
                            x[0].begin() + static_cast<int64_t>(rank + 1) * own * width);
  for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = 0.5F * std::sin(3 * x[0][i]);

  engine.begin_pass({.training = true, .grad_enabled = true});
  for (int l = 0; l < layers; ++l) {
    moments.before_layer();
    const engine::Lease lease = engine.acquire(l);
    const auto weight = values_of(engine, lease, l, 0), bias = values_of(engine, lease, l, 1);
    x[l + 1].resize(x[l].size());
    for (int b = 0; b < own; ++b) {
      for (size_t o = 0; o < w; ++o) {
        float sum = bias[o];
        for (size_t i = 0; i < w; ++i) sum += weight[o * w + i] * x[l][b * w + i];
        x[l + 1][b * w + o] = std::tanh(sum);
      }
    }
  }
  moments.after_forward();
  double loss = 0;
  std::vector<float> slope(wanted.size());  // d (this rank's mean loss) / d x
  for (size_t i = 0; i < slope.size(); ++i) {
    const float error = x[layers][i] - wanted[i];
    loss += static_cast<double>(error) * error / (static_cast<double>(batch) * width);
    slope[i] = 2 * error / static_cast<float>(own * width);
  }
  for (int l = layers - 1; l >= 0; --l) {
    moments.before_layer();
    const engine::Lease lease = engine.acquire(l);
    const auto weight = values_of(engine, lease, l, 0);
    std::vector<float> weight_gradient(w * w), bias_gradient(w), before(slope.size());
    for (int b = 0; b < own; ++b) {
      for (size_t o = 0; o < w; ++o) {
        const float y = x[l + 1][b * w + o];
        const float g = slope[b * w + o] * (1 - y * y);
        bias_gradient[o] += g;
        for (size_t i = 0; i < w; ++i) {
          weight_gradient[o * w + i] += g * x[l][b * w + i];
          before[b * w + i] += g * weight[o * w + i];
        }
      }
    }
    give(engine, l, 1, bias_gradient);
    give(engine, l, 0, weight_gradient);
    slope = std::move(before);
  }
  const optim::Hyper group = optim::AdamConfig{.lr = 1e-3, .weight_decay = 0.01};
  engine.step(std::span(&group, 1));
  return loss;
}

}  // namespace overspill::testing
