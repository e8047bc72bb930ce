#include "tests/cpu_optim/update_cases.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>

#include "tests/cpu_optim/guarded.h"
#include "tests/reference/hyper.h"
#include "tests/reference/update.h"

namespace overspill::optim {
namespace {

bool maximizes(const Hyper& hyper) {
  return std::visit([](const auto& c) { return c.maximize; }, hyper);
}

template <class T>
T get(const std::vector<std::byte>& bytes, int64_t i) {
  T x;
  std::memcpy(&x, bytes.data() + static_cast<size_t>(i) * sizeof(T), sizeof(T));
  return x;
}
template <class T>
void put(std::vector<std::byte>& bytes, int64_t i, T x) {
  std::memcpy(bytes.data() + static_cast<size_t>(i) * sizeof(T), &x, sizeof(T));
}

const char* element_name(Element element) {
  return element == Element::bf16 ? "bf16" : element == Element::fp16 ? "fp16" : "fp32";
}

bool is_signed(Optimizer optimizer, int state) {
  return reference_is_signed(std::string(name(optimizer)).c_str(), state) != 0;
}

}  // namespace

std::span<const Hyper> all_hypers() {
  static const std::vector<Hyper> hypers{
      AdamConfig{.weight_decay = 0.01},
      AdamConfig{.weight_decay = 0.01, .decoupled = false},
      AdamConfig{.decoupled = false, .maximize = true},
      AdagradConfig{},
      AdagradConfig{.lr_decay = 0.1, .weight_decay = 0.01, .maximize = true},
      LionConfig{},
      LionConfig{.weight_decay = 0.1, .maximize = true},
      MomentumConfig{},
      MomentumConfig{.dampening = 0.3, .weight_decay = 0.01, .maximize = true},
      MomentumConfig{.weight_decay = 0.01, .nesterov = true},
      MomentumConfig{.momentum = 0, .dampening = 0.5},
      SgdConfig{},
      SgdConfig{.weight_decay = 0.01, .maximize = true},
      RmspropConfig{},
      RmspropConfig{.alpha = 0.9, .weight_decay = 0.01, .maximize = true},
      RmspropMomentumConfig{.weight_decay = 0.01},
      RmspropMomentumConfig{.momentum = 0, .maximize = true},
      NadamConfig{.weight_decay = 0.01},
      NadamConfig{
          .weight_decay = 0.01, .momentum_decay = 0.1, .decoupled_weight_decay = true, .maximize = true},
      AdamaxConfig{},
      AdamaxConfig{.weight_decay = 0.01, .maximize = true},
      AdadeltaConfig{},
      AdadeltaConfig{.lr = 0.5, .weight_decay = 0.01, .maximize = true},
  };
  return hypers;
}

Bytes::Bytes(Optimizer optimizer_, Format format_, Element element_, int64_t elements_)
    : optimizer(optimizer_), format(format_), element(element_), elements(elements_) {
  for (const ComponentSpec& spec : optim::components(optimizer, format))
    components.emplace_back(static_cast<size_t>(spec.bytes(elements)));
  gradient.resize(static_cast<size_t>(elements * bytes(element)));
}

float Bytes::weight(int64_t i) const {
  if (format == Format::fp32) return get<float>(components[0], i);
  if (format == Format::fp16) return get<float>(components[1], i);
  const auto hi = get<uint16_t>(components[0], i);
  const auto lo = format == Format::eight_bit ? static_cast<int16_t>(get<int8_t>(components[1], i) * 256)
                                              : get<int16_t>(components[1], i);
  uint32_t bits;
  reference_join(&hi, &lo, &bits, 1);
  return std::bit_cast<float>(bits);
}

void Bytes::set_weight(int64_t i, float x) {
  if (format == Format::fp32) return put(components[0], i, x);
  if (format == Format::fp16) {
    put(components[0], i, reference_narrow_half(x));
    return put(components[1], i, x);
  }
  auto bits = std::bit_cast<uint32_t>(x);
  if (format == Format::eight_bit) bits &= ~0xFFu;
  uint16_t hi;
  int16_t lo;
  reference_split(&bits, &hi, &lo, 1);
  put(components[0], i, hi);
  if (format == Format::eight_bit) {
    put(components[1], i, static_cast<int8_t>(lo / 256));
  } else {
    put(components[1], i, lo);
  }
}

float Bytes::state(int k, int64_t i) const {
  const auto& bytes = components[static_cast<size_t>(k) + (format == Format::fp32 ? 1 : 2)];
  if (format == Format::compact) return reference_widen(get<uint16_t>(bytes, i));
  if (format != Format::eight_bit) return get<float>(bytes, i);
  return reference_decode(get<uint8_t>(bytes, i), get<uint8_t>(bytes, elements + i / 64),
                          is_signed(optimizer, k));
}

void Bytes::set_gradient(int64_t i, float x) {
  if (element == Element::fp32) return put(gradient, i, x);
  put(gradient, i, element == Element::bf16 ? reference_narrow(x) : reference_narrow_half(x));
}

Bytes random_bytes(Optimizer optimizer, Format format, Element element, int64_t elements, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const auto value = [&](float size) {
    switch (random() % 8) {
      case 0:
        return std::bit_cast<float>(static_cast<uint32_t>(random() & 0xBF7FFFFFu));  // finite
      case 1:
        return std::bit_cast<float>(static_cast<uint32_t>(random() & 0x807FFFFFu));  // denormal
      case 2:
        return random() % 2 == 0 ? 0.0f : -0.0f;
      default:
        return normal(random) * size;
    }
  };
  Bytes b(optimizer, format, element, elements);
  for (int64_t i = 0; i < elements; ++i) {
    b.set_weight(i, value(0.02f));
    b.set_gradient(i, value(0.1f));
    const auto specs = components(optimizer, format);
    for (size_t c = 0; c < specs.size(); ++c) {
      if (specs[c].role != Role::state) continue;
      const bool square = !is_signed(optimizer, specs[c].state);
      const float x = square ? std::abs(value(1e-6f)) : value(1e-3f);
      if (specs[c].element_bytes == 4) put(b.components[c], i, x);
      if (specs[c].element_bytes == 2) put(b.components[c], i, reference_narrow(x));
      if (specs[c].element_bytes == 1) put(b.components[c], i, static_cast<uint8_t>(random()));
    }
  }
  const auto specs = components(optimizer, format);
  for (size_t c = 0; c < specs.size(); ++c) {
    if (!specs[c].scaled) continue;
    for (int64_t block = 0; block * 64 < elements; ++block)  // from never written to large
      put(b.components[c], elements + block,
          static_cast<uint8_t>(random() % 8 == 0 ? 0 : 60 + random() % 100));
    for (int64_t i = 0; i < elements; ++i)
      if (get<uint8_t>(b.components[c], elements + i / 64) == 0) put(b.components[c], i, uint8_t{0});
  }
  return b;
}

Bytes expected(const Bytes& start, const Step& step, Range range) {
  Bytes end = start;
  std::vector<void*> pointers;
  for (auto& component : end.components) pointers.push_back(component.data());
  const std::vector<double> hyper = reference::hyper_of(step.hyper);
  const int known = reference_update(
      std::string(name(start.optimizer)).c_str(), std::string(name(start.format)).c_str(), pointers.data(),
      element_name(start.element), end.gradient.data(), start.elements, range.begin, range.end, hyper.data(),
      step.step, maximizes(step.hyper) ? -step.grad_scale : step.grad_scale, step.seed, step.index);
  EXPECT_EQ(known, 1);
  return end;
}

Bytes actual(const Kernels& form, const Bytes& start, const Step& step, Range range, int offset) {
  const auto specs = components(start.optimizer, start.format);
  std::vector<GuardedBytes> memory;
  memory.reserve(specs.size());
  for (size_t c = 0; c < specs.size(); ++c) {
    const size_t elements = (static_cast<size_t>(offset) + 5 * c) % 16;
    memory.emplace_back(start.components[c], elements * static_cast<size_t>(specs[c].element_bytes));
  }
  GuardedBytes gradient(start.gradient, static_cast<size_t>((offset + 3) % 16 * bytes(start.element)));
  std::vector<std::byte*> pointers;
  for (GuardedBytes& component : memory) pointers.push_back(component.data());
  const Factors factors = make_factors(step.hyper, step.step, step.grad_scale);
  const Pass pass{.components = pointers.data(),
                  .gradient = gradient.data(),
                  .elements = start.elements,
                  .begin = range.begin,
                  .end = range.end,
                  .factors = std::visit([](const auto& f) -> const void* { return &f; }, factors.of),
                  .grad_scale = factors.grad_scale,
                  .noise = make_noise(step.seed, step.index, step.step),
                  .prefetch = offset % 2 == 0 ? Cache::second_level : Cache::first_level};
  form.update_of(start.optimizer, start.format, start.element)(pass);
  Bytes end = start;
  for (size_t c = 0; c < specs.size(); ++c) {
    EXPECT_TRUE(memory[c].intact()) << specs[c].name << " outside, " << describe(form, start, range, offset);
    const auto result = memory[c].span();
    end.components[c].assign(result.begin(), result.end());
  }
  const auto result = gradient.span();
  EXPECT_TRUE(gradient.intact());
  end.gradient.assign(result.begin(), result.end());
  return end;
}

std::string difference(const Bytes& actual, const Bytes& want) {
  if (actual.gradient != want.gradient) return "the gradient has changed";
  if (actual.components == want.components) return {};
  const auto specs = components(want.optimizer, want.format);
  for (int64_t i = 0; i < want.elements; ++i) {
    const bool nan = std::isnan(want.weight(i)) && std::isnan(actual.weight(i));
    for (size_t c = 0; c < specs.size(); ++c) {
      const auto size = static_cast<size_t>(specs[c].element_bytes);
      const size_t at = static_cast<size_t>(i) * size;
      if (std::memcmp(&actual.components[c][at], &want.components[c][at], size) == 0) continue;
      if (nan && specs[c].role != Role::state) continue;
      if (specs[c].role == Role::state && size == 4 &&
          same(get<float>(actual.components[c], i), get<float>(want.components[c], i)))
        continue;
      if (specs[c].role == Role::state && size == 2 && std::isnan(actual.state(specs[c].state, i)) &&
          std::isnan(want.state(specs[c].state, i)))
        continue;
      char text[256];
      std::snprintf(text, sizeof(text), "element %lld of %s: weight %a want %a", static_cast<long long>(i),
                    std::string(specs[c].name).c_str(), actual.weight(i), want.weight(i));
      return text;
    }
  }
  for (size_t c = 0; c < specs.size(); ++c) {
    if (!specs[c].scaled) continue;
    for (int64_t block = 0; block * 64 < want.elements; ++block) {
      const auto got = get<uint8_t>(actual.components[c], want.elements + block);
      const auto asked = get<uint8_t>(want.components[c], want.elements + block);
      if (got != asked)
        return "scale of block " + std::to_string(block) + ": " + std::to_string(got) + " want " +
               std::to_string(asked);
    }
  }
  return {};
}

std::string describe(const Kernels& form, const Bytes& bytes, Range range, int offset) {
  return std::string(form.name) + " " + std::string(name(bytes.optimizer)) + " " +
         std::string(name(bytes.format)) + " gradient " + element_name(bytes.element) + ", " +
         std::to_string(bytes.elements) + " elements, " + std::to_string(range.begin) + " to " +
         std::to_string(range.end) + ", offset " + std::to_string(offset);
}

}  // namespace overspill::optim
