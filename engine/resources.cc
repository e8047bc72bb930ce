#include "engine/resources.h"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include "engine/collectives/self_communicator.h"
#include "engine/partition/layout.h"
#include "engine/plan/plan.h"
#include "io/file_store.h"
#include "io/memory_store.h"
#include "io/stall_watch.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/host_device.h"
#include "kernels/simulated_device.h"

namespace overspill::engine {
namespace {

/// Of "cuda:1" 1, of "cuda" 0; nothing of any other name.
std::optional<int> cuda_ordinal(std::string_view name) {
  if (name == "cuda") return 0;
  constexpr std::string_view kPrefix = "cuda:";
  int ordinal = 0;
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const auto [end, error] = std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), ordinal);
  return error == std::errc() && end == name.data() + name.size() ? std::optional(ordinal) : std::nullopt;
}

io::Patience patience_of(const Config& config, const ResourceOptions& options) {
  io::Patience patience = options.patience;
  if (config.io_deadline_ms > 0)
    patience.stall.give_up_after = std::chrono::milliseconds(config.io_deadline_ms);
  return patience;
}

std::unique_ptr<io::Store> make_store(const Config& config, const ResourceOptions& options,
                                      const Plan& plan) {
  if (options.io_backend == "memory") {
    io::Faults faults;
    faults.seed = options.seed;
    return io::make_memory_store(plan.nvme_reserve_bytes, faults);
  }
  io::FileStoreOptions files;
  files.paths = config.nvme;
  files.job = config.job;
  files.patience = patience_of(config, options);
  if (options.io_backend == "io_uring") {
    files.backend = io::FileStoreOptions::Backend::uring;
  } else if (options.io_backend == "threads") {
    files.backend = io::FileStoreOptions::Backend::threads;
  } else if (options.io_backend != "auto") {
    throw std::invalid_argument(
        fmt::format("unknown io_backend '{}': one of auto, io_uring, threads, memory", options.io_backend));
  }
  return io::make_file_store(files);
}

/// Beside a device with work of its own two cores are left to those who give it work: the caller, who must
/// not fall behind it, and the thread that takes gradients in.
int workers_beside(const kernels::Device& device) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, device.shares_host_memory() ? cores : cores - 2);
}

}  // namespace

std::unique_ptr<kernels::Device> make_device(const std::string& name, uint64_t seed) {
  if (name == "host") return kernels::make_host_device();
  if (const auto ordinal = cuda_ordinal(name)) return kernels::make_cuda_device(*ordinal);
  if (name == "simulated") {
    kernels::SimulatedDeviceOptions simulated;
    simulated.seed = seed;
    return kernels::make_simulated_device(simulated);
  }
  throw std::invalid_argument(
      fmt::format("unknown device '{}': one of host, cuda, cuda:1 and so on, simulated", name));
}

Resources make_resources(const std::vector<UnitSpec>& units, const Config& config,
                         const ResourceOptions& options, std::unique_ptr<Communicator> ranks) {
  Resources resources;
  resources.ranks.communicator = ranks != nullptr ? std::move(ranks) : make_self_communicator();
  try {
    resources.device =
        options.given_device != nullptr ? options.given_device : make_device(options.device, options.seed);
    resources.executor =
        optim::make_executor(config.threads > 0 ? config.threads : workers_beside(*resources.device));
    const Layout layout = make_layout(units, config.chunk_elements, resources.ranks.communicator->rank(),
                                      resources.ranks.communicator->world(), config.stage);
    const Plan plan = make_plan(layout, config, traits_of(*resources.device, *resources.ranks.communicator));
    if (plan.nvme_reserve_bytes > 0) {
      resources.store = make_store(config, options, plan);
      resources.watch = resources.store->watch();
    }
    if (resources.watch == nullptr) {
      resources.watch = std::make_shared<io::StallWatch>(patience_of(config, options).stall);
      resources.watch->start();
    }
  } catch (const std::exception& error) {
    resources.ranks.abort(
        error.what());  // else the other ranks would wait for an engine that was never built
    throw;
  }
  return resources;
}

}  // namespace overspill::engine
