// What the tests with real faults share: a folder with an awkward name, engines on it, what an error must
// say.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/checkpoint/manifest.h"
#include "engine/engine.h"
#include "engine/resources.h"
#include "io/error.h"
#include "io/file_store.h"
#include "io/store.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

inline constexpr int64_t kMiB = int64_t{1} << 20;

namespace fs = std::filesystem;

/// A folder that is gone afterwards, with a space, quotes and letters that are not ASCII in its name.
class ScratchFolder {
 public:
  explicit ScratchFolder(const fs::path& parent = fs::temp_directory_path()) {
    std::string name = (parent / "test-of-overspill-faults it's \"Größe\" 試-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no scratch folder: " + name);
    path_ = name;
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

struct Rig {
  fs::path nvme;
  engine::Placement placement = engine::Placement::nvme;
  std::string job = "faults";
  std::string backend = "auto";
  io::Patience patience{.retry = {.first_wait = std::chrono::microseconds(100)}, .stall = {}};
  int64_t io_deadline_ms = 0;
  std::optional<fs::path> second_nvme = std::nullopt;  // taken to be as fast as the first
};

/// The toy model, small chunks; a few transfers for each step.
inline std::unique_ptr<engine::Engine> make_engine(const Rig& rig) {
  engine::Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {rig.nvme};
  config.job = rig.job;
  config.threads = 1;
  config.max_grad_norm = 1.0;
  config.chunk_elements = 4096;
  config.placement = rig.placement;
  config.checkpoints_kept = 3;
  config.io_deadline_ms = rig.io_deadline_ms;
  engine::ResourceOptions options{.io_backend = rig.backend, .seed = 1};
  options.patience = rig.patience;
  engine::Resources resources = make_resources(toy_units(), config, options);
  if (rig.second_nvme) {
    resources.store.reset();  // it has the name of the job
    resources.store = io::make_file_store({.paths = {rig.nvme, *rig.second_nvme},
                                           .job = rig.job,
                                           .speeds = {{1e9, 1e9}, {1e9, 1e9}},
                                           .patience = rig.patience,
                                           .result_hook = {}});
    resources.watch = resources.store->watch();
  }
  return std::make_unique<engine::Engine>(toy_units(), config, std::move(resources));
}

/// Trains beside the engine under test with everything on the host: what must come out.
class Shadow {
 public:
  Shadow() {
    engine::Config config;
    config.host_budget_bytes = 64 << 20;
    config.threads = 1;
    config.max_grad_norm = 1.0;
    config.chunk_elements = 4096;
    engine_ = std::make_unique<engine::Engine>(toy_units(), config, make_resources(toy_units(), config, {}));
    toy_load(*engine_);
  }
  /// Weights and states after `step` steps; steps never go back.
  std::vector<float> at(int64_t step) {
    if (engine_->stats().step > step) throw std::logic_error("a shadow does not go back");
    while (engine_->stats().step < step) toy_step(*engine_, static_cast<int>(engine_->stats().step), 1, 0);
    return toy_contents(*engine_);
  }

 private:
  std::unique_ptr<engine::Engine> engine_;
};

/// What a checkpoint holds, read by an engine with everything on the host.
inline std::vector<float> contents_of(const fs::path& checkpoint) {
  engine::Config config;
  config.host_budget_bytes = 64 << 20;
  config.threads = 1;
  config.max_grad_norm = 1.0;
  config.chunk_elements = 4096;
  engine::Engine reader(toy_units(), config, make_resources(toy_units(), config, {}));
  reader.load(checkpoint);
  return toy_contents(reader);
}

/// Steps until the engine fails; the message of the EngineFailed. At most `steps_max` more steps, "" if none
/// failed. Every step that was taken is compared with the shadow's at the end by the caller.
inline std::string train_until_failure(engine::Engine& engine, int steps_max) {
  try {
    const auto first = static_cast<int>(engine.stats().step);
    for (int step = first; step < first + steps_max; ++step) toy_step(engine, step, 1, 0);
    engine.synchronize();
  } catch (const engine::EngineFailed& error) {
    return error.what();
  }
  return "";
}

/// The message of the CheckpointError or StoreError of `call`, the only two types it may throw.
inline std::string refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const engine::CheckpointError& error) {
    return error.what();
  } catch (const io::StoreError& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

inline void expect_says(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is missing in: " << message;
}

inline std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error))
    names.push_back(entry.path().filename().string());
  return names;
}

/// Whether `holds` became true within a generous time.
inline bool eventually(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

inline bool long_run() {
  const char* wanted = ::getenv("OVERSPILL_LONG");
  return wanted != nullptr && *wanted == '1';
}

}  // namespace overspill::testing
