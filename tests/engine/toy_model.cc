#include "tests/engine/toy_model.h"

#include <bit>
#include <cmath>
#include <cstring>

#include "tests/reference/reference.h"

namespace overspill::testing {
namespace {

using engine::Format;

uint32_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return static_cast<uint32_t>(x >> 32);
}

float uniform(uint64_t key) {
  return static_cast<float>(mix(key)) / 4294967296.0F - 0.5F;
}

float widen(uint16_t bf16) {
  return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16);
}

int64_t elements_of(const engine::SegmentSpec& segment) {
  int64_t n = 1;
  for (int64_t extent : segment.shape) n *= extent;
  return n;
}

/// A gradient array of one segment as the framework would hand it over: bf16 for bf16 weights.
std::vector<std::byte> gradient_bytes(Format format, const std::vector<float>& weights, int u, int s,
                                      int step, int micro, int rank) {
  std::vector<std::byte> out(weights.size() * (format == Format::bf16_split ? 2 : 4));
  for (size_t i = 0; i < weights.size(); ++i) {
    const float g = toy_gradient(weights[i], u, s, static_cast<int64_t>(i), step, micro, rank);
    if (format == Format::bf16_split) {
      const uint16_t narrow = reference_narrow(g);
      std::memcpy(out.data() + i * 2, &narrow, 2);
    } else {
      std::memcpy(out.data() + i * 4, &g, 4);
    }
  }
  return out;
}

}  // namespace

std::vector<engine::UnitSpec> toy_units() {
  return {
      {"embed", Format::bf16_split, "BF16", {{"embed.weight", {97, 64}, 0, {}}, {"embed.scale", {3}, 1, {}}}},
      {"block0",
       Format::bf16_split,
       "BF16",
       {{"block0.a", {64, 64}, 0, {}}, {"block0.b", {64}, 1, {}}, {"block0.c", {130, 64}, 0, {}}}},
      {"router", Format::fp32, "F32", {{"router.weight", {8, 33}, 0, {}}}},
      {"frozen", Format::frozen, "F32", {{"frozen.weight", {500}, 0, {}}}},
      {"block1",
       Format::bf16_split,
       "BF16",
       {{"block1.a", {64, 64}, 0, {}}, {"block1.b", {64}, 1, {}}, {"block1.c", {130, 64}, 0, {}}}},
      {"head", Format::fp32, "F32", {{"head.weight", {5000}, 0, {}}, {"head.bias", {1}, 1, {}}}},
  };
}

float toy_initial(int unit, int segment, int64_t element) {
  return uniform(static_cast<uint64_t>(element) * 1000003 + static_cast<uint64_t>(unit * 131 + segment));
}

namespace {

std::vector<float> initial_weights(int unit, int segment, int64_t elements) {
  std::vector<float> weights(static_cast<size_t>(elements));
  for (int64_t i = 0; i < elements; ++i) weights[i] = toy_initial(unit, segment, i);
  return weights;
}

}  // namespace

optim::AdamConfig toy_group(int group, int step) {
  optim::AdamConfig config;
  config.lr = 1e-2 / (1 + step);
  config.weight_decay = group == 0 ? 0.1 : 0.0;
  config.decoupled = group == 0;
  return config;
}

void toy_load(engine::Engine& engine) {
  const auto& units = engine.layout().units;
  for (size_t u = 0; u < units.size(); ++u) {
    for (size_t s = 0; s < units[u].segments.size(); ++s) {
      const auto weights =
          initial_weights(static_cast<int>(u), static_cast<int>(s), units[u].segments[s].elements);
      engine.load_weight(static_cast<int32_t>(u), static_cast<int32_t>(s), std::as_bytes(std::span(weights)),
                         "F32");
    }
  }
}

float toy_gradient(float weight, int unit, int segment, int64_t element, int step, int micro, int rank) {
  const auto key = static_cast<uint64_t>(element) * 7919 +
                   static_cast<uint64_t>(((unit * 17 + segment) * 101 + step) * 13 + micro * 5 + rank);
  return 0.5F * weight + uniform(key);
}

bool toy_skips(int unit, int segment, int step, int rank) {
  if (unit == 4) return step % 3 == 1 && rank == 0;  // a whole layer, on one rank only
  return unit == 1 && segment == 1 && step % 4 == 2;
}

std::vector<float> toy_leased(const engine::Engine& engine, const engine::Lease& lease, int u, int s) {
  const engine::Unit& unit = engine.layout().units[u];
  const engine::Segment& segment = unit.segments[s];
  std::vector<float> weights(static_cast<size_t>(segment.elements));
  const std::byte* data = lease.data() + segment.begin * unit.element_bytes;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (unit.format == Format::bf16_split) {
      uint16_t hi = 0;
      std::memcpy(&hi, data + i * 2, 2);
      weights[i] = widen(hi);
    } else {
      std::memcpy(&weights[i], data + i * 4, 4);
    }
  }
  return weights;
}

double toy_forward(const engine::Engine& engine, const engine::Lease& lease, int unit) {
  double loss = 0;
  for (size_t s = 0; s < engine.layout().units[unit].segments.size(); ++s) {
    for (float w : toy_leased(engine, lease, unit, static_cast<int>(s))) loss += w * w;
  }
  return loss;
}

void toy_add_gradient(engine::Engine& engine, const std::vector<float>& seen, int unit, int segment, int step,
                      int micro, int rank) {
  if (toy_skips(unit, segment, step, rank)) return;
  const engine::Unit& u = engine.layout().units[unit];
  engine.add_gradient(unit, segment, gradient_bytes(u.format, seen, unit, segment, step, micro, rank),
                      u.dtype);
}

void toy_backward(engine::Engine& engine, const engine::Lease& lease, int unit, int step, int micro,
                  int rank) {
  const engine::Unit& u = engine.layout().units[unit];
  for (int s = static_cast<int>(u.segments.size()) - 1; u.trainable() && s >= 0; --s)
    toy_add_gradient(engine, toy_leased(engine, lease, unit, s), unit, s, step, micro, rank);
}

std::vector<optim::AdamConfig> toy_groups(int step) {
  std::vector<optim::AdamConfig> groups;
  for (int g = 0; g < kToyGroups; ++g) groups.push_back(toy_group(g, step));
  return groups;
}

ToyStep toy_step(engine::Engine& engine, int step, int micro_batches, int rank) {
  const auto units = static_cast<int>(engine.layout().units.size());
  ToyStep out;
  const std::vector<optim::AdamConfig> groups = toy_groups(step);
  engine.expect_step(groups);
  for (int micro = 0; micro < micro_batches; ++micro) {
    engine.begin_pass({true, true});
    for (int u = 0; u < units; ++u) out.loss += toy_forward(engine, engine.acquire(u), u);
    for (int u = units - 1; u >= 0; --u) toy_backward(engine, engine.acquire(u), u, step, micro, rank);
  }
  out.result = engine.step(groups);
  return out;
}

std::vector<float> toy_contents(engine::Engine& engine) {
  std::vector<float> out;
  for (size_t u = 0; u < engine.layout().units.size(); ++u) {
    const engine::Unit& unit = engine.layout().units[u];
    for (size_t s = 0; s < unit.segments.size(); ++s) {
      std::vector<float> values(static_cast<size_t>(unit.segments[s].elements));
      const auto index = static_cast<int32_t>(u);
      const auto segment = static_cast<int32_t>(s);
      engine.read_weight(index, segment, std::as_writable_bytes(std::span(values)), "F32");
      out.insert(out.end(), values.begin(), values.end());
      for (const char* state : {"m", "v"}) {
        if (!unit.trainable()) continue;
        engine.read_state(index, segment, state, values);
        out.insert(out.end(), values.begin(), values.end());
      }
    }
  }
  return out;
}

namespace {

/// The gradient that the update sees: micro-batches added in fp32, ranks added in rank order and averaged, as
/// the engine stores it (bf16 with one micro-batch), widened to fp32. Empty when no rank has one.
std::vector<float> reference_gradient(Format format, const std::vector<float>& seen, int u, int s, int step,
                                      int micro_batches, const ToyReference::Absent& absent, int world) {
  std::vector<float> sum(seen.size());
  bool present = false;
  for (int rank = 0; rank < world; ++rank) {
    if (absent(u, s, rank)) continue;
    std::vector<float> own(seen.size());
    for (int micro = 0; micro < micro_batches; ++micro) {
      const auto bytes = gradient_bytes(format, seen, u, s, step, micro, rank);
      for (size_t i = 0; i < seen.size(); ++i) {
        uint16_t narrow = 0;
        float g = 0;
        if (format == Format::bf16_split) {
          std::memcpy(&narrow, bytes.data() + i * 2, 2);
          g = widen(narrow);
        } else {
          std::memcpy(&g, bytes.data() + i * 4, 4);
        }
        own[i] = micro == 0 ? g : own[i] + g;
      }
    }
    for (size_t i = 0; i < seen.size(); ++i) sum[i] += own[i];
    present = true;
  }
  if (!present) return {};
  for (float& g : sum) {
    if (world == 1) break;
    g *= 1.0F / static_cast<float>(world);
    if (format == Format::bf16_split && micro_batches == 1) g = widen(reference_narrow(g));
  }
  return sum;
}

}  // namespace

ToyReference::ToyReference(const std::vector<engine::UnitSpec>& units) {
  for (size_t u = 0; u < units.size(); ++u) {
    std::vector<State>& segments = units_.emplace_back();
    for (size_t s = 0; s < units[u].segments.size(); ++s) {
      const auto elements = static_cast<size_t>(elements_of(units[u].segments[s]));
      State& state = segments.emplace_back();
      state.format = units[u].format;
      state.group = static_cast<int>(units[u].segments[s].group);
      state.m.resize(elements);
      state.v.resize(elements);
      const auto ui = static_cast<int>(u);
      const auto si = static_cast<int>(s);
      assign(ui, si, initial_weights(ui, si, static_cast<int64_t>(elements)));
    }
  }
}

void ToyReference::assign(int unit, int segment, const std::vector<float>& weights) {
  State& state = units_[unit][segment];
  if (state.format != Format::bf16_split) {
    state.p = weights;
    return;
  }
  std::vector<uint32_t> bits(weights.size());
  std::memcpy(bits.data(), weights.data(), bits.size() * 4);
  state.hi.resize(bits.size());
  state.lo.resize(bits.size());
  reference_split(bits.data(), state.hi.data(), state.lo.data(), static_cast<int64_t>(bits.size()));
}

std::vector<float> ToyReference::seen(int unit, int segment) const {
  const State& state = units_[unit][segment];
  if (state.format != Format::bf16_split) return state.p;
  std::vector<float> out(state.hi.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = widen(state.hi[i]);
  return out;
}

void ToyReference::advance(int step, int micro_batches, double clip, const Absent& absent, int world) {
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t s = 0; s < units_[u].size(); ++s) {
      State& state = units_[u][s];
      if (state.format == Format::frozen) continue;
      const auto ui = static_cast<int>(u);
      const auto si = static_cast<int>(s);
      const std::vector<float> gradient =
          reference_gradient(state.format, seen(ui, si), ui, si, step, micro_batches, absent, world);
      if (gradient.empty()) continue;
      const optim::AdamConfig c = toy_group(state.group, step);
      const auto n = static_cast<int64_t>(gradient.size());
      const int decoupled = c.decoupled ? 1 : 0;
      ++state.steps;
      if (state.format == Format::bf16_split) {
        reference_adam_split(state.hi.data(), state.lo.data(), state.m.data(), state.v.data(),
                             gradient.data(), 0, n, c.lr, c.beta1, c.beta2, c.eps, c.weight_decay, decoupled,
                             state.steps, clip);
      } else {
        reference_adam_fp32(state.p.data(), state.m.data(), state.v.data(), gradient.data(), n, c.lr, c.beta1,
                            c.beta2, c.eps, c.weight_decay, decoupled, state.steps, clip);
      }
    }
  }
}

std::vector<float> ToyReference::contents() const {
  std::vector<float> out;
  for (const auto& segments : units_) {
    for (const State& state : segments) {
      std::vector<float> p = state.p;
      if (state.format == Format::bf16_split) {
        std::vector<uint32_t> bits(state.hi.size());
        reference_join(state.hi.data(), state.lo.data(), bits.data(), static_cast<int64_t>(bits.size()));
        p.resize(bits.size());
        std::memcpy(p.data(), bits.data(), p.size() * 4);
      }
      out.insert(out.end(), p.begin(), p.end());
      if (state.format == Format::frozen) continue;
      out.insert(out.end(), state.m.begin(), state.m.end());
      out.insert(out.end(), state.v.begin(), state.v.end());
    }
  }
  return out;
}

std::vector<float> toy_reference(int steps, int micro_batches, const std::vector<engine::StepResult>& results,
                                 int world) {
  ToyReference reference(toy_units());
  for (int step = 0; step < steps; ++step) {
    const auto absent = [step](int u, int s, int rank) { return toy_skips(u, s, step, rank); };
    reference.advance(step, micro_batches, results[step].clip, absent, world);
  }
  return reference.contents();
}

}  // namespace overspill::testing
