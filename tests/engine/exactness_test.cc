// Placement never changes a bit (DESIGN 1): losses, weights and moments after 20 steps with clipping active,
// over placements, prefetch depths, engine threads, devices, stores; equal to the scalar reference.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <thread>

#include "engine/collectives/in_process.h"
#include "engine/collectives/self_communicator.h"
#include "engine/resources.h"
#include "io/memory_store.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/host_device.h"
#include "kernels/simulated_device.h"
#include "tests/engine/kernel_count.h"
#include "tests/engine/same_bits.h"
#include "tests/engine/toy_model.h"
#include "tests/reference/update.h"
#include "tests/watched.h"

namespace overspill::testing {
namespace {

using engine::Config;
using engine::Engine;
using engine::Placement;
using engine::Resources;

constexpr int kSteps = kWatched ? 10 : 20;

struct Case {
  Placement placement = Placement::host;
  int64_t prefetch = 4;
  int threads = 2;
  std::string device = "host";
  std::string store = "memory";
  int micro_batches = 1;
  const char* speculation = "";  // "hits": nothing is clipped; "misses": every step is
};

std::string name_of(const Case& c) {
  return fmt::format("{}_depth{}_threads{}_{}_{}_micro{}{}", placement_name(c.placement), c.prefetch,
                     c.threads, c.device, c.store, c.micro_batches, c.speculation);
}

/// Until the program ends.
const std::filesystem::path& scratch() {
  struct Folder {
    std::filesystem::path path =
        std::filesystem::temp_directory_path() / fmt::format("test-of-overspill-engine-test-{}", ::getpid());
    Folder() { std::filesystem::create_directories(path); }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
  static const Folder folder;
  return folder.path;
}

Config config_of(const Case& c) {
  Config config;
  config.host_budget_bytes = 64 << 20;
  config.nvme = {scratch()};
  config.threads = c.threads;
  config.prefetch_units = c.prefetch;
  config.gradient_accumulation = c.micro_batches;
  config.speculate = c.speculation[0] != '\0';
  config.max_grad_norm = c.speculation == std::string("hits") ? 1e9 : 1.0;
  config.chunk_elements = 4096;
  config.placement = c.placement;
  config.poison = true;
  return config;
}

Resources resources_of(const Case& c, const Config& config, const ToyKind& kind = {}) {
  engine::ResourceOptions options;
  options.device = c.device;
  options.io_backend = c.store == "faulty" ? "memory" : c.store;
  options.seed = 7;
  Resources resources = make_resources(toy_units(kind), config, options);
  if (c.store == "faulty" && resources.store != nullptr) {
    io::Faults faults;  // delays, reordering, short and interrupted transfers: all of them must be invisible
    faults.seed = 11;
    faults.delay_max = std::chrono::microseconds(200);
    faults.reorder = true;
    faults.short_transfer = 0.1;
    faults.interrupted = 0.1;
    resources.store = io::make_memory_store(64 << 20, faults, 65536);
  }
  return resources;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<engine::StepResult> results;
  std::vector<float> contents;
  engine::Stats stats;
};

Outcome train(const Case& c) {
  const Config config = config_of(c);
  Engine engine(toy_units(), config, resources_of(c, config));
  toy_load(engine);
  Outcome out;
  for (int step = 0; step < kSteps; ++step) {
    const ToyStep taken = toy_step(engine, step, c.micro_batches, 0);
    out.losses.push_back(taken.loss);
    out.results.push_back(taken.result);
  }
  out.contents = toy_contents(engine);
  out.stats = engine.stats();
  return out;
}

class Exactness : public ::testing::TestWithParam<Case> {};

TEST_P(Exactness, EqualsTheScalarReference) {
  if (GetParam().device == "cuda") {
    if (const std::string why = kernels::why_no_cuda(); !why.empty()) GTEST_SKIP() << why;
  }
  const Outcome got = train(GetParam());
  int clipped = 0;
  for (const auto& result : got.results) {
    clipped += result.clip < 1 ? 1 : 0;
    EXPECT_FALSE(result.skipped);
  }
  const std::string speculation = GetParam().speculation;
  if (speculation == "hits") {
    EXPECT_EQ(clipped, 0);
    EXPECT_EQ(got.stats.guesses_dropped, 0);
  } else {
    EXPECT_EQ(clipped, kSteps) << "clipping must be active for this test to mean anything";
    EXPECT_EQ(got.stats.guesses_taken, 0);
  }
  if (speculation.empty()) {
    EXPECT_EQ(got.stats.guesses_dropped, 0);
  }
  expect_same_bits(got.contents, toy_reference(kSteps, GetParam().micro_batches, got.results),
                   name_of(GetParam()));

  Case plain;  // host only, one thread, nothing ahead
  plain.prefetch = 0;
  plain.threads = 1;
  plain.micro_batches = GetParam().micro_batches;
  if (speculation == "hits") plain.speculation = GetParam().speculation;  // the same clipping
  const Outcome expected = train(plain);
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_EQ(got.losses[step], expected.losses[step]) << "step " << step;
    EXPECT_EQ(got.results[step].norm, expected.results[step].norm) << "step " << step;
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    for (int64_t prefetch : {0, 1, 100}) {
      for (int threads : {1, 2}) {
        for (const char* device : {"host", "simulated"})
          cases.push_back({placement, prefetch, threads, device, "memory", 1});
      }
    }
    cases.push_back({placement, 4, 2, "host", "memory", 3});
    cases.push_back({placement, 4, 2, "host", "memory", 4});
    cases.push_back({placement, 4, 2, "simulated", "faulty", 2});
    cases.push_back({placement, 4, 2, "host", "faulty", 1});
    for (int64_t prefetch : {0, 1, 100}) cases.push_back({placement, prefetch, 2, "cuda", "memory", 1});
    cases.push_back({placement, 4, 2, "cuda", "faulty", 2});
  }
  for (Placement placement : {Placement::half, Placement::nvme}) {
    for (const char* speculation : {"hits", "misses"}) {
      for (int threads : {1, 2}) {
        for (const char* device : {"host", "simulated"}) {
          cases.push_back({placement, 4, threads, device, "memory", 1, speculation});
          cases.push_back({placement, 4, threads, device, "faulty", 1, speculation});
        }
      }
      cases.push_back({placement, 1, 2, "host", "memory", 3, speculation});
      cases.push_back({placement, 4, 2, "cuda", "memory", 1, speculation});
      cases.push_back({placement, 4, 2, "host", "auto", 1, speculation});
    }
  }
  for (const char* device : {"simulated", "cuda"}) {
    for (const char* speculation : {"hits", "misses"}) {
      cases.push_back({Placement::host, 4, 1, device, "memory", 1, speculation});
      cases.push_back({Placement::host, 4, 2, device, "memory", 3, speculation});
    }
    for (int64_t prefetch : {0, 4}) cases.push_back({Placement::device, prefetch, 2, device, "memory", 1});
    cases.push_back({Placement::device, 4, 2, device, "memory", 3});
  }
  cases.push_back({Placement::half, 4, 2, "host", "auto", 1});
  cases.push_back({Placement::nvme, 4, 2, "host", "auto", 1});
  cases.push_back({Placement::nvme, 4, 2, "simulated", "threads", 1});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Placements, Exactness, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) { return name_of(info.param); });

// ---- two ranks

constexpr int kWorldSteps = 8;

struct WorldOutcome {
  std::vector<std::vector<uint16_t>> weights;  // by rank: every unit's gathered memory
  std::vector<engine::StepResult> results;     // of rank 0
};

WorldOutcome train_world(int world, Placement placement, const std::string& device, const ToyKind& kind) {
  auto ranks = engine::make_in_process_world(world, std::chrono::seconds(60));
  WorldOutcome out;
  out.weights.resize(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      Case c;
      c.placement = placement;
      c.device = device;
      c.threads = 1;
      const Config config = config_of(c);
      Resources resources = resources_of(c, config, kind);
      resources.ranks.communicator = std::move(ranks[rank]);
      Engine engine(toy_units(kind), config, std::move(resources));
      toy_load(engine);
      for (int step = 0; step < kWorldSteps; ++step) {
        const ToyStep taken = toy_step(engine, step, 1, rank);
        if (rank == 0) out.results.push_back(taken.result);
      }
      for (int u = 0; u < static_cast<int>(engine.layout().units.size()); ++u) {
        const engine::Lease lease = engine.acquire(u);
        std::vector<uint16_t> words(static_cast<size_t>(lease.bytes()) / 2);
        lease.copy_to_host(0, std::as_writable_bytes(std::span(words)));
        out.weights[rank].insert(out.weights[rank].end(), words.begin(), words.end());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

/// The reference's weights where a world's gathered units have them; padding is zero.
std::vector<uint16_t> reference_words(int world, const std::vector<engine::StepResult>& results,
                                      const ToyKind& kind) {
  const engine::Layout layout = engine::make_layout(toy_units(kind), 4096, 0, world);
  const std::vector<float> contents = toy_reference(kWorldSteps, 1, results, world, kind);
  std::vector<uint16_t> words;
  size_t next = 0;
  for (const engine::Unit& unit : layout.units) {
    const auto width = static_cast<size_t>(unit.element_bytes / 2);
    const size_t start = words.size();
    words.resize(start + static_cast<size_t>(unit.elements) * width);
    for (const engine::Segment& segment : unit.segments) {
      for (int64_t i = 0; i < segment.elements; ++i) {
        uint32_t bits = 0;
        std::memcpy(&bits, &contents[next + i], 4);
        uint16_t* to = &words[start + static_cast<size_t>(segment.begin + i) * width];
        if (width == 2) {
          std::memcpy(to, &bits, 4);
        } else if (unit.dtype == "F16") {
          *to = reference_narrow_half(contents[next + i]);
        } else {
          *to = static_cast<uint16_t>((bits + 0x8000U) >> 16);
        }
      }
      const auto states =
          std::ranges::count(unit.components(), optim::Role::state, &optim::ComponentSpec::role);
      next += static_cast<size_t>(segment.elements) * static_cast<size_t>(1 + states);
    }
  }
  return words;
}

void expect_two_ranks_exact(Placement placement, const std::string& device, const ToyKind& kind) {
  const WorldOutcome world = train_world(2, placement, device, kind);
  const std::vector<uint16_t> expected = reference_words(2, world.results, kind);
  EXPECT_LT(world.results.back().clip, 1.0);
  EXPECT_TRUE(world.weights[0] == expected) << device;
  EXPECT_TRUE(world.weights[1] == expected) << device;
}

TEST(TwoRanks, EqualTheScalarReferenceInEveryPlacementAndOnEveryDevice) {
  for (Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    for (const std::string& device : toy_devices()) expect_two_ranks_exact(placement, device, {});
  }
}

TEST(TwoRanks, EqualTheScalarReferenceInOtherFormats) {
  const ToyKind kinds[] = {{optim::optimizer_named("adam"), optim::Format::eight_bit},
                           {optim::optimizer_named("adagrad"), optim::Format::eight_bit},
                           {optim::optimizer_named("lion"), optim::Format::compact},
                           {optim::optimizer_named("momentum"), optim::Format::fp16}};
  for (const ToyKind& kind : kinds) {
    SCOPED_TRACE(std::string(optim::name(kind.optimizer)) + " " + std::string(optim::name(*kind.format)));
    for (Placement placement : {Placement::host, Placement::nvme})
      expect_two_ranks_exact(placement, "host", kind);
  }
}

// ---- bytes

TEST(Pinned, IsAllHostMemoryThatTheEngineCopiesToTheDevice) {
  for (const Placement placement : {Placement::host, Placement::half, Placement::nvme}) {
    const Case c{placement, 4, 1, "simulated", "memory", 1};
    const Config config = config_of(c);
    Resources resources = resources_of(c, config);
    const auto& device = dynamic_cast<kernels::SimulatedDevice&>(*resources.device);
    Engine engine(toy_units(), config, std::move(resources));
    toy_load(engine);
    for (int u = 0; u < static_cast<int>(engine.layout().units.size()); ++u) {
      const engine::Lease lease = engine.acquire(u);
      EXPECT_EQ(device.unpinned_copies(), u) << name_of(c);
      std::vector<std::byte> ours(static_cast<size_t>(lease.bytes()));  // not the engine's: counted
      lease.copy_to_host(0, ours);
      EXPECT_THROW(lease.copy_to_host(1, ours), std::invalid_argument);
    }
  }
}

class Bytes : public ::testing::TestWithParam<Placement> {};

TEST_P(Bytes, MovedOnNvmeAreThoseOfThePlanAndOfTheKernel) {
  Case c{GetParam(), 4, 2, "host", "auto", 1};
  Config config = config_of(c);
  Engine engine(toy_units(), config, resources_of(c, config));
  if (engine.stats().store.backend.find("O_DIRECT") == std::string::npos) {
    GTEST_SKIP() << "no O_DIRECT here: the kernel counts the page cache's transfers, not ours";
  }
  toy_load(engine);
  for (int step = 0; step < 3; ++step) toy_step(engine, step, 1, 1);
  engine.synchronize();
  int64_t stats_written = 0;
  int exact = 0;
  for (int step = 3; step < 8; ++step) {
    const io::StoreStats before = engine.stats().store;
    const int64_t kernel_read = kernel_count("read_bytes:");
    const int64_t kernel_written = kernel_count("write_bytes:");
    toy_step(engine, step, 1, 1);
    engine.synchronize();
    const int64_t stats_read = engine.stats().store.bytes_read - before.bytes_read;
    stats_written = engine.stats().store.bytes_written - before.bytes_written;
    const int64_t more_read = kernel_count("read_bytes:") - kernel_read - stats_read;
    const int64_t more_written = kernel_count("write_bytes:") - kernel_written - stats_written;
    EXPECT_GE(more_read, 0) << "step " << step;
    EXPECT_GE(more_written, 0) << "step " << step;
    EXPECT_EQ(stats_written, engine.plan().nvme_written_bytes_per_step) << "step " << step;
    if (more_read == 0 && more_written == 0) ++exact;
  }
  EXPECT_GE(exact, 3)
      << "of 5 steps; now and then the kernel adds a page of the file system's own (an extent block)";
  EXPECT_GT(stats_written, 0);
  if (GetParam() != Placement::nvme) return;
  int64_t trainable = 0;
  for (const engine::Unit& unit : engine.layout().units) {
    if (!unit.trainable()) continue;
    trainable += unit.shard_bytes() + unit.state_bytes(unit.shard_elements) +
                 unit.shard_elements * engine::gradient_element_bytes(unit.format, 1);
  }
  EXPECT_EQ(stats_written, trainable) << "12 bytes a parameter, and its gradient";
}

INSTANTIATE_TEST_SUITE_P(Placements, Bytes, ::testing::Values(Placement::half, Placement::nvme),
                         [](const auto& info) { return info.param == Placement::half ? "half" : "nvme"; });

}  // namespace
}  // namespace overspill::testing
