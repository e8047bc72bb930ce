#include "inference/run/stream.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "inference/run/pack.h"
#include "io/files.h"

namespace overspill::inference {

LayerStream::LayerStream(const ModelFolder& folder, std::vector<StreamedLayer> layers, int slots)
    : folder_(folder), layers_(std::move(layers)) {
  int64_t largest = 0;
  for (const StreamedLayer& layer : layers_) {
    bytes_ += layer.read_bytes;
    largest = std::max(largest, layer.bytes);
  }
  for (int i = 0; i < slots; ++i) slots_.emplace_back(largest);
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw io::no_threads(error, "reading layers ahead needs one");
  }
}

LayerStream::~LayerStream() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool LayerStream::has(size_t layer) const {
  return std::ranges::find(layers_, layer, &StreamedLayer::layer) != layers_.end();
}

void LayerStream::acquire(size_t layer) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return filled_ > acquired_ || error_ != nullptr; });
  if (filled_ <= acquired_) std::rethrow_exception(error_);
  if (layers_[static_cast<size_t>(acquired_) % layers_.size()].layer != layer)
    throw std::logic_error("layers are acquired in another order than they are read in");
  ++acquired_;
}

void LayerStream::release() {
  {
    const std::lock_guard lock(mutex_);
    ++released_;
  }
  changed_.notify_all();
}

void LayerStream::serve() {
  const auto slots = static_cast<int64_t>(slots_.size());
  for (int64_t i = 0;; ++i) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || i - released_ < slots; });
      if (ends_) return;
    }
    std::exception_ptr error;
    try {
      fill(layers_[static_cast<size_t>(i) % layers_.size()], slots_[static_cast<size_t>(i % slots)].data());
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      error_ = error;
      if (!error) ++filled_;
    }
    changed_.notify_all();
    if (error) return;
  }
}

/// A layer's views are set here: nobody uses them until its acquire, nor after its release.
void LayerStream::fill(const StreamedLayer& layer, std::byte* slot) {
  for (const WantedMatrix& matrix : layer.matrices) {
    matrix.to->data = slot;
    if (!pack_panels(folder_, *matrix.spec, *matrix.to, {0, matrix.to->panels()}))
      throw std::logic_error("a matrix that may not fit is streamed");
    for (const Rows& part : matrix.spec->parts) folder_.forget(*folder_.find(part.tensor));
    slot += aligned_bytes(*matrix.to);
  }
}

}  // namespace overspill::inference
