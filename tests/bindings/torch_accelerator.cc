// An accelerator under PyTorch, for tests: the device type PrivateUse1, whose memory and streams are those of
// a simulated device (kernels/simulated_device.h). Memory that nobody owns any more reads as NaN, copies of
// the engine come late, and what torch does here waits for the current stream alone, as on a GPU. Torch's own
// work is done by its CPU kernels, at once. Backward runs on a thread of autograd's, as on every accelerator.
//
// The engine is handed the device by `overspill_device` (bindings/overspill/place.py).
#include <ATen/ATen.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/simulated_device.h"

namespace overspill::testing {
namespace {

namespace py = pybind11;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kOnly(kType, 0);

/// The one device and its streams, by torch's numbers. Never destroyed: tensors may outlive everything.
class Accelerator {
 public:
  static Accelerator& get() {
    static auto* const only = new Accelerator;  // NOLINT(cppcoreguidelines-owning-memory)
    return *only;
  }

  std::shared_ptr<kernels::SimulatedDevice> device() { return device_; }

  kernels::Stream& stream(c10::StreamId id) {
    const std::lock_guard lock(mutex_);
    return *streams_.at(static_cast<size_t>(id));
  }
  c10::StreamId new_stream() {
    const std::lock_guard lock(mutex_);
    streams_.push_back(device_->make_stream());
    return static_cast<c10::StreamId>(streams_.size()) - 1;
  }
  c10::StreamId& current() {
    thread_local c10::StreamId id = 0;
    return id;
  }
  /// What torch does next sees all that the current stream was given. Throws what failed there.
  void drain() { stream(current()).record().wait(); }

 private:
  Accelerator() { new_stream(); }
  const std::shared_ptr<kernels::SimulatedDevice> device_ = [] {
    kernels::SimulatedDeviceOptions options;
    options.delay_max = std::chrono::microseconds(300);
    return kernels::make_simulated_device(options);
  }();
  std::mutex mutex_;
  std::vector<std::unique_ptr<kernels::Stream>> streams_;
};

// ---- memory

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = std::make_unique<kernels::DeviceMemory>(
        Accelerator::get().device()->allocate(std::max<int64_t>(1, static_cast<int64_t>(bytes))));
    void* const data = memory->data();
    return {data, memory.release(), &free, kOnly};
  }
  static void free(void* memory) { delete static_cast<kernels::DeviceMemory*>(memory); }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;

// ---- what torch asks of a backend

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kOnly, id); }
  c10::Stream getStream(c10::Device) const override { return stream_of(Accelerator::get().current()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream_of(Accelerator::get().new_stream());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream_of(Accelerator::get().new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(Accelerator::get().current(), stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return of(stream).record().done(); }
  void synchronizeStream(const c10::Stream& stream) const override { of(stream).record().wait(); }

  static kernels::Stream& of(const c10::Stream& stream) { return Accelerator::get().stream(stream.id()); }
  static kernels::Event& event(void* event) { return *static_cast<kernels::Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new kernels::Event(of(stream).record());  // NOLINT(cppcoreguidelines-owning-memory)
  }
  void block(void* awaited, const c10::Stream& stream) const override { of(stream).wait(event(awaited)); }
  bool queryEvent(void* awaited) const override { return event(awaited).done(); }
  void synchronizeEvent(void* awaited) const override { event(awaited).wait(); }
  void destroyEvent(void* old, c10::DeviceIndex) const noexcept override {
    delete static_cast<kernels::Event*>(old);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::Device getDeviceFromPtr(void*) const override { return kOnly; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(at::kCPU);
  }
};

// ---- operators

bool is_here(const at::Tensor& tensor) {
  return tensor.device().type() == kType;
}

/// The same memory, as torch's CPU kernels take it.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU).requires_grad(false));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(type));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  Accelerator::get().drain();
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  Accelerator::get().drain();
  return on_cpu(tensor).item();
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t bytes = (self.numel() + self.storage_offset()) * self.element_size();
  if (bytes > self.storage().nbytes()) {
    c10::DataPtr grown = allocator.allocate(bytes);
    std::memcpy(grown.get(), self.storage().data(), self.storage().nbytes());
    self.storage().set_data_ptr(std::move(grown));
    self.storage().set_nbytes(bytes);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, elements, 1);
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Accelerator::get().drain();
  at::native::cpu_fallback(op, stack);
}

// What torch asks of every backend but the CPU's has no CPU kernel to fall back to.

using Optional = std::optional<at::Tensor>;

at::Tensor here(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.to(kOnly) : tensor;
}
at::Tensor on_cpu(const Optional& tensor) {
  return tensor && tensor->defined() ? on_cpu(*tensor) : at::Tensor();
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const Optional& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation,
                       bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  Accelerator::get().drain();
  const at::Tensor b = on_cpu(bias);
  return here(at::convolution(on_cpu(input), on_cpu(weight), b.defined() ? Optional(b) : std::nullopt, stride,
                              padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  Accelerator::get().drain();
  const std::vector<int64_t> bias = {gradient.size(1)};
  const auto [in, of_weight, of_bias] =
      at::convolution_backward(on_cpu(gradient), on_cpu(input), on_cpu(weight), at::OptionalIntArrayRef(bias),
                               stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {here(in), here(of_weight), here(of_bias)};
}

/// Of integers too, as GPUs have it.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  Accelerator::get().drain();
  return here(at::histc(on_cpu(self).to(at::kDouble), bins, least, most).to(self.scalar_type()));
}

/// Appleyard et al. 2016, https://arxiv.org/abs/1604.01946: gates in one matrix, in the order in, forget,
/// cell, out; the workspace keeps their activations.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates,
                                                         const at::Tensor& hidden_gates, const at::Tensor& cx,
                                                         const Optional& input_bias,
                                                         const Optional& hidden_bias) {
  Accelerator::get().drain();
  at::Tensor gates = on_cpu(input_gates) + on_cpu(hidden_gates);
  if (input_bias && input_bias->defined()) gates = gates + on_cpu(input_bias) + on_cpu(hidden_bias);
  const auto part = gates.chunk(4, 1);
  const at::Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  const at::Tensor cy = f * on_cpu(cx) + i * g;
  return {here(o * cy.tanh()), here(cy), here(at::cat({i, f, g, o}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const Optional& of_hy,
                                                                  const Optional& of_cy, const at::Tensor& cx,
                                                                  const at::Tensor& cy,
                                                                  const at::Tensor& workspace,
                                                                  bool has_bias) {
  Accelerator::get().drain();
  if (!(of_hy && of_hy->defined()) && !(of_cy && of_cy->defined())) return {};
  const auto part = on_cpu(workspace).chunk(4, 1);
  const at::Tensor &i = part[0], &f = part[1], &g = part[2], &o = part[3];
  const at::Tensor tanh_cy = on_cpu(cy).tanh();
  const at::Tensor dh = of_hy && of_hy->defined() ? on_cpu(of_hy) : at::zeros_like(tanh_cy);
  at::Tensor dc = dh * o * (1 - tanh_cy * tanh_cy);
  if (of_cy && of_cy->defined()) dc = dc + on_cpu(of_cy);
  const at::Tensor gates = at::cat(
      {dc * g * i * (1 - i), dc * on_cpu(cx) * f * (1 - f), dc * i * (1 - g * g), dh * tanh_cy * o * (1 - o)},
      1);
  return {here(gates), here(dc * f), has_bias ? here(gates.sum(0)) : at::Tensor()};
}

/// Gates in the order reset, update, new.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hx, const Optional& input_bias,
                                            const Optional& hidden_bias) {
  Accelerator::get().drain();
  at::Tensor in = on_cpu(input_gates), hidden = on_cpu(hidden_gates);
  if (input_bias && input_bias->defined()) {
    in = in + on_cpu(input_bias);
    hidden = hidden + on_cpu(hidden_bias);
  }
  const auto x = in.chunk(3, 1), h = hidden.chunk(3, 1);
  const at::Tensor r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid(), n = (x[2] + r * h[2]).tanh();
  return {here(n + z * (on_cpu(hx) - n)), here(at::cat({r, z, n, on_cpu(hx), h[2]}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& of_hy, const at::Tensor& workspace, bool has_bias) {
  Accelerator::get().drain();
  const auto part = on_cpu(workspace).chunk(5, 1);
  const at::Tensor &r = part[0], &z = part[1], &n = part[2], &hx = part[3], &hn = part[4];
  const at::Tensor dh = on_cpu(of_hy);
  const at::Tensor dn = dh * (1 - z) * (1 - n * n), dz = dh * (hx - n) * z * (1 - z),
                   dr = dn * hn * r * (1 - r);
  const at::Tensor in = at::cat({dr, dz, dn}, 1), hidden = at::cat({dr, dz, dn * r}, 1);
  return {here(in), here(hidden), here(dh * z), has_bias ? here(in.sum(0)) : at::Tensor(),
          has_bias ? here(hidden.sum(0)) : at::Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("histc", histc);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize);
  // What only makes a view is the same everywhere.
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}

using Shared = std::shared_ptr<kernels::Device>;

PYBIND11_MODULE(_torch_accelerator, m) {
  c10::SetAllocator(kType, &allocator);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("overspill_device", [] {
    auto device = std::make_unique<Shared>(Accelerator::get().device());
    return py::capsule(device.release(), "overspill.device",
                       [](void* owned) { delete static_cast<Shared*>(owned); });
  });
  m.def("overspill_queue", [] {
    Accelerator& accelerator = Accelerator::get();
    return reinterpret_cast<uintptr_t>(accelerator.stream(accelerator.current()).native());
  });
  m.def("used_bytes", [] { return Accelerator::get().device()->used_bytes(); });
  m.def("verify_freed_memory", [] { Accelerator::get().device()->verify_freed_memory(); });
  m.def("synchronize", [] { Accelerator::get().drain(); });
}

}  // namespace
}  // namespace overspill::testing
