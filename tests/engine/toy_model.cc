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

std::vector<float> leased_weights(const engine::Engine& engine, const engine::Lease& lease, int u, int s) {
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

optim::AdamConfig toy_group(int group, int step) {
  optim::AdamConfig config;
  config.lr = 1e-2 / (1 + step);
  config.weight_decay = group == 0 ? 0.1 : 0.0;
  config.decoupled = group == 0;
  return config;
}

void toy_load(engine::Engine& engine) {
  const auto units = toy_units();
  for (size_t u = 0; u < units.size(); ++u) {
    for (size_t s = 0; s < units[u].segments.size(); ++s) {
      std::vector<float> weights(static_cast<size_t>(elements_of(units[u].segments[s])));
      for (size_t i = 0; i < weights.size(); ++i)
        weights[i] = toy_initial(static_cast<int>(u), static_cast<int>(s), static_cast<int64_t>(i));
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

ToyStep toy_step(engine::Engine& engine, int step, int micro_batches, int rank) {
  const auto units = static_cast<int>(engine.layout().units.size());
  ToyStep out;
  std::vector<optim::AdamConfig> groups;
  for (int g = 0; g < kToyGroups; ++g) groups.push_back(toy_group(g, step));
  engine.expect_step(groups);
  for (int micro = 0; micro < micro_batches; ++micro) {
    engine.begin_pass({true, true});
    for (int u = 0; u < units; ++u) {
      const engine::Lease lease = engine.acquire(u);
      for (size_t s = 0; s < engine.layout().units[u].segments.size(); ++s) {
        for (float w : leased_weights(engine, lease, u, static_cast<int>(s))) out.loss += w * w;
      }
    }
    for (int u = units - 1; u >= 0; --u) {
      const engine::Lease lease = engine.acquire(u);
      const engine::Unit& unit = engine.layout().units[u];
      for (int s = static_cast<int>(unit.segments.size()) - 1; unit.trainable() && s >= 0; --s) {
        if (toy_skips(u, s, step, rank)) continue;
        const auto bytes =
            gradient_bytes(unit.format, leased_weights(engine, lease, u, s), u, s, step, micro, rank);
        engine.add_gradient(u, s, bytes, unit.dtype);
      }
    }
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
                                      int micro_batches, int world) {
  std::vector<float> sum(seen.size());
  bool present = false;
  for (int rank = 0; rank < world; ++rank) {
    if (toy_skips(u, s, step, rank)) continue;
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

std::vector<float> toy_reference(int steps, int micro_batches, const std::vector<engine::StepResult>& results,
                                 int world) {
  const auto units = toy_units();
  std::vector<float> out;
  for (size_t u = 0; u < units.size(); ++u) {
    for (size_t s = 0; s < units[u].segments.size(); ++s) {
      const int64_t n = elements_of(units[u].segments[s]);
      const Format format = units[u].format;
      const auto ui = static_cast<int>(u);
      const auto si = static_cast<int>(s);
      std::vector<float> p(static_cast<size_t>(n)), m(p.size()), v(p.size()), seen(p.size());
      for (int64_t i = 0; i < n; ++i) p[i] = toy_initial(ui, si, i);
      std::vector<uint16_t> hi(p.size());
      std::vector<int16_t> lo(p.size());
      std::vector<uint32_t> bits(p.size());
      std::memcpy(bits.data(), p.data(), p.size() * 4);
      reference_split(bits.data(), hi.data(), lo.data(), n);
      int64_t count = 0;
      for (int step = 0; step < steps && format != Format::frozen; ++step) {
        for (int64_t i = 0; i < n; ++i) seen[i] = format == Format::bf16_split ? widen(hi[i]) : p[i];
        const std::vector<float> gradient =
            reference_gradient(format, seen, ui, si, step, micro_batches, world);
        if (gradient.empty()) continue;
        const optim::AdamConfig c = toy_group(static_cast<int>(units[u].segments[s].group), step);
        ++count;
        const int decoupled = c.decoupled ? 1 : 0;
        if (format == Format::bf16_split) {
          reference_adam_split(hi.data(), lo.data(), m.data(), v.data(), gradient.data(), 0, n, c.lr, c.beta1,
                               c.beta2, c.eps, c.weight_decay, decoupled, count, results[step].clip);
        } else {
          reference_adam_fp32(p.data(), m.data(), v.data(), gradient.data(), n, c.lr, c.beta1, c.beta2, c.eps,
                              c.weight_decay, decoupled, count, results[step].clip);
        }
      }
      if (format == Format::bf16_split) {
        reference_join(hi.data(), lo.data(), bits.data(), n);
        std::memcpy(p.data(), bits.data(), p.size() * 4);
      }
      out.insert(out.end(), p.begin(), p.end());
      if (format == Format::frozen) continue;
      out.insert(out.end(), m.begin(), m.end());
      out.insert(out.end(), v.begin(), v.end());
    }
  }
  return out;
}

}  // namespace overspill::testing
