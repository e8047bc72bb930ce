#include "inference/run/experts.h"

#include <algorithm>
#include <numeric>
#include <system_error>

#include "cpu_optim/floating_point.h"
#include "io/files.h"

namespace overspill::inference {
namespace {

// Slots that no layer keeps: what is used, and what is read meanwhile.
constexpr int64_t kPassing = 3;

}  // namespace

int64_t ExpertStore::slot_bytes(std::span<const LayerExperts> layers) {
  int64_t most = 0;
  for (const LayerExperts& layer : layers) {
    for (const auto& matrices : layer.experts) most = std::max(most, memory_bytes(matrices));
  }
  return most;
}

ExpertStore::ExpertStore(const ModelFolder& folder, std::vector<LayerExperts> layers, int64_t slots,
                         int users)
    : folder_(folder),
      layers_(std::move(layers)),
      users_(users),
      slot_count_(slots),
      slot_bytes_(slot_bytes(layers_)),
      share_(layers_.size()),
      memory_(slots * slot_bytes_),
      slots_(static_cast<size_t>(slots)),
      held_(layers_.size()),
      wanted_by_(static_cast<size_t>(users)),
      in_use_(static_cast<size_t>(users), -1) {
  size_t most = 0;
  const int64_t kept = std::max<int64_t>(0, slots - kPassing), count = std::ssize(layers_);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const LayerExperts& layer = layers_[i];
    const auto at = static_cast<int64_t>(i), experts = std::ssize(layer.experts);
    share_[i] = kept * (at + 1) / count - kept * at / count;
    first_of_.resize(std::max(first_of_.size(), layer.layer + 1), -1);
    first_of_[layer.layer] = std::ssize(experts_);
    most = std::max(most, layer.experts.size());
    int64_t in_memory = 0, stored = 0;
    for (const auto& matrices : layer.experts) {
      int64_t panels = 0;
      for (const WantedMatrix& matrix : matrices) panels += matrix.to->panels();
      const int64_t bytes = folder_bytes(folder, matrices);
      experts_.push_back({&matrices, i, static_cast<double>(bytes) / static_cast<double>(panels)});
      in_memory += memory_bytes(matrices);
      stored += bytes;
    }
    bytes_a_token_ += in_memory / experts * layer.chosen;
    const int64_t absent = std::max<int64_t>(0, experts - share_[i]);
    read_bytes_a_token_ += stored / experts * layer.chosen * absent / experts;
  }
  slot_of_.assign(experts_.size(), -1);
  missing_.reserve(most);  // want is called between barriers, where nothing may throw
  threads_.reserve(kReaders);
  try {
    for (int i = 0; i < kReaders; ++i) threads_.emplace_back([this] { serve(); });
  } catch (const std::system_error& error) {
    end();
    throw io::no_threads(error, "reading experts needs some");
  } catch (...) {  // no memory
    end();
    throw;
  }
}

ExpertStore::~ExpertStore() {
  end();
}

void ExpertStore::end() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ExpertStore::want(int user, size_t layer, std::span<const int32_t> experts) {
  {
    const MutexLock lock(mutex_);
    if (++wanted_by_[static_cast<size_t>(user)] <= wanted_) return;  // another user has said it
    ++wanted_;
    if (error_) failed_ = -1;
    for (const int32_t expert : experts) {
      const int64_t id = id_of(layer, expert);
      const int64_t at = slot_of(id);
      if (at < 0) {
        missing_.push_back(id);
        continue;
      }
      slot(at).users_left = users_;
      slot(at).begun = false;
    }
  }
  changed_.notify_all();
}

bool ExpertStore::acquire(int user, size_t layer, int32_t expert) {
  const int64_t id = id_of(layer, expert);
  const MutexLock lock(mutex_);
  while (!is_there(id) && id < failed_) changed_.wait(mutex_);
  if (id >= failed_) return false;
  slot(slot_of(id)).begun = true;
  in_use_[static_cast<size_t>(user)] = id;
  return true;
}

void ExpertStore::release(int user) {
  {
    const MutexLock lock(mutex_);
    Slot& used = slot(slot_of(in_use_[static_cast<size_t>(user)]));
    if (--used.users_left > 0) return;
    used.used = ++clock_;
  }
  changed_.notify_all();
}

std::exception_ptr ExpertStore::error() const {
  const MutexLock lock(mutex_);
  return error_;
}

Reading ExpertStore::reading() const {
  const MutexLock lock(mutex_);
  return meter_.reading();
}

Reading ExpertStore::try_reading(double seconds) {
  const Reading before = reading();
  const auto since = [&] {
    const Reading now = reading();
    return Reading{now.bytes - before.bytes, now.seconds - before.seconds};
  };
  for (size_t i = 0; i < layers_.size() && since().seconds < seconds; ++i) {
    std::vector<int32_t> absent;
    {
      const MutexLock lock(mutex_);
      for (int32_t e = 0; e < std::ssize(layers_[i].experts); ++e) {
        if (std::ssize(absent) < layers_[i].chosen && slot_of(id_of(layers_[i].layer, e)) < 0)
          absent.push_back(e);
      }
    }
    for (int user = 0; user < users_; ++user) want(user, layers_[i].layer, absent);
    for (const int32_t expert : absent) {
      for (int user = 0; user < users_; ++user) {
        if (!acquire(user, layers_[i].layer, expert)) std::rethrow_exception(error());
        release(user);
      }
    }
  }
  return since();
}

void ExpertStore::serve() {
  const optim::FloatingPointMode mode;  // as where weights are read that stay
  TensorReader reader(folder_, ReadPath::direct);
  while (const std::optional<Chunk> chunk = next_chunk()) {
    const auto& matrices = *expert(chunk->expert).matrices;
    end_chunk(*chunk, read_chunk(reader, matrices[chunk->matrix], chunk->range));
  }
}

/// Waits for an expert that is wanted, and a slot for it. Nothing: the threads are to end.
std::optional<ExpertStore::Chunk> ExpertStore::next_chunk() {
  const MutexLock lock(mutex_);
  while (!ends_ && !error_ && next_.expert < 0 && !begin_expert()) changed_.wait(mutex_);
  if (ends_ || error_) return {};
  const auto& matrices = *expert(next_.expert).matrices;
  const WantedMatrix& matrix = matrices[next_.matrix];
  const int64_t panels = matrix.to->panels();
  next_.range.last = std::min(panels, next_.range.first + panels_at_once(matrix));
  const Chunk taken = next_;
  next_.range.first = next_.range.last;
  if (next_.range.last == panels) next_ = {next_.expert, next_.matrix + 1, {}};
  if (next_.matrix == matrices.size()) next_ = {};
  meter_.begin();
  return taken;
}

/// Gives the first expert that is missing a slot, and its matrices their places. False where there is none.
bool ExpertStore::begin_expert() {
  if (missing_.empty()) return false;
  const int64_t id = missing_.front(), at = slot_for(id);
  if (at < 0) return false;
  missing_.erase(missing_.begin());
  Slot& taken = slot(at);
  leave(taken);
  taken = {.expert = id, .users_left = users_};
  taken.panels_left = place_at(*expert(id).matrices, memory_.data() + at * slot_bytes_);
  slot_of(id) = at;
  ++held_[expert(id).layer];
  next_ = {id, 0, {}};
  return true;
}

/// A free slot; else the one whose expert was used longest ago, of a layer that has more than its share, or
/// of any; else one whose expert is wanted after this one. -1 where all are in use.
int64_t ExpertStore::slot_for(int64_t id) const {
  int64_t of_many = -1, of_any = -1, later = -1;
  const auto at = [&](int64_t i) REQUIRES(mutex_) -> const Slot& { return slots_[static_cast<size_t>(i)]; };
  for (int64_t i = 0; i < std::ssize(slots_); ++i) {
    const Slot& slot = at(i);
    if (slot.expert < 0) return i;
    if (slot.panels_left > 0) continue;
    if (slot.users_left > 0) {
      if (!slot.begun && slot.expert > id && (later < 0 || slot.expert > at(later).expert)) later = i;
      continue;
    }
    const size_t layer = expert(slot.expert).layer;
    if (of_any < 0 || slot.used < at(of_any).used) of_any = i;
    if (held_[layer] > share_[layer] && (of_many < 0 || slot.used < at(of_many).used)) of_many = i;
  }
  return of_many >= 0 ? of_many : of_any >= 0 ? of_any : later;
}

/// Its expert is not there any more.
void ExpertStore::leave(Slot& slot) {
  if (slot.expert < 0) return;
  slot_of(slot.expert) = -1;
  --held_[expert(slot.expert).layer];
  // It is wanted yet: it is read again behind the others.
  if (slot.users_left > 0) missing_.insert(std::ranges::lower_bound(missing_, slot.expert), slot.expert);
}

void ExpertStore::end_chunk(const Chunk& chunk, const std::exception_ptr& error) {
  {
    const MutexLock lock(mutex_);
    const int64_t panels = chunk.range.last - chunk.range.first;
    if (error) {
      if (!error_ || chunk.expert < failed_) error_ = error;
      failed_ = std::min(failed_, chunk.expert);
      meter_.end(0);
    } else {
      slot(slot_of(chunk.expert)).panels_left -= panels;
      meter_.end(expert(chunk.expert).read_bytes_a_panel * static_cast<double>(panels));
    }
  }
  changed_.notify_all();
}

}  // namespace overspill::inference
