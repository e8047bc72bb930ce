#include "cpu_optim/format.h"

#include <array>
#include <stdexcept>
#include <string>

namespace overspill::optim {
namespace {

constexpr std::string_view kFormatNames[kFormatCount] = {"fp32", "exact", "fp16", "compact", "8bit"};

struct ComponentList {
  std::array<ComponentSpec, kComponentsMax> specs{};
  size_t count = 0;

  constexpr void add(ComponentSpec spec) { specs[count++] = spec; }
};

constexpr void add_weights(ComponentList& list, Format format) {
  const auto add = [&](std::string_view name, Role role, int bytes) {
    list.add({name, role, bytes, false, -1});
  };
  switch (format) {
    case Format::fp32:
      return add("p", Role::weight, 4);
    case Format::fp16:
      add("p16", Role::weight, 2);
      return add("master", Role::master, 4);
    case Format::exact:
    case Format::compact:
      add("hi", Role::weight, 2);
      return add("lo", Role::master, 2);
    case Format::eight_bit:
      add("hi", Role::weight, 2);
      return add("lo", Role::master, 1);
  }
}

constexpr int state_bytes(Format format) {
  return format == Format::eight_bit ? 1 : format == Format::compact ? 2 : 4;
}

template <class T>
constexpr ComponentList list_of(Format format) {
  ComponentList list;
  add_weights(list, format);
  for (int k = 0; k < T::kStateCount; ++k) {
    list.add({T::kStates[k].name, Role::state, state_bytes(format), format == Format::eight_bit, k});
  }
  return list;
}

constexpr auto make_lists() {
  std::array<std::array<ComponentList, kFormatCount>, kOptimizerCount> lists{};
  Optimizers::for_each([&]<class T>(int i) {
    for (int f = 0; f < kFormatCount; ++f)
      lists[static_cast<size_t>(i)][static_cast<size_t>(f)] = list_of<T>(Format{static_cast<uint8_t>(f)});
  });
  return lists;
}
constexpr auto kLists = make_lists();

}  // namespace

std::string_view name(Format format) {
  return kFormatNames[static_cast<int>(format)];
}

Format format_named(std::string_view name) {
  for (int f = 0; f < kFormatCount; ++f) {
    if (kFormatNames[f] == name) return Format{static_cast<uint8_t>(f)};
  }
  throw std::invalid_argument("unknown format '" + std::string(name) +
                              "'; known: fp32, exact, fp16, compact, 8bit");
}

std::span<const ComponentSpec> components(Optimizer optimizer, Format format) {
  const ComponentList& list = kLists.at(static_cast<size_t>(optimizer)).at(static_cast<size_t>(format));
  return {list.specs.data(), list.count};
}

}  // namespace overspill::optim
