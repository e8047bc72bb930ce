#include "engine/plan/plan_text.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/plan/plan_sizes.h"

namespace overspill::engine {
namespace {

/// Bytes of one element, its share of the scales included.
double exact_bytes(const optim::ComponentSpec& spec) {
  return static_cast<double>(spec.bytes(optim::kScaleBlock)) / optim::kScaleBlock;
}

Plan::Holding frozen_holding(const Unit& unit) {
  return {"frozen", fmt::format("hi {}", unit.element_bytes), 0, static_cast<double>(unit.element_bytes)};
}

/// Of the numbers that the bytes stand for. Units differ by what rounds their last blocks up: to three digits
/// they are alike.
Plan::Holding packed_holding(const Unit& unit) {
  double bytes = 0;
  double parameters = 0;
  for (const Segment& segment : unit.segments) {
    bytes += static_cast<double>(segment.elements * unit.element_bytes);
    parameters += static_cast<double>(segment.parameters);
  }
  const double each = bytes / parameters;
  return {fmt::format("frozen, {}", unit.packing), fmt::format("{:.3g}", each), 0, each};
}

}  // namespace

std::vector<Plan::Holding> holdings_of(const Layout& layout) {
  std::vector<Plan::Holding> holdings;
  for (const Unit& unit : layout.units) {
    Plan::Holding own = unit.packing.empty() ? frozen_holding(unit) : packed_holding(unit);
    if (unit.trainable()) {
      own = {fmt::format("{}, {}", optim::name(unit.optimizer), format_name(unit.format)), "", 0, 0};
      for (const optim::ComponentSpec& spec : unit.components()) {
        own.components +=
            fmt::format("{}{} {:.4g}", own.components.empty() ? "" : ", ", spec.name, exact_bytes(spec));
        own.parameter_bytes += exact_bytes(spec);
      }
    }
    const auto same = [&](const Plan::Holding& h) {
      return h.name == own.name && h.components == own.components;
    };
    auto at = std::find_if(holdings.begin(), holdings.end(), same);
    if (at == holdings.end()) at = holdings.insert(at, own);
    for (const Segment& segment : unit.segments) at->parameters += segment.parameters;
  }
  return holdings;
}

std::string Plan::text() const {
  std::string out;
  const auto row = [&](std::string_view what, int64_t host, int64_t nvme) {
    out +=
        fmt::format("  {:<34} {:>14} {:>14}\n", what, host > 0 ? mib(host) : "-", nvme > 0 ? mib(nvme) : "-");
  };
  out += fmt::format("  {:<34} {:>14} {:>14}\n", "component", "host", "nvme");
  row("weights (hi)", weights_host_bytes, weights_nvme_bytes);
  row("states", states_host_bytes, states_nvme_bytes);
  row("gradients in flight", gradients_host_bytes, gradients_nvme_bytes);
  row(fmt::format("ring ({} slots of {})", ring_slots, mib(ring_slot_bytes)), ring_slots * ring_slot_bytes,
      0);
  if (staging_buffers > 0) {
    row(fmt::format("staging of gradients ({} of {})", staging_buffers, mib(staging_buffer_bytes)),
        staging_buffers * staging_buffer_bytes, 0);
  }
  row("gather arena", gather_host_bytes, 0);
  if (part_chunks > 0) row("weights read in tiles", part_chunks * part_chunk_bytes, 0);
  if (activations_host_bytes > 0) row("arena of activations", activations_host_bytes, 0);
  if (intake_slots > 0) row("gradients from the device", intake_slots * intake_slot_bytes, 0);
  if (second_weights > 0) row("second weights of guessed updates", second_weights * second_weights_bytes, 0);
  if (held_twice_bytes > 0) row("second versions of guessed updates", held_twice_bytes, 0);
  if (pool_host_bytes() > 0) row("gradients until they are summed", pool_host_bytes(), 0);
  row("scratch", access_bytes + exchange_bytes + serve_bytes + squares_device_bytes, 0);
  row("sum", host_bytes(), nvme_bytes());
  out += fmt::format("  {:<34} {:>14}\n", "budget", mib(host_budget_bytes));
  for (const Holding& holding : holdings) {
    out += fmt::format("  {}: {} parameters of {:.4g} bytes ({})\n", holding.name, holding.parameters,
                       holding.parameter_bytes, holding.components);
  }
  if (gather_device_bytes > 0)
    out += fmt::format("  {:<34} {:>14}\n", "gather arena on the device", mib(gather_device_bytes));
  if (sums_device_bytes > 0)
    out += fmt::format("  {:<34} {:>14}\n", "gradients and their sums there", mib(sums_device_bytes));
  if (accumulators_device_bytes > 0)
    out += fmt::format("  {:<34} {:>14}\n", "sums of micro-batches there", mib(accumulators_device_bytes));
  if (units_device_bytes > 0) {
    out += fmt::format("  {:<34} {:>14}\n",
                       fmt::format("{} of {} units live there", units_on_device(), on_device.size()),
                       mib(units_device_bytes));
  }
  if (nvme_bytes() > 0) {
    out += fmt::format(
        "  NVMe: {} reserved ({} for checkpoints, one being taken, and what is on its way); a step reads {} "
        "and writes {}\n",
        mib(nvme_reserve_bytes), mib(nvme_reserve_bytes - nvme_bytes()), mib(nvme_read_bytes_per_step),
        mib(nvme_written_bytes_per_step));
  }
  return out;
}

}  // namespace overspill::engine
