#include "inference/run/stream.h"

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "cpu_optim/floating_point.h"
#include "io/files.h"

namespace overspill::inference {
namespace {

constexpr size_t kParts = static_cast<size_t>(Part::down) + 1;

}  // namespace

LayerStream::LayerStream(const ModelFolder& folder, std::vector<StreamedPart> parts, int slots, int users)
    : folder_(folder), parts_(std::move(parts)), users_(users), acquired_(static_cast<size_t>(users)) {
  // Else a part would be read into one slot while it is used in another, and its views would move.
  if (std::ssize(parts_) < slots) throw std::logic_error("a stream has fewer parts than slots");
  int64_t largest = 0;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const StreamedPart& part = parts_[i];
    bytes_ += part.read_bytes;
    largest = std::max(largest, part.bytes);
    index_.resize(std::max(index_.size(), part.layer + 1), std::vector<int64_t>(kParts, -1));
    index_[part.layer][static_cast<size_t>(part.part)] = static_cast<int64_t>(i);
  }
  for (int i = 0; i < slots; ++i) slots_.push_back({kernels::HostPages(largest)});
  threads_.reserve(kReaders);
  try {
    for (int i = 0; i < kReaders; ++i) threads_.emplace_back([this] { serve(); });
  } catch (const std::system_error& error) {
    end();
    throw io::no_threads(error, "reading weights ahead needs some");
  } catch (...) {  // no memory
    end();
    throw;
  }
}

LayerStream::~LayerStream() {
  end();
}

void LayerStream::end() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

int64_t LayerStream::index_of(size_t layer, Part part) const {
  return layer < index_.size() ? index_[layer][static_cast<size_t>(part)] : -1;
}

bool LayerStream::acquire(int user, size_t layer, Part part) {
  const MutexLock lock(mutex_);
  int64_t& mine = acquired_[static_cast<size_t>(user)];
  while (!is_filled(mine) && mine < failed_) changed_.wait(mutex_);
  if (mine >= failed_) return false;
  if (mine % static_cast<int64_t>(parts_.size()) != index_of(layer, part))
    throw std::logic_error("parts are acquired in another order than they are read in");
  ++mine;
  return true;
}

void LayerStream::release(int user) {
  {
    const MutexLock lock(mutex_);
    // Every user has released the parts before this one.
    if (--slot_of(acquired_[static_cast<size_t>(user)] - 1).users_left > 0) return;
    ++released_;
  }
  changed_.notify_all();
}

std::exception_ptr LayerStream::error() const {
  const MutexLock lock(mutex_);
  return error_;
}

Reading LayerStream::reading() const {
  const MutexLock lock(mutex_);
  return meter_.reading();
}

Reading LayerStream::try_reading(double seconds) {
  const Reading before = reading();
  for (size_t i = 0; i < parts_.size() && reading().seconds - before.seconds < seconds; ++i) {
    for (int user = 0; user < users_; ++user) {
      if (!acquire(user, parts_[i].layer, parts_[i].part)) std::rethrow_exception(error());
      release(user);
    }
  }
  const Reading after = reading();
  begin_again();
  return {after.bytes - before.bytes, after.seconds - before.seconds};
}

/// The next pass begins; what was read ahead of another place is read again when it is its turn.
void LayerStream::begin_again() {
  {
    const MutexLock lock(mutex_);
    rests_ = true;
    while (meter_.in_work() != 0) changed_.wait(mutex_);
    const int64_t parts = std::ssize(parts_), first = (next_.part / parts + 1) * parts;
    next_ = {first, 0, {}};
    released_ = first;
    std::ranges::fill(acquired_, first);
    rests_ = false;
  }
  changed_.notify_all();
}

void LayerStream::serve() {
  const optim::FloatingPointMode mode;  // as where weights are read that stay
  TensorReader reader(folder_, ReadPath::direct);
  while (const std::optional<Chunk> chunk = next_chunk()) {
    const WantedMatrix& matrix = part_of(chunk->part).matrices[chunk->matrix];
    end_chunk(*chunk, read_chunk(reader, matrix, chunk->range));
  }
}

/// Waits for a free slot. Nothing: the threads are to end.
std::optional<LayerStream::Chunk> LayerStream::next_chunk() {
  const MutexLock lock(mutex_);
  while (!ends_ && !error_ && (rests_ || next_.part - released_ >= std::ssize(slots_))) changed_.wait(mutex_);
  if (ends_ || error_) return {};
  const StreamedPart& part = part_of(next_.part);
  if (next_.matrix == 0 && next_.range.first == 0) begin_part(part);
  const WantedMatrix& matrix = part.matrices[next_.matrix];
  const int64_t panels = matrix.to->panels();
  next_.range.last = std::min(panels, next_.range.first + panels_at_once(matrix));
  const Chunk taken = next_;
  next_.range.first = next_.range.last;
  if (next_.range.last == panels) next_ = {next_.part, next_.matrix + 1, {}};
  if (next_.matrix == part.matrices.size()) next_ = {next_.part + 1, 0, {}};
  meter_.begin();
  return taken;
}

/// Its views are set here: nobody uses them until its acquire, nor after its release.
void LayerStream::begin_part(const StreamedPart& part) {
  Slot& slot = slot_of(next_.part);
  slot.part = next_.part;
  slot.users_left = users_;
  slot.panels_left = place_at(part.matrices, slot.memory.data());
}

void LayerStream::end_chunk(const Chunk& chunk, const std::exception_ptr& error) {
  {
    const MutexLock lock(mutex_);
    if (error) {
      if (!error_ || chunk.part < failed_) error_ = error;
      failed_ = std::min(failed_, chunk.part);
      meter_.end(0);
    } else {
      const int64_t panels = chunk.range.last - chunk.range.first;
      slot_of(chunk.part).panels_left -= panels;
      const StreamedPart& part = part_of(chunk.part);
      const Matrix& matrix = *part.matrices[chunk.matrix].to;
      meter_.end(static_cast<double>(panels * panel_bytes(matrix.element, matrix.columns)) *
                 static_cast<double>(part.read_bytes) / static_cast<double>(part.bytes));
    }
  }
  changed_.notify_all();
}

}  // namespace overspill::inference
