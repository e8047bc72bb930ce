// The update alone, for overspill.optim: plain tensors in, plain tensors out.
#include <fmt/format.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "cpu_optim/blockwise.h"
#include "cpu_optim/executor.h"
#include "cpu_optim/gradient.h"
#include "cpu_optim/update.h"

namespace overspill::bindings {

optim::Hyper hyper_from(const std::string& optimizer, const pybind11::dict& group) {
  const auto wanted = static_cast<size_t>(optim::optimizer_named(optimizer));
  optim::Hyper hyper;
  optim::Optimizers::for_each([&]<class T>(int index) {
    if (static_cast<size_t>(index) != wanted) return;
    typename T::Config config;
    config.for_each_field(
        [&]<class Field>(const char* name, Field& field) { field = group[name].cast<Field>(); });
    hyper = config;
  });
  return hyper;
}

namespace {

namespace py = pybind11;
using optim::Executor;
using optim::Hyper;
using Address = std::pair<uintptr_t, int64_t>;  // and bytes

optim::Element element_named(const std::string& name) {
  if (name == "bfloat16") return optim::Element::bf16;
  if (name == "float16") return optim::Element::fp16;
  if (name == "float32") return optim::Element::fp32;
  throw std::invalid_argument("gradients are bfloat16, float16 or float32, not " + name);
}

/// What a call works on: components as addresses, checked against what the format says they hold.
struct Tensors {
  Tensors(const std::string& optimizer, const std::string& format_name, const std::vector<Address>& addresses,
          int64_t elements, uint64_t seed)
      : format(optim::format_named(format_name)) {
    const auto specs = optim::components(optim::optimizer_named(optimizer), format);
    if (specs.size() != addresses.size()) {
      throw std::invalid_argument(fmt::format("{} in {} has {} components, {} were given", optimizer,
                                              format_name, specs.size(), addresses.size()));
    }
    for (size_t i = 0; i < specs.size(); ++i) {
      const auto [address, bytes] = addresses[i];
      if (bytes != specs[i].bytes(elements)) {
        throw std::invalid_argument(fmt::format("{} of {} elements has {} bytes, {} were given",
                                                specs[i].name, elements, specs[i].bytes(elements), bytes));
      }
      components.push_back(memory_at(address, bytes).data());
    }
    piece = {.components = components, .elements = elements, .index = 0, .seed = seed};
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  optim::Format format;
  std::vector<std::byte*> components;
  optim::Piece piece;
};

void update(Executor& executor, const std::string& optimizer, const py::dict& group,
            const std::string& format, const std::vector<Address>& components, int64_t elements,
            uint64_t seed, const Address& gradient, const std::string& dtype, int64_t step,
            double grad_scale) {
  const Tensors tensors(optimizer, format, components, elements, seed);
  const optim::Element element = element_named(dtype);
  if (gradient.second != elements * optim::bytes(element)) {
    throw std::invalid_argument(
        fmt::format("the gradient has {} bytes, {} elements were expected", gradient.second, elements));
  }
  const optim::Factors factors = optim::make_factors(hyper_from(optimizer, group), step, grad_scale);
  const void* data = memory_at(gradient.first, gradient.second).data();
  const py::gil_scoped_release release;
  optim::parallel_update(executor, tensors.format, tensors.piece, {data, element}, factors);
}

void initialize(const std::string& optimizer, const py::dict& group, const std::string& format,
                const std::vector<Address>& components, int64_t elements) {
  const Tensors tensors(optimizer, format, components, elements, 0);
  const Hyper hyper = hyper_from(optimizer, group);
  const py::gil_scoped_release release;
  optim::initialize_states(hyper, tensors.format, tensors.piece);
}

double product_of_momenta(double beta1, double momentum_decay, int64_t step) {
  return optim::Nadam::product_of_momenta({.beta1 = beta1, .momentum_decay = momentum_decay}, step);
}

std::pair<double, bool> squares(const Address& values, const std::string& dtype) {
  const optim::Element element = element_named(dtype);
  const auto memory = memory_at(values.first, values.second);
  const auto count = static_cast<size_t>(values.second / optim::bytes(element));
  const py::gil_scoped_release release;
  const optim::Squares all =
      element == optim::Element::fp32
          ? optim::squares(std::span(reinterpret_cast<const float*>(memory.data()), count))
      : element == optim::Element::fp16
          ? optim::squares(std::span(reinterpret_cast<const optim::Fp16*>(memory.data()), count))
          : optim::squares(std::span(reinterpret_cast<const uint16_t*>(memory.data()), count));
  return {all.sum, all.finite};
}

using Convert = void (*)(optim::Packing, optim::Element, std::span<const std::byte>, std::span<std::byte>);

template <Convert convert>
void blockwise(const std::string& packing, const std::string& dtype, const Address& from, const Address& to) {
  const optim::Packing chosen = optim::packing_named(packing);
  const optim::Element element = element_named(dtype);
  const std::span<const std::byte> given = memory_at(from.first, from.second);
  const std::span<std::byte> made = memory_at(to.first, to.second);
  const py::gil_scoped_release release;
  convert(chosen, element, given, made);
}

}  // namespace

void register_optim(py::module_& m) {
  py::module_ optim_module = m.def_submodule("optim", "Updates and squares over plain memory.");
  py::class_<Executor>(optim_module, "Executor")
      .def(py::init([](int threads) { return optim::make_executor(threads); }), py::arg("threads"))
      .def_property_readonly("threads", &Executor::threads);
  optim_module.def("components", [](const std::string& optimizer, const std::string& format, int64_t n) {
    py::list out;
    for (const auto& spec : optim::components(optim::optimizer_named(optimizer), optim::format_named(format)))
      out.append(py::make_tuple(std::string(spec.name), spec.state, spec.element_bytes, spec.bytes(n)));
    return out;
  });
  optim_module.def("update", &update);
  optim_module.def("initialize", &initialize);
  optim_module.def("squares", &squares);
  optim_module.def("product_of_momenta", &product_of_momenta);
  optim_module.def(
      "packed_bytes", [](const std::string& packing, const std::string& dtype, int64_t elements) {
        return optim::packed_bytes(optim::packing_named(packing), element_named(dtype), elements);
      });
  optim_module.def("pack", &blockwise<&optim::pack>);
  optim_module.def("unpack", &blockwise<&optim::unpack>);
}

}  // namespace overspill::bindings
