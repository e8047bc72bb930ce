#include "inference/format/tensor_reader.h"

#include "inference/kernels/panel.h"

namespace overspill::inference {

std::span<const std::byte> TensorReader::read(const StoredTensor& tensor, int64_t offset, int64_t bytes) {
  // A direct read begins and ends at multiples of a block, each of which may lie outside of what is wanted.
  const int64_t room = round_up(bytes, kDirectBytes) + kDirectBytes;
  if (memory_.bytes() < room) {
    memory_ = {};
    memory_ = kernels::HostPages(room, kernels::PageSize::small);
  }
  if (path_ == ReadPath::direct) return folder_.read_direct(tensor, offset, bytes, memory_.span());
  const std::span<std::byte> to = memory_.span().first(static_cast<size_t>(bytes));
  folder_.read(tensor, offset, to);
  return to;
}

}  // namespace overspill::inference
