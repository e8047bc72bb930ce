// What an engine computes with on its machine: the device, the workers, and the budget of host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "cpu_optim/executor.h"
#include "engine/memory/budget.h"
#include "kernels/device.h"

namespace overspill::engine {

struct Hardware {
  Hardware(std::shared_ptr<kernels::Device> device_in, std::unique_ptr<optim::Executor> executor_in,
           int64_t host_budget_bytes)
      : shared_device(std::move(device_in)),
        executor(std::move(executor_in)),
        workers(executor->threads()),
        host_budget("host", host_budget_bytes) {}

  kernels::Device& device() const { return *shared_device; }

  const std::shared_ptr<kernels::Device> shared_device;  // with the framework's buffers, which outlive it
  std::unique_ptr<optim::Executor> executor;             // null once the engine is closed
  const int workers;                                     // threads of the executor, known after close, too
  Budget host_budget;
};

}  // namespace overspill::engine
