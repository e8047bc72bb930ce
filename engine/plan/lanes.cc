#include "engine/plan/lanes.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace overspill::engine {

const char* lane_name(Lane lane) {
  switch (lane) {
    case Lane::compute:
      return "compute";
    case Lane::update:
      return "update";
    case Lane::read:
      return "read";
    case Lane::write:
      return "write";
    case Lane::up:
      return "up";
    case Lane::down:
      return "down";
    case Lane::network:
      return "network";
  }
  return "?";
}

void Lanes::ask(Lane lane, double seconds, int64_t urgency, std::function<void()> done) {
  queues_[static_cast<size_t>(lane)].waiting.emplace(std::pair(urgency, asked_++),
                                                     Item{seconds, std::move(done)});
}

void Lanes::move(Lane lane, double bytes, int64_t urgency, std::function<void()> done) {
  if (bytes <= 0) return done();
  const double speed = rates_.bytes_per_s[static_cast<size_t>(lane)];
  if (speed <= 0)
    throw std::invalid_argument(
        fmt::format("{:.0f} bytes have to pass the lane {}, which has no speed", bytes, lane_name(lane)));
  bytes_[static_cast<size_t>(lane)] += bytes;
  const double latency = lane == Lane::network ? rates_.network_latency_s : 0;
  ask(lane, latency + bytes / speed, urgency, std::move(done));
}

/// The disks first, since a lane that gets half of them needs half of its share of the processor.
std::array<double, kLanes> Lanes::speeds() const {
  std::array<double, kLanes> speeds{};
  for (size_t i = 0; i < kLanes; ++i) speeds[i] = queues_[i].busy ? 1 : 0;
  if (busy(Lane::read) && busy(Lane::write)) {
    const double read = rates_.bytes_per_s[static_cast<size_t>(Lane::read)];
    const double write = rates_.bytes_per_s[static_cast<size_t>(Lane::write)];
    const double both = rates_.disk_bytes_per_s > 0 ? rates_.disk_bytes_per_s : std::max(read, write);
    for (const Lane lane : {Lane::read, Lane::write})
      speeds[static_cast<size_t>(lane)] = std::min(1.0, both / (read + write));
  }
  double wanted = 0;
  for (size_t i = 0; i < kLanes; ++i) wanted += speeds[i] * rates_.processor[i];
  for (size_t i = 0; i < kLanes; ++i) {
    if (wanted > 1 && rates_.processor[i] > 0) speeds[i] /= wanted;
  }
  return speeds;
}

bool Lanes::pass() {
  for (Queue& queue : queues_) {
    if (queue.busy || queue.waiting.empty()) continue;
    queue.served = std::move(queue.waiting.begin()->second);
    queue.waiting.erase(queue.waiting.begin());
    queue.busy = true;
  }
  const std::array<double, kLanes> speed = speeds();
  double least = std::numeric_limits<double>::infinity();
  size_t first = kLanes;
  for (size_t i = 0; i < kLanes; ++i) {
    if (!queues_[i].busy) continue;
    const double left = queues_[i].served.seconds / speed[i];
    if (left < least) {
      least = left;
      first = i;
    }
  }
  if (first == kLanes) return false;
  now_ += least;
  for (size_t i = 0; i < kLanes; ++i) {
    if (!queues_[i].busy) continue;
    busy_s_[i] += least;
    queues_[i].served.seconds = std::max(0.0, queues_[i].served.seconds - least * speed[i]);
  }
  queues_[first].busy = false;
  const std::function<void()> done = std::move(queues_[first].served.done);
  done();
  return true;
}

}  // namespace overspill::engine
