#include "tests/engine/toy_model.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <variant>

#include "kernels/cuda/cuda_device.h"
#include "tests/reference/hyper.h"
#include "tests/reference/update.h"

namespace overspill::testing {
namespace {

using optim::Format;

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

int64_t elements_of(const engine::SegmentSpec& segment) {
  int64_t n = 1;
  for (int64_t extent : segment.shape) n *= extent;
  return n;
}

int64_t width_of(std::string_view dtype) {
  return dtype == "F32" ? 4 : 2;
}

std::string_view dtype_of(engine::UnitFormat format) {
  return format == Format::fp16                                ? "F16"
         : format == Format::fp32 || format == engine::kFrozen ? "F32"
                                                               : "BF16";
}

}  // namespace

std::vector<std::byte> toy_gradient_bytes(std::string_view dtype, const std::vector<float>& weights, int u,
                                          int s, int step, int micro, int rank) {
  const auto width = static_cast<size_t>(width_of(dtype));
  const bool is_half = dtype == "F16";
  std::vector<std::byte> out(weights.size() * width);
  for (size_t i = 0; i < weights.size(); ++i) {
    const float g = toy_gradient(weights[i], u, s, static_cast<int64_t>(i), step, micro, rank);
    const uint16_t narrow = is_half ? reference_narrow_half(g) : reference_narrow(g);
    std::memcpy(out.data() + i * width, width == 4 ? static_cast<const void*>(&g) : &narrow, width);
  }
  return out;
}

std::vector<float> toy_widened(std::string_view dtype, const std::byte* data, size_t count) {
  const bool is_half = dtype == "F16", is_fp32 = dtype == "F32";
  std::vector<float> out(count);
  for (size_t i = 0; i < count; ++i) {
    uint16_t narrow = 0;
    if (is_fp32) {
      std::memcpy(&out[i], data + i * 4, 4);
    } else {
      std::memcpy(&narrow, data + i * 2, 2);
      out[i] = is_half ? reference_widen_half(narrow) : reference_widen(narrow);
    }
  }
  return out;
}

const char* placement_name(engine::Placement placement) {
  static constexpr const char* kNames[] = {"automatic", "host", "half", "nvme", "device"};
  return kNames[static_cast<size_t>(placement)];
}

std::vector<engine::UnitSpec> toy_units(const ToyKind& kind) {
  std::vector<engine::UnitSpec> units = {
      {"embed", Format::exact, "BF16", {{"embed.weight", {97, 64}, 0, {}}, {"embed.scale", {3}, 1, {}}}},
      {"block0",
       Format::exact,
       "BF16",
       {{"block0.a", {64, 64}, 0, {}}, {"block0.b", {64}, 1, {}}, {"block0.c", {130, 64}, 0, {}}}},
      {"router", Format::fp32, "F32", {{"router.weight", {8, 33}, 0, {}}}},
      {"frozen", engine::kFrozen, "F32", {{"frozen.weight", {500}, 0, {}}}},
      {"block1",
       Format::exact,
       "BF16",
       {{"block1.a", {64, 64}, 0, {}}, {"block1.b", {64}, 1, {}}, {"block1.c", {130, 64}, 0, {}}}},
      {"head", Format::fp32, "F32", {{"head.weight", {5000}, 0, {}}, {"head.bias", {1}, 1, {}}}},
  };
  for (engine::UnitSpec& unit : units) {
    unit.optimizer = kind.optimizer;
    if (!unit.format || !kind.format) continue;
    unit.format = kind.format;
    unit.dtype = engine::weights_dtype(kind.format);
  }
  return units;
}

std::vector<std::string> toy_devices() {
  std::vector<std::string> names = {"host", "simulated"};
  if (kernels::why_no_cuda().empty()) names.emplace_back("cuda");
  return names;
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

namespace {

// What Adagrad starts with. In 8 bits both are (w - 1) S with w = 2^15 and S = 2^-18, in bf16 both are 0.125.
constexpr float kSums[kToyGroups] = {0.125F, 32767 * 0x1p-18F};

}  // namespace

std::vector<optim::Hyper> toy_groups(int step, optim::Optimizer optimizer) {
  std::vector<optim::Hyper> groups;
  for (int g = 0; g < kToyGroups; ++g) {
    const bool first = g == 0;
    const double lr = 1e-2 / (1 + step);
    const double decay = first ? 0.1 : 0.0;
    const std::string name(optim::name(optimizer));
    if (name == "adam") {
      groups.emplace_back(toy_group(g, step));
    } else if (name == "adagrad") {
      groups.emplace_back(optim::AdagradConfig{.lr = lr,
                                               .lr_decay = first ? 0.2 : 0.0,
                                               .weight_decay = decay,
                                               .initial_accumulator_value = kSums[g],
                                               .maximize = !first});
    } else if (name == "lion") {
      groups.emplace_back(optim::LionConfig{.lr = lr, .weight_decay = decay, .maximize = !first});
    } else if (name == "momentum") {
      groups.emplace_back(optim::MomentumConfig{.lr = lr,
                                                .momentum = first ? 0.9 : 0.5,
                                                .dampening = first ? 0.0 : 0.3,
                                                .weight_decay = decay,
                                                .nesterov = first,
                                                .maximize = !first});
    } else if (name == "rmsprop") {
      groups.emplace_back(optim::RmspropConfig{
          .lr = lr, .alpha = first ? 0.99 : 0.9, .weight_decay = decay, .maximize = !first});
    } else if (name == "rmsprop_momentum") {
      groups.emplace_back(optim::RmspropMomentumConfig{
          .lr = lr, .weight_decay = decay, .momentum = first ? 0.9 : 0.0, .maximize = !first});
    } else if (name == "nadam") {
      groups.emplace_back(optim::NadamConfig{
          .lr = lr, .weight_decay = decay, .decoupled_weight_decay = first, .maximize = !first});
    } else if (name == "adamax") {
      groups.emplace_back(optim::AdamaxConfig{.lr = lr, .weight_decay = decay, .maximize = !first});
    } else if (name == "adadelta") {
      groups.emplace_back(optim::AdadeltaConfig{.lr = 50 * lr, .weight_decay = decay, .maximize = !first});
    } else {
      groups.emplace_back(optim::SgdConfig{.lr = lr, .weight_decay = decay, .maximize = !first});
    }
  }
  return groups;
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
  engine.start_states(toy_groups(0, units[0].optimizer));
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
  std::vector<std::byte> bytes(static_cast<size_t>(segment.elements * unit.element_bytes));
  lease.copy_to_host(segment.begin * unit.element_bytes, bytes);
  return toy_widened(unit.dtype, bytes.data(), static_cast<size_t>(segment.elements));
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
  if (!toy_skips(unit, segment, step, rank))
    toy_add_gradient_always(engine, seen, unit, segment, step, micro, rank);
}

void toy_add_gradient_always(engine::Engine& engine, const std::vector<float>& seen, int unit, int segment,
                             int step, int micro, int rank) {
  const engine::Unit& u = engine.layout().units[unit];
  engine.add_gradient(unit, segment, toy_gradient_bytes(u.dtype, seen, unit, segment, step, micro, rank),
                      u.dtype);
}

void toy_backward(engine::Engine& engine, const engine::Lease& lease, int unit, int step, int micro,
                  int rank) {
  const engine::Unit& u = engine.layout().units[unit];
  for (int s = static_cast<int>(u.segments.size()) - 1; u.trainable() && s >= 0; --s)
    toy_add_gradient(engine, toy_leased(engine, lease, unit, s), unit, s, step, micro, rank);
}

ToyStep toy_step(engine::Engine& engine, int step, int micro_batches, int rank) {
  const auto units = static_cast<int>(engine.layout().units.size());
  ToyStep out;
  const std::vector<optim::Hyper> groups = toy_groups(step, engine.layout().units[0].optimizer);
  engine.expect_step(groups);
  for (int micro = 0; micro < micro_batches; ++micro) {
    engine.begin_pass({true, true});
    for (int u = 0; u < units; ++u) out.loss += toy_forward(engine, engine.acquire(u), u);
    for (int u = units - 1; u >= 0; --u) toy_backward(engine, engine.acquire(u), u, step, micro, rank);
  }
  out.result = engine.step(groups);
  return out;
}

ToyStep toy_step_together(engine::Engine& engine, int step, int micro_batches, int rank) {
  const auto units = static_cast<int>(engine.layout().units.size());
  ToyStep out;
  const std::vector<optim::Hyper> groups = toy_groups(step, engine.layout().units[0].optimizer);
  engine.begin_pass({true, true});
  for (int u = 0; u < units; ++u) {
    const engine::Lease lease = engine.acquire(u);
    for (int micro = 0; micro < micro_batches; ++micro) out.loss += toy_forward(engine, lease, u);
  }
  for (int u = units - 1; u >= 0; --u) {
    const engine::Lease lease = engine.acquire(u);
    for (int micro = 0; micro < micro_batches; ++micro) toy_backward(engine, lease, u, step, micro, rank);
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
      for (const optim::ComponentSpec& spec : unit.components()) {
        if (spec.role != optim::Role::state) continue;
        engine.read_state(index, segment, spec.name, values);
        out.insert(out.end(), values.begin(), values.end());
      }
    }
  }
  return out;
}

namespace {

/// The gradient that the update sees: micro-batches added in fp32, ranks added in rank order and averaged, as
/// the engine stores it (narrow with one micro-batch), widened to fp32. Empty when no rank has one.
std::vector<float> reference_gradient(std::string_view dtype, const std::vector<float>& seen, int u, int s,
                                      int step, int micro_batches, const ToyReference::Absent& absent,
                                      int world) {
  std::vector<float> sum(seen.size());
  bool present = false;
  for (int rank = 0; rank < world; ++rank) {
    if (absent(u, s, rank)) continue;
    std::vector<float> own(seen.size());
    for (int micro = 0; micro < micro_batches; ++micro) {
      const auto bytes = toy_gradient_bytes(dtype, seen, u, s, step, micro, rank);
      const auto g = toy_widened(dtype, bytes.data(), seen.size());
      for (size_t i = 0; i < seen.size(); ++i) own[i] = micro == 0 ? g[i] : own[i] + g[i];
    }
    for (size_t i = 0; i < seen.size(); ++i) sum[i] += own[i];
    present = true;
  }
  if (!present) return {};
  if (world == 1) return sum;
  const bool is_narrow = micro_batches == 1 && dtype != "F32", is_half = dtype == "F16";
  for (float& g : sum) {
    g *= 1.0F / static_cast<float>(world);
    if (!is_narrow) continue;
    g = is_half ? reference_widen_half(reference_narrow_half(g)) : reference_widen(reference_narrow(g));
  }
  return sum;
}

template <class T>
T& at(std::vector<uint8_t>& bytes, int64_t i) {
  return reinterpret_cast<T*>(bytes.data())[i];
}
template <class T>
const T& at(const std::vector<uint8_t>& bytes, int64_t i) {
  return reinterpret_cast<const T*>(bytes.data())[i];
}

bool maximizes(const optim::Hyper& hyper) {
  return std::visit([](const auto& config) { return config.maximize; }, hyper);
}

}  // namespace

ToyReference::ToyReference(const std::vector<engine::UnitSpec>& units, uint64_t rounding_seed) {
  const engine::Layout layout = engine::make_layout(units, int64_t{1} << 20, 0, 1);
  for (size_t u = 0; u < units.size(); ++u) {
    std::vector<State>& segments = units_.emplace_back();
    for (size_t s = 0; s < units[u].segments.size(); ++s) {
      const auto n = elements_of(units[u].segments[s]);
      State& state = segments.emplace_back();
      state.optimizer = units[u].optimizer;
      state.format = units[u].format;
      state.group = static_cast<int>(units[u].segments[s].group);
      state.elements = n;
      state.seed = rounding_seed * 1'000'003 + u;
      state.index = layout.units[u].segments[s].begin;
      if (state.format == engine::kFrozen) {
        state.components.emplace_back(n * 4);
      } else {
        for (const auto& spec : optim::components(state.optimizer, *units[u].format))
          state.components.emplace_back(spec.bytes(n));
      }
      const auto ui = static_cast<int>(u);
      const auto si = static_cast<int>(s);
      assign(ui, si, initial_weights(ui, si, n));
      const auto groups = toy_groups(0, state.optimizer);
      const auto* adagrad = std::get_if<optim::AdagradConfig>(&groups[state.group]);
      if (adagrad == nullptr || state.format == engine::kFrozen) continue;
      const auto initial = static_cast<float>(adagrad->initial_accumulator_value);
      for (int64_t i = 0; i < n; ++i) {
        auto& sum = state.components.back();
        if (state.format == Format::compact) {
          at<uint16_t>(sum, i) = reference_narrow(initial);
        } else if (state.format == Format::eight_bit) {
          sum[i] = 15 * 16;
          sum[n + i / 64] = 127 - 18;
        } else {
          at<float>(sum, i) = initial;
        }
      }
    }
  }
}

size_t ToyReference::State::states() const {
  return format == engine::kFrozen ? 0 : components.size() - (format == Format::fp32 ? 1 : 2);
}

float ToyReference::State::weight(int64_t i) const {
  if (format == Format::fp32 || format == engine::kFrozen) return at<float>(components[0], i);
  if (format == Format::fp16) return at<float>(components[1], i);
  const auto lo = format == Format::eight_bit ? static_cast<int16_t>(at<int8_t>(components[1], i) * 256)
                                              : at<int16_t>(components[1], i);
  uint32_t bits = 0;
  reference_join(&at<uint16_t>(components[0], i), &lo, &bits, 1);
  return std::bit_cast<float>(bits);
}

float ToyReference::State::state(int number, int64_t i) const {
  const auto& bytes = components[number + (format == Format::fp32 ? 1 : 2)];
  if (format == Format::compact) return reference_widen(at<uint16_t>(bytes, i));
  if (format != Format::eight_bit) return at<float>(bytes, i);
  const int is_signed = reference_is_signed(std::string(optim::name(optimizer)).c_str(), number);
  return reference_decode(bytes[i], bytes[elements + i / 64], is_signed);
}

void ToyReference::assign(int unit, int segment, const std::vector<float>& weights) {
  State& state = units_[unit][segment];
  for (int64_t i = 0; i < state.elements; ++i) {
    if (state.format == Format::fp32 || state.format == engine::kFrozen) {
      at<float>(state.components[0], i) = weights[i];
    } else if (state.format == Format::fp16) {
      at<uint16_t>(state.components[0], i) = reference_narrow_half(weights[i]);
      at<float>(state.components[1], i) = weights[i];
    } else {
      auto bits = std::bit_cast<uint32_t>(weights[i]);
      if (state.format == Format::eight_bit) bits = (bits + 128) / 256 * 256;
      uint16_t hi = 0;
      int16_t lo = 0;
      reference_split(&bits, &hi, &lo, 1);
      at<uint16_t>(state.components[0], i) = hi;
      if (state.format == Format::eight_bit) {
        at<int8_t>(state.components[1], i) = static_cast<int8_t>(lo / 256);
      } else {
        at<int16_t>(state.components[1], i) = lo;
      }
    }
  }
}

std::vector<float> ToyReference::seen(int unit, int segment) const {
  const State& state = units_[unit][segment];
  return toy_widened(dtype_of(state.format), reinterpret_cast<const std::byte*>(state.components[0].data()),
                     static_cast<size_t>(state.elements));
}

std::vector<float> ToyReference::gradient(int unit, int segment, int step, int micro_batches,
                                          const Absent& absent, int world) const {
  return reference_gradient(dtype_of(units_[unit][segment].format), seen(unit, segment), unit, segment, step,
                            micro_batches, absent, world);
}

void ToyReference::advance(int step, int micro_batches, double clip, const Absent& absent, int world) {
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t s = 0; s < units_[u].size(); ++s) {
      State& state = units_[u][s];
      if (state.format == engine::kFrozen) continue;
      const auto ui = static_cast<int>(u);
      const auto si = static_cast<int>(s);
      const std::vector<float> gradient = this->gradient(ui, si, step, micro_batches, absent, world);
      if (gradient.empty()) continue;
      const optim::Hyper hyper = toy_groups(step, state.optimizer)[state.group];
      std::vector<void*> components;
      for (size_t c = 0; c < state.components.size(); ++c) components.push_back(state.data(c));
      ++state.steps;
      const std::string name(optim::name(state.optimizer)), format(engine::format_name(state.format));
      if (reference_update(name.c_str(), format.c_str(), components.data(), "fp32", gradient.data(),
                           state.elements, 0, state.elements, reference::hyper_of(hyper).data(), state.steps,
                           maximizes(hyper) ? -clip : clip, state.seed, state.index) != 1) {
        throw std::logic_error(fmt::format("the reference does not know {} in {}", name, format));
      }
    }
  }
}

std::vector<float> ToyReference::contents() const {
  std::vector<float> out;
  for (const auto& unit : units_) {
    for (const State& state : unit) {
      for (int64_t i = 0; i < state.elements; ++i) out.push_back(state.weight(i));
      for (size_t k = 0; k < state.states(); ++k) {
        for (int64_t i = 0; i < state.elements; ++i) out.push_back(state.state(static_cast<int>(k), i));
      }
    }
  }
  return out;
}

std::vector<float> toy_reference(int steps, int micro_batches, const std::vector<engine::StepResult>& results,
                                 int world, const ToyKind& kind, uint64_t rounding_seed) {
  ToyReference reference(toy_units(kind), rounding_seed);
  for (int step = 0; step < steps; ++step) {
    const auto absent = [step](int u, int s, int rank) { return toy_skips(u, s, step, rank); };
    reference.advance(step, micro_batches, results[step].clip, absent, world);
  }
  return reference.contents();
}

}  // namespace overspill::testing
