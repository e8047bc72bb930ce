#include "engine/gradients/gradient_staging.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace overspill::engine {

GradientStaging::GradientStaging(const Setup& setup, Core& core, Hardware& hardware, ModelStates& model)
    : setup_(setup),
      core_(core),
      model_(model),
      memory_(hardware.host_budget, setup.plan.staging_buffers * setup.plan.staging_buffer_bytes,
              "staging of gradients"),
      buffers_(static_cast<size_t>(setup.plan.staging_buffers)) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& buffer = buffers_[i];
    buffer.owner = this;
    buffer.memory = memory_.data() + static_cast<int64_t>(i) * setup.plan.staging_buffer_bytes;
    buffer.transfer.memory = buffer.memory;
    buffer.transfer.on_complete = &GradientStaging::on_transfer;
    buffer.transfer.context = &buffer;
  }
  if (memory_.bytes() > 0) core.store->register_memory(memory_.span());
}

int64_t GradientStaging::held_most() const {
  return std::max<int64_t>(1, setup_.plan.staging_buffers / 2);
}

GradientStaging::Buffer* GradientStaging::find(int32_t chunk) {
  const auto found =
      std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.chunk == chunk; });
  return found == buffers_.end() ? nullptr : &*found;
}

GradientStaging::Buffer* GradientStaging::find(State state) {
  const auto found =
      std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& b) { return b.state == state; });
  return found == buffers_.end() ? nullptr : &*found;
}

/// Of those that nobody holds.
GradientStaging::Buffer* GradientStaging::least_recent() {
  Buffer* least = nullptr;
  for (Buffer& buffer : buffers_) {
    if (buffer.state != State::open || buffer.held) continue;
    if (least == nullptr || buffer.last_use < least->last_use) least = &buffer;
  }
  return least;
}

std::byte* GradientStaging::open(int32_t chunk) {
  while (true) {
    core_.check();
    Buffer* buffer = find(chunk);
    if (buffer == nullptr) {
      buffer = find(State::free);
      if (buffer != nullptr) begin(*buffer, chunk);
    }
    if (buffer != nullptr && buffer->state != State::writing) {
      buffer->held = true;
      buffer->last_use = ++uses_;
      return buffer->memory;
    }
    // All are in use, or the chunk is just on its way out. What waits for more of its chunk goes only when
    // nothing else will come free.
    if (find(State::writing) == nullptr) {
      Buffer* least = least_recent();
      if (least == nullptr) throw std::logic_error("more gradients are held than staging has buffers for");
      put_away(*least);
      continue;
    }
    const Buffer* awaited = buffer;
    core_.wait(
        [&]() REQUIRES(engine_mutex) {
          return awaited != nullptr ? awaited->chunk != chunk : find(State::free) != nullptr;
        },
        Cause::staging, setup_.layout.chunks[chunk].unit);
  }
}

/// Takes a free buffer for a chunk.
void GradientStaging::begin(Buffer& buffer, int32_t chunk) {
  const ChunkState& state = model_.chunks[chunk];
  buffer.chunk = chunk;
  buffer.changed = false;
  buffer.state = State::open;
  if (state.gradient_extent.empty()) return;
  buffer.state = State::reading;
  buffer.transfer.kind = io::Transfer::Kind::read;
  buffer.transfer.priority = io::Transfer::Priority::demand;
  buffer.transfer.extent = state.gradient_extent;
  core_.store.submit(buffer.transfer);
}

void GradientStaging::wait(int32_t chunk) {
  const Buffer* buffer = find(chunk);
  core_.wait([&]() REQUIRES(engine_mutex) { return buffer->state == State::open; }, Cause::staging,
             setup_.layout.chunks[chunk].unit);
}

void GradientStaging::close(int32_t chunk, Closing closing) {
  Buffer& buffer = *find(chunk);
  buffer.held = false;
  buffer.changed = buffer.changed || closing != Closing::unchanged;
  if (closing == Closing::complete) write(buffer);
}

void GradientStaging::put_away(Buffer& buffer) {
  if (buffer.changed) {
    write(buffer);
  } else {
    free(buffer);
  }
}

/// The store may have to lengthen its files for the new extent, so it is asked without the lock. While it is
/// asked the buffer stays `open`, and it stays so where the store refuses: the buffer is then the only place
/// that has the gradient, and a later call writes it.
void GradientStaging::write(Buffer& buffer) {
  ChunkState& state = model_.chunks[buffer.chunk];
  core_.store.give_up(state.gradient_extent);
  const int64_t bytes = setup_.layout.chunks[buffer.chunk].elements * optim::bytes(state.gradient_element);
  const io::Extent extent = core_.store.allocate(bytes);
  buffer.state = State::writing;
  buffer.transfer.kind = io::Transfer::Kind::write;
  buffer.transfer.priority = io::Transfer::Priority::write_behind;
  buffer.transfer.extent = extent;
  core_.store.submit(buffer.transfer);
}

void GradientStaging::on_transfer(io::Transfer& transfer) noexcept {
  Buffer& buffer = *static_cast<Buffer*>(transfer.context);
  GradientStaging& self = *buffer.owner;
  Core& core = self.core_;
  const MutexLock guard(core.mutex());
  core.store.completed(transfer);
  if (transfer.error) {
    return core.fail(fmt::format("gradients of {}: {}",
                                 self.setup_.layout.units[self.setup_.layout.chunks[buffer.chunk].unit].name,
                                 transfer.error->message()));
  }
  if (buffer.state == State::reading) {
    buffer.state = State::open;
  } else {
    self.model_.chunks[buffer.chunk].gradient_extent = transfer.extent;
    self.free(buffer);
  }
  core.changed.notify_all();
}

void GradientStaging::free(Buffer& buffer) {
  if (setup_.config.poison)
    std::memset(buffer.memory, 0xFF, static_cast<size_t>(setup_.plan.staging_buffer_bytes));
  buffer.chunk = -1;
  buffer.held = false;
  buffer.state = State::free;
}

void GradientStaging::flush() {
  for (Buffer& buffer : buffers_) {
    if (buffer.state == State::open) put_away(buffer);
  }
  core_.wait(
      [&]() REQUIRES(engine_mutex) {
        return std::all_of(buffers_.begin(), buffers_.end(),
                           [](const Buffer& b) { return b.state == State::free; });
      },
      Cause::staging);
}

void GradientStaging::discard(const std::function<bool(int32_t)>& is_gone) {
  if (buffers_.empty()) return;
  const auto goes = [&](const Buffer& buffer) { return buffer.chunk >= 0 && is_gone(buffer.chunk); };
  for (Buffer& buffer : buffers_) {
    if (buffer.state == State::open && goes(buffer)) free(buffer);
  }
  core_.wait([&]() REQUIRES(engine_mutex) { return std::none_of(buffers_.begin(), buffers_.end(), goes); },
             Cause::staging);
  for (int32_t c = 0; c < std::ssize(model_.chunks); ++c) {
    ChunkState& state = model_.chunks[c];
    if (!state.pending && is_gone(c)) core_.store.give_up(state.gradient_extent);
  }
}

}  // namespace overspill::engine
