#include "engine/device_gradients.h"

#include <algorithm>
#include <stdexcept>

namespace overspill::engine {

kernels::Float float_of(optim::Element element) {
  if (element == optim::Element::fp16) throw std::logic_error("a device's kernels know no fp16");
  return element == optim::Element::bf16 ? kernels::Float::bf16 : kernels::Float::fp32;
}

void take_in_from_host(kernels::DeviceKernels& kernels, kernels::Stream& stream, std::span<std::byte> piece,
                       optim::Element from_type, const std::byte* from, optim::Element to_type, std::byte* to,
                       int64_t elements, bool first) {
  const int64_t width = optim::bytes(from_type);
  const int64_t most = std::ssize(piece) / width;
  for (int64_t done = 0; done < elements; done += most) {
    const int64_t count = std::min(most, elements - done);
    stream.copy_from_host(piece.data(), from + done * width, count * width);
    kernels.take_in(stream, float_of(from_type), piece.data(), float_of(to_type),
                    to + done * optim::bytes(to_type), count, first);
  }
}

}  // namespace overspill::engine
