#include "engine/device/device_gradients.h"

#include <algorithm>
#include <exception>

namespace overspill::engine {

void take_in_from_host(kernels::DeviceKernels& kernels, kernels::Stream& stream, std::span<std::byte> piece,
                       optim::Element from_type, const std::byte* from, optim::Element to_type, std::byte* to,
                       int64_t elements, bool first) {
  const int64_t width = optim::bytes(from_type);
  const int64_t most = std::ssize(piece) / width;
  for (int64_t done = 0; done < elements; done += most) {
    const int64_t count = std::min(most, elements - done);
    stream.copy_from_host(piece.data(), from + done * width, count * width);
    kernels.take_in(stream, from_type, piece.data(), to_type, to + done * optim::bytes(to_type), count,
                    first);
  }
}

void settle(kernels::Stream* stream) noexcept {
  if (stream == nullptr) return;
  try {
    stream->record().wait();
  } catch (const std::exception&) {  // as the header says
  }
}

}  // namespace overspill::engine
