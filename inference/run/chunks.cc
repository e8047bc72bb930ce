#include "inference/run/chunks.h"

#include <algorithm>
#include <stdexcept>

#include "inference/run/pack.h"

namespace overspill::inference {
namespace {

constexpr int64_t kChunkBytes = int64_t{1} << 20;

}  // namespace

int64_t panels_at_once(const WantedMatrix& matrix) {
  if (matrix.spec->stored_transposed) return matrix.to->panels();
  return std::max<int64_t>(1, kChunkBytes / panel_bytes(matrix.to->element, matrix.to->columns));
}

std::exception_ptr read_chunk(TensorReader& reader, const WantedMatrix& matrix, PanelRange range) noexcept {
  try {
    if (!pack_panels(reader, *matrix.spec, *matrix.to, range))
      throw std::logic_error("a matrix that may not fit is streamed");
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

int64_t memory_bytes(const std::vector<WantedMatrix>& matrices) {
  int64_t bytes = 0;
  for (const WantedMatrix& matrix : matrices) bytes += aligned_bytes(*matrix.to);
  return bytes;
}

int64_t folder_bytes(const ModelFolder& folder, const std::vector<WantedMatrix>& matrices) {
  int64_t bytes = 0;
  for (const WantedMatrix& matrix : matrices) {
    for (const Rows& part : matrix.spec->parts) {
      const int64_t element = folder.find(part.tensor)->dtype == "F32" ? 4 : 2;
      bytes += part.count * matrix.spec->columns * element;
    }
  }
  return bytes;
}

int64_t place_at(const std::vector<WantedMatrix>& matrices, std::byte* data) {
  int64_t panels = 0;
  for (const WantedMatrix& matrix : matrices) {
    matrix.to->data = data;
    data += aligned_bytes(*matrix.to);
    panels += matrix.to->panels();
  }
  return panels;
}

void Meter::begin() {
  if (in_work_++ == 0) busy_since_ = Clock::now();
}

void Meter::end(double bytes) {
  bytes_ += bytes;
  if (--in_work_ == 0) busy_ += Clock::now() - busy_since_;
}

Reading Meter::reading() const {
  const Clock::duration busy = in_work_ > 0 ? busy_ + (Clock::now() - busy_since_) : busy_;
  return {bytes_, std::chrono::duration<double>(busy).count()};
}

}  // namespace overspill::inference
