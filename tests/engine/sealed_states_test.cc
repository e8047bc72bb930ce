// States checked block by block around the update (io/sealed.h): chunks of several blocks, segments that
// begin and end inside of them, checked against the scalar reference; and what a flipped bit in any block
// comes to.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>

#include "engine/resources.h"
#include "io/memory_store.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using optim::Format;

std::vector<engine::UnitSpec> wide_units() {
  return {{"wide",
           Format::exact,
           "BF16",
           {{"wide.a", {300, 200}, 0, {}}, {"wide.b", {777}, 1, {}}, {"wide.c", {250, 200}, 0, {}}}},
          {"plain", Format::fp32, "F32", {{"plain.a", {70001}, 0, {}}, {"plain.b", {3}, 1, {}}}}};
}

engine::Config wide_config() {
  engine::Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {"/unused"};
  config.chunk_elements = 128 << 10;
  config.placement = engine::Placement::nvme;
  config.max_grad_norm = 1.0;
  config.poison = true;
  config.threads = 2;
  return config;
}

std::unique_ptr<engine::Engine> wide_engine(const io::Faults& faults, const engine::Config& config) {
  engine::ResourceOptions options;
  options.io_backend = "memory";
  engine::Resources resources = engine::make_resources(wide_units(), config, options);
  resources.store = io::make_memory_store(64 << 20, faults, 64 << 10);
  auto engine = std::make_unique<engine::Engine>(wide_units(), config, std::move(resources));
  toy_load(*engine);
  return engine;
}

TEST(SealedStates, OfSeveralBlocksEqualTheScalarReference) {
  for (const bool speculate : {false, true}) {
    engine::Config config = wide_config();
    config.speculate = speculate;
    if (speculate) config.max_grad_norm = 1e9;
    const auto engine = wide_engine({}, config);
    ToyReference reference(wide_units());
    for (int step = 0; step < 4; ++step) {
      const ToyStep taken = toy_step(*engine, step, 1, 0);
      reference.advance(step, 1, taken.result.clip,
                        [&](int u, int s, int rank) { return toy_skips(u, s, step, rank); });
    }
    const std::vector<float> found = toy_contents(*engine);
    const std::vector<float> expected = reference.contents();
    ASSERT_EQ(found.size(), expected.size());
    EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)), 0);
    EXPECT_EQ(engine->stats().guesses_taken > 0, speculate);
  }
}

TEST(SealedStates, AFlippedBitOfAnyBlockIsAnErrorThatNamesIt) {
  int failed = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    std::unique_ptr<engine::Engine> engine;
    try {
      engine = wide_engine({.seed = seed, .bit_flip_at_rest = 0.01}, wide_config());
      for (int step = 0; step < 3; ++step) toy_step(*engine, step, 1, 0);
    } catch (const engine::EngineFailed& error) {
      const std::string what = error.what();
      for (const char* part : {"read failed: corrupt data", "memory at offset ", " bytes", "checksum "})
        EXPECT_NE(what.find(part), std::string::npos) << what;
      // Weights are checked by the store.
      if (what.find("states of ") != std::string::npos) ++failed;
      if (engine == nullptr) continue;
      EXPECT_THROW(engine->acquire(0), engine::EngineFailed);
    }
  }
  EXPECT_GE(failed, 5) << "of 40";
}

}  // namespace
}  // namespace overspill::testing
