#include "bindings/engine_dicts.h"

#include <pybind11/stl.h>

#include <string>

#include "bindings/bindings.h"

namespace overspill::bindings {
namespace {

namespace py = pybind11;

py::dict tiers_dict(const engine::Plan::Tiers& tiers) {
  py::dict out;
  out["device"] = tiers.device;
  out["host"] = tiers.host;
  out["nvme"] = tiers.nvme;
  return out;
}

py::list homes_list(const engine::Plan& plan) {
  py::list out;
  for (const engine::Plan::UnitHome& home : plan.homes) {
    py::dict unit;
    unit["name"] = home.name;
    unit["parameters"] = home.parameters;
    unit["trainable"] = home.trainable;
    unit["weights_bytes"] = tiers_dict(home.weights);
    unit["states_bytes"] = tiers_dict(home.states);
    out.append(unit);
  }
  return out;
}

py::dict latency_dict(const io::LatencyStats& stats) {
  py::dict out;
  out["count"] = stats.count;
  out["p50_ns"] = stats.p50_ns;
  out["p99_ns"] = stats.p99_ns;
  out["p999_ns"] = stats.p999_ns;
  out["max_ns"] = stats.max_ns;
  return out;
}

py::dict retries_dict(const io::RetryStats& stats) {
  py::dict out;
  out["reads"] = stats.reads;
  out["writes"] = stats.writes;
  out["shortages"] = stats.shortages;
  out["checksums"] = stats.checksums;
  out["at_once"] = stats.at_once;
  return out;
}

py::dict path_dict(const io::PathStats& stats) {
  py::dict out;
  out["path"] = text(stats.path);
  out["read_bytes"] = stats.bytes_read;
  out["written_bytes"] = stats.bytes_written;
  out["in_flight"] = stats.in_flight;
  out["in_flight_max"] = stats.in_flight_max;
  out["busy_seconds"] = static_cast<double>(stats.busy_ns) * 1e-9;
  out["wait_seconds"] = static_cast<double>(stats.wait_ns) * 1e-9;
  out["read_bytes_per_s"] = stats.read_bytes_per_s;
  out["write_bytes_per_s"] = stats.write_bytes_per_s;
  out["share"] = stats.share;
  out["reserved_bytes"] = stats.reserved_bytes;
  out["numa_node"] = stats.numa_node;
  out["access"] = stats.access;
  out["closed"] = text(stats.closed);
  out["retries"] = retries_dict(stats.retries);
  out["stalls"] = stats.stalls.count;
  out["longest_stall_seconds"] = static_cast<double>(stats.stalls.longest_ns) * 1e-9;
  out["stalled_seconds"] = static_cast<double>(stats.stalls.now_ns) * 1e-9;
  out["demand_reads"] = latency_dict(stats.demand_reads);
  out["prefetch_reads"] = latency_dict(stats.prefetch_reads);
  out["writes"] = latency_dict(stats.writes);
  return out;
}

}  // namespace

py::dict plan_dict(const engine::Plan& plan) {
  py::dict out;
  out["host_budget_bytes"] = plan.host_budget_bytes;
  out["host_bytes"] = plan.host_bytes();
  out["weights_host_bytes"] = plan.weights_host_bytes;
  out["states_host_bytes"] = plan.states_host_bytes;
  out["gradients_host_bytes"] = plan.gradients_host_bytes;
  out["gradient_pool_bytes"] = plan.pool_host_bytes();
  out["sums_device_bytes"] = plan.sums_device_bytes;
  out["gradients_nvme_bytes"] = plan.gradients_nvme_bytes;
  out["staging_bytes"] = plan.staging_buffers * plan.staging_buffer_bytes;
  out["ring_slots"] = plan.ring_slots;
  out["ring_slot_bytes"] = plan.ring_slot_bytes;
  out["gather_host_bytes"] = plan.gather_host_bytes;
  out["gather_device_bytes"] = plan.gather_device_bytes;
  out["units_device_bytes"] = plan.units_device_bytes;
  out["accumulators_device_bytes"] = plan.accumulators_device_bytes;
  out["squares_device_bytes"] = plan.squares_device_bytes;
  out["units_on_device"] = plan.units_on_device();
  out["activations_host_bytes"] = plan.activations_host_bytes;
  out["scratch_bytes"] = plan.access_bytes + plan.exchange_bytes;
  out["weights_nvme_bytes"] = plan.weights_nvme_bytes;
  out["states_nvme_bytes"] = plan.states_nvme_bytes;
  out["nvme_reserve_bytes"] = plan.nvme_reserve_bytes;
  out["nvme_read_bytes_per_step"] = plan.nvme_read_bytes_per_step;
  out["nvme_written_bytes_per_step"] = plan.nvme_written_bytes_per_step;
  out["units"] = homes_list(plan);
  return out;
}

py::dict stats_dict(engine::Engine& self) {
  engine::Stats stats;
  {
    const py::gil_scoped_release release;
    stats = self.stats();
  }
  py::dict out;
  out["step"] = stats.step;
  out["skipped_steps"] = stats.skipped_steps;
  out["host_budget_bytes"] = stats.host_budget_bytes;
  out["host_used_bytes"] = stats.host_used_bytes;
  out["host_peak_bytes"] = stats.host_peak_bytes;
  out["device_bytes"] = self.plan().device_bytes();
  out["nvme_allocated_bytes"] = stats.store.allocated_bytes;
  out["nvme_reserved_bytes"] = stats.store.reserved_bytes;
  out["nvme_read_bytes"] = stats.store.bytes_read;
  out["nvme_written_bytes"] = stats.store.bytes_written;
  out["wait_seconds"] = static_cast<double>(stats.wait_ns) * 1e-9;
  out["updates"] = stats.updates;
  out["guesses_taken"] = stats.guesses_taken;
  out["guesses_dropped"] = stats.guesses_dropped;
  out["guesses_unfinished"] = stats.guesses_unfinished;
  out["trace_departures"] = stats.trace_departures;
  out["gathers"] = stats.gathers;
  out["activations_kept_bytes"] = stats.activations.put_bytes;
  out["activations_written_bytes"] = stats.activations.written_bytes;
  out["activations_read_bytes"] = stats.activations.read_bytes;
  out["activations_demand_reads"] = stats.activations.demand_reads;
  out["activations_wait_seconds"] = static_cast<double>(stats.activations.wait_ns) * 1e-9;
  py::list paths;
  for (const io::PathStats& path : stats.store.paths) paths.append(path_dict(path));
  out["paths"] = paths;
  out["backend"] = stats.store.backend.empty() ? std::string("memory only") : stats.store.backend;
  return out;
}

}  // namespace overspill::bindings
