// Thousands of simulated runs (simulation.h). Repeat one: OVERSPILL_SEED=<seed> prints its every event;
// OVERSPILL_SEEDS=<count> runs more or fewer.
#include "tests/engine/simulation.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tests/engine/around_store.h"
#include "tests/io/store_test_util.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSeeds = kWatched ? 400 : 10'000;
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
            fmt::format("test-of-overspill-simulation-{}", ::getpid());
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

class Simulations : public ::testing::TestWithParam<int64_t> {};

TEST_P(Simulations, IsExactOrSaysWhatIsWrong) {
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

// ---- the simulation itself

TEST(Simulation, ReplaysByteForByte) {
  int64_t bytes = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    const SimulationResult once = run(seed, {.journal = true});
    const SimulationResult again = run(seed, {.journal = true});
    ASSERT_EQ(once.journal, again.journal) << once.setup;
    ASSERT_EQ(once.counts, again.counts) << once.setup;
    ASSERT_GT(once.journal.size(), 1000U);
    bytes += static_cast<int64_t>(once.journal.size());
  }
  EXPECT_NE(run(1, {.journal = true}).journal, run(2, {.journal = true}).journal);
  fmt::print("60 seeds twice, {} bytes of journal\n", bytes);
}

/// Says that a read is done before its bytes have come: as if nobody had waited for it.
class HastyStore : public AroundStore {
 public:
  HastyStore(std::unique_ptr<io::MemoryStore> store, std::shared_ptr<io::VirtualTime> time)
      : AroundStore(std::move(store)), time_(std::move(time)) {}

  void submit(io::Transfer& transfer) override {
    if (transfer.kind == io::Transfer::Kind::write) return AroundStore::submit(transfer);
    io::Transfer& late = late_.emplace_back(transfer);
    late.on_complete = [](io::Transfer&) noexcept {};
    // Whoever reads a second time frees its memory as soon as it believes to have the bytes.
    if (transfer.second_reading) late.memory = memory_.emplace_back(transfer.extent.bytes).data();
    AroundStore::submit(late);
    time_->after(0, [&transfer] { transfer.on_complete(transfer); });
  }

 private:
  std::shared_ptr<io::VirtualTime> time_;
  std::deque<io::Transfer> late_;
  std::deque<io::AlignedMemory> memory_;
};

TEST(Simulation, NoticesAReadThatIsNotWaitedFor) {
  int noticed = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const auto hasty = [](auto store, auto time) {
      return std::make_unique<HastyStore>(std::move(store), std::move(time));
    };
    const SimulationResult plain = run(seed, {.quiet = true});
    const SimulationResult result = run(seed, {.wrap = hasty, .quiet = true});
    ASSERT_EQ(plain.violation, "") << plain.setup;
    if (!result.violation.empty()) ++noticed;
  }
  fmt::print("{} of 40 seeds notice\n", noticed);
  EXPECT_GE(noticed, 20) << "delays of 0, and models that live on the host, cannot";
}

/// Forgets a completion.
class ForgetfulStore final : public HastyStore {
 public:
  ForgetfulStore(std::unique_ptr<io::MemoryStore> store, std::shared_ptr<io::VirtualTime> time,
                 int64_t forgotten)
      : HastyStore(std::move(store), std::move(time)), left_(forgotten) {}
  void submit(io::Transfer& transfer) override {
    if (left_-- != 0) HastyStore::submit(transfer);
  }

 private:
  int64_t left_;
};

TEST(Simulation, CallsAHangAHang) {
  const auto forgetful = [](auto store, auto time) {
    return std::make_unique<ForgetfulStore>(std::move(store), std::move(time), 0);
  };
  int hangs = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    if (run(seed, {.wrap = forgetful, .quiet = true}).violation.starts_with("a hang: ")) ++hangs;
  }
  EXPECT_GE(hangs, 15) << "models that live on the host submit nothing";
}

INSTANTIATE_TEST_SUITE_P(Parts, Simulations, ::testing::Range(int64_t{0}, kParts));

}  // namespace
}  // namespace overspill::testing
