#include "engine/schedule/context.h"

#include <fmt/format.h>

#include "kernels/clock.h"

namespace overspill::engine {
namespace {

bool allowed(Residency from, Residency to) {
  switch (to) {
    case Residency::reading:
      return from == Residency::home;
    case Residency::staged:
      return from == Residency::reading;
    case Residency::updating:
      return from == Residency::staged || from == Residency::home;
    case Residency::writing:
      return from == Residency::updating;
    case Residency::home:
      return from != Residency::reading && from != Residency::home;
  }
  return false;
}

Activity activity_of(const io::Transfer& transfer) {
  return transfer.kind == io::Transfer::Kind::read ? Activity::read : Activity::write;
}

/// Carves an arena: weights and gradients of a unit are contiguous, states lie chunk by chunk.
class Carver {
 public:
  explicit Carver(std::byte* next) : next_(next) {}
  std::byte* take(int64_t bytes) {
    std::byte* taken = next_;
    next_ += bytes;
    return taken;
  }

 private:
  std::byte* next_;
};

}  // namespace

void ChunkState::become(Residency next) {
  if (!allowed(residency, next)) {
    throw std::logic_error(fmt::format("chunk residency: {} cannot become {}", static_cast<int>(residency),
                                       static_cast<int>(next)));
  }
  residency = next;
}

Context::Context(Layout layout_in, Plan plan_in, Config config_in, Resources resources_in)
    : layout(std::move(layout_in)),
      plan(std::move(plan_in)),
      config(std::move(config_in)),
      resources(std::move(resources_in)),
      traits(traits_of(*resources.device, *resources.communicator)),
      workers(resources.executor->threads()),
      host_budget("host", config.host_budget_bytes),
      linked(*resources.device, host_budget, plan.weights_host_bytes + plan.gradients_host_bytes,
             "weights and gradients"),
      states(host_budget, plan.states_host_bytes, "states"),
      second(host_budget, plan.held_twice_bytes, "second versions of guessed updates"),
      units(layout.units.size()),
      chunks(layout.chunks.size()),
      queues(*resources.device),
      trace(static_cast<int32_t>(layout.units.size())),
      meter(now_ns, layout.units.size()) {
  demanded_units.reserve(units.size());
  Carver carver(linked.data());
  Carver states_carver(states.data()), second_carver(second.data());
  for (size_t u = 0; u < units.size(); ++u) {
    const Unit& unit = layout.units[u];
    UnitState& state = units[u];
    state.factors.resize(unit.segments.size());
    state.updated.resize(unit.segments.size());
    state.steps.resize(unit.segments.size());
    state.guessed.resize(unit.segments.size());
    state.guessed_factors.resize(unit.segments.size());
    if (held_whole(static_cast<int32_t>(u))) {
      state.whole = carver.take(unit.bytes());
      state.home = state.whole + layout.rank * unit.shard_bytes();
      state.gathered = Gathered::local;
    } else if (!plan.weights_on_nvme[u] && !plan.on_device[u]) {
      state.home = carver.take(unit.shard_bytes());
    }
    if (plan.on_device[u]) continue;
    carve_gradients(unit, state, carver);
    for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
      if (state.home != nullptr) chunks[c].home[0] = state.home + layout.chunks[c].begin * unit.element_bytes;
      for (Component component : kAllComponents) {
        const int64_t bytes = plan.held_twice[c] ? component_bytes(c, component) : 0;
        if (bytes > 0) chunks[c].second[static_cast<size_t>(component)] = second_carver.take(bytes);
      }
      if (plan.states_on_nvme[c]) continue;
      for (Component component : kAllComponents) {
        const int64_t bytes = component == Component::hi ? 0 : component_bytes(c, component);
        if (bytes > 0) chunks[c].home[static_cast<size_t>(component)] = states_carver.take(bytes);
      }
    }
  }
  if (carver.take(0) != linked.data() + linked.bytes() ||
      states_carver.take(0) != states.data() + states.bytes() ||
      second_carver.take(0) != second.data() + second.bytes()) {
    throw std::logic_error("the arenas' sizes differ from what the plan carves out of them");
  }
}

/// A unit's gradients lie together where none of them is spilled, and where they are not summed as they come.
template <class Carver>
void Context::carve_gradients(const Unit& unit, UnitState& state, Carver& carver) {
  const int64_t element_bytes = gradient_element_bytes(unit.format, config.gradient_accumulation);
  bool in_parts = plan.gradients_pooled;
  for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c)
    in_parts = in_parts || plan.gradients_on_nvme[c];
  if (!in_parts) state.gradients = carver.take(unit.elements * element_bytes);
  for (int32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunk_count; ++c) {
    if (unit.trainable())
      chunks[c].gradient_element = gradient_element(*unit.format, config.gradient_accumulation);
    if (!in_parts) {
      chunks[c].gradient = state.gradients + layout.global_begin(layout.chunks[c]) * element_bytes;
    } else if (!plan.gradients_on_nvme[c]) {
      chunks[c].gradient = carver.take(gradient_bytes(c));  // of this rank's shard
    }
  }
}

void Context::demand(int32_t unit) {
  end_demand(unit);
  demanded_units.push_back(unit);
}

/// Gives the lock up for a call to the store, which stays until the call has ended.
class SCOPED_CAPABILITY Context::AtStore {
 public:
  explicit AtStore(Context& context) RELEASE(engine_mutex) : context_(context) {
    ++context_.at_store;
    context_.mutex().unlock();
  }
  ~AtStore() RELEASE() {
    context_.mutex().lock();
    context_.leave_store();
  }
  AtStore(const AtStore&) = delete;
  AtStore& operator=(const AtStore&) = delete;

 private:
  Context& context_;
};

Context::StoreKept::StoreKept(Context& context) : context_(context) {
  const MutexLock guard(context_.mutex());
  context_.check();
  ++context_.at_store;
}

Context::StoreKept::~StoreKept() {
  const MutexLock guard(context_.mutex());
  context_.leave_store();
}

void Context::leave_store() {
  if (--at_store == 0 && !failure.empty()) changed.notify_all();
}

io::Extent Context::allocate(int64_t bytes) {
  const AtStore at_store(*this);
  return store().allocate(bytes);
}

void Context::wait_for(const kernels::Event& event) {
  const Unlocked unlocked(mutex());
  event.wait();
}

void Context::submit(io::Transfer& transfer) {
  transfer.error.reset();
  meter.begin(activity_of(transfer));
  store().submit(transfer);
}

void Context::completed(const io::Transfer& transfer) {
  meter.end(activity_of(transfer));
  meter.moved(activity_of(transfer), transfer.extent.bytes);
}

io::Extent Context::extent_of(int32_t chunk, Component component) {
  const MutexLock lock(mutex());
  return chunks[chunk].extents[static_cast<size_t>(component)];
}

void Context::release_gradient(ChunkState& state) {
  if (state.gradient_extent.empty()) return;
  store().release(state.gradient_extent);
  state.gradient_extent = {};
}

void Context::fail(const std::string& cause) {
  if (failure.empty()) {
    this->cause = cause;
    failure = cause + (last_checkpoint.empty()
                           ? ". No checkpoint was saved in this run"
                           : fmt::format(". The last complete checkpoint is {}", last_checkpoint));
  }
  changed.notify_all();
}

void Context::check() {
  if (failure.empty()) return;
  told = true;
  if (failure == kClosed) throw std::invalid_argument(failure + " by another thread while this call waited");
  throw EngineFailed("the engine has failed and holds no consistent weights: " + failure);
}

bool Context::poll() {
  if (resources.store == nullptr) return false;
  const AtStore at_store(*this);
  return store().poll();
}

std::unique_ptr<io::Store> Context::take_store() {
  if (failure.empty()) throw std::logic_error("the store of an engine that goes on was to be taken");
  while (at_store > 0) changed.wait(mutex());
  return std::move(resources.store);
}

int64_t now_ns() {
  return kernels::steady_now_ns();
}

}  // namespace overspill::engine
