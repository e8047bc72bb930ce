// Thousands of simulated runs (simulation.h). Repeat one: OVERSPILL_SEED=<seed> prints its every event;
// OVERSPILL_SEEDS=<count> runs more or fewer.
#include "tests/engine/simulation.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kSeeds = 400;
#else
constexpr int64_t kSeeds = 10'000;
#endif
constexpr int64_t kParts = 4;  // tests that ctest runs side by side

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoll(text, nullptr, 10);
}

class ScratchFolder {
 public:
  ScratchFolder() {
    const fs::path memory = "/dev/shm";  // nothing here is synced: a disk would only be in the way
    std::error_code error;
    path_ = (fs::is_directory(memory, error) ? memory : fs::temp_directory_path()) /
            fmt::format("overspill-simulation-{}", ::getpid());
    fs::create_directories(path_);
  }
  ~ScratchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

SimulationResult run(uint64_t seed, SimulationOptions options = {}) {
  const ScratchFolder folder;
  options.seed = seed;
  options.folder = folder.path();
  return simulate(options);
}

class Simulation : public ::testing::TestWithParam<int64_t> {};

TEST_P(Simulation, IsExactOrSaysWhatIsWrong) {
  const int64_t one = from_environment("OVERSPILL_SEED", -1);
  if (one >= 0) {
    const SimulationResult result = run(static_cast<uint64_t>(one), {.journal = true});
    fmt::print("{}\n{}", result.setup, result.journal);
    EXPECT_EQ(result.violation, "");
    return;
  }
  const int64_t seeds = from_environment("OVERSPILL_SEEDS", kSeeds);
  const ScratchFolder folder;
  std::map<std::string, int64_t> counts;
  int failed = 0;
  int64_t ran = 0;
  for (int64_t seed = 1 + GetParam(); seed <= seeds && failed < 5; seed += kParts, ++ran) {
    const SimulationResult result = simulate({.seed = static_cast<uint64_t>(seed), .folder = folder.path()});
    for (const auto& [name, count] : result.counts) {
      counts[name] += count;
      if (name.starts_with("operations: ")) counts["operations"] += count;
    }
    if (result.violation.empty()) continue;
    ++failed;
    ADD_FAILURE() << result.setup << "\n  " << result.violation << "\n  replay: OVERSPILL_SEED=" << seed
                  << " engine_simulation_test --gtest_filter="
                  << "'*Exact*/0'";
  }
  std::string text = fmt::format("{} seeds\n", ran);
  for (const auto& [name, count] : counts) text += fmt::format("  {:<48} {:>10}\n", name, count);
  fmt::print("{}", text);
  EXPECT_GE(counts["operations"], 200 * (ran - failed));
  if (seeds < 1000 || failed > 0) return;
  for (const auto& [name, count] : counts) EXPECT_GT(count, 0) << name << " never happened";
}

INSTANTIATE_TEST_SUITE_P(Parts, Simulation, ::testing::Range(int64_t{0}, kParts));

}  // namespace
}  // namespace overspill::testing
