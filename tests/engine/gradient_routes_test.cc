// Gradients made alone, on each route that the plan may give them: whole in host memory, chunk by chunk
// through staging to NVMe, and on a device. Every route comes to the same sums. Whole steps are in
// gradient_spill_test.cc, device_units_test.cc and kept_gradients_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/collectives/in_process.h"
#include "engine/gradients/gradients.h"
#include "tests/engine/parts.h"

namespace overspill::testing {
namespace {

using engine::Gradients;
using engine::Placement;

enum class Route : uint8_t { whole, spilled, on_device };

const char* name_of(Route route) {
  switch (route) {
    case Route::whole:
      return "whole";
    case Route::spilled:
      return "spilled";
    case Route::on_device:
      return "on_device";
  }
  return "";
}

OwnersOptions options_of(Route route) {
  OwnersOptions options;
  options.config.gradient_accumulation = 2;  // so that sums are kept in fp32
  options.time = nullptr;                    // the store's own thread ends transfers
  if (route == Route::whole) options.config.placement = Placement::host;
  if (route == Route::on_device) {
    options.device = "simulated";
    options.config.placement = Placement::device;
    options.config.device_budget_bytes = 64 << 20;
  }
  return options;
}

class GradientRoutes : public ::testing::TestWithParam<Route> {
 protected:
  GradientRoutes() {
    const engine::Plan& plan = o_->setup.plan;
    for (int32_t unit = 0; unit < units(); ++unit) {
      if (!layout(unit).trainable()) continue;
      EXPECT_EQ(plan.on_device[unit], GetParam() == Route::on_device);
      EXPECT_EQ(plan.gradients_on_nvme[layout(unit).first_chunk], GetParam() == Route::spilled);
    }
  }

  ~GradientRoutes() override { o_->core.store->drain(); }  // into the memory of staging

  int32_t units() const { return static_cast<int32_t>(o_->setup.layout.units.size()); }
  const engine::Unit& layout(int32_t unit) const { return o_->setup.layout.units[unit]; }

  template <class Visit>
  void for_each_segment(Visit visit) {
    for (int32_t unit = 0; unit < units(); ++unit) {
      for (int32_t s = 0; layout(unit).trainable() && s < std::ssize(layout(unit).segments); ++s)
        visit(unit, s, layout(unit).segments[s].elements);
    }
  }

  /// Small integers: their sums and squares are exact in every order.
  static float value_of(int32_t unit, int32_t segment, int64_t element, int micro) {
    return static_cast<float>((unit * 3 + segment * 5 + element * 7 + micro * 2) % 9 - 4);
  }

  void give(int32_t unit, int32_t segment, const std::vector<float>& values) {
    const std::string dtype = layout(unit).dtype;
    const bool wide = dtype == "F32";
    std::vector<std::byte> data(values.size() * (wide ? 4 : 2));
    for (size_t i = 0; i < values.size(); ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, &values[i], 4);
      if (!wide) bits >>= 16;  // exact: these values have few digits
      std::memcpy(data.data() + i * (wide ? 4 : 2), &bits, wide ? 4 : 2);
    }
    const auto element = gradients_.check(unit, segment, std::ssize(data), dtype);
    const auto arrival = gradients_.begin(unit, segment, element);
    for (int64_t begin = 0; begin < std::ssize(values);) {
      const int64_t end = gradients_.piece_end(arrival, begin);
      const Gradients::Piece piece{&arrival, begin, end - begin, data.data() + begin * (wide ? 4 : 2)};
      gradients_.add({&piece, 1});
      begin = end;
    }
    gradients_.finish(arrival);
  }

  void give_all(int micro) {
    for_each_segment([&](int32_t unit, int32_t segment, int64_t elements) {
      std::vector<float> values(static_cast<size_t>(elements));
      for (int64_t i = 0; i < elements; ++i) values[i] = value_of(unit, segment, i, micro);
      give(unit, segment, values);
    });
  }

  std::vector<float> read(int32_t unit, int32_t segment) {
    std::vector<float> out(static_cast<size_t>(layout(unit).segments[segment].elements));
    gradients_.read(unit, segment, 0, out);
    return out;
  }

  /// Every segment has the sum of these micro-batches, times `factor`.
  void expect_sums(const std::vector<int>& micros, float factor = 1) {
    for_each_segment([&](int32_t unit, int32_t segment, int64_t elements) {
      const std::vector<float> found = read(unit, segment);
      int64_t wrong = 0;
      for (int64_t i = 0; i < elements; ++i) {
        float sum = 0;
        for (const int micro : micros) sum += value_of(unit, segment, i, micro);
        wrong += found[i] != sum * factor ? 1 : 0;
      }
      EXPECT_EQ(wrong, 0) << layout(unit).segments[segment].name;
    });
  }

  double squares_of(const std::vector<int>& micros) {
    double squares = 0;
    for_each_segment([&](int32_t unit, int32_t segment, int64_t elements) {
      for (int64_t i = 0; i < elements; ++i) {
        double sum = 0;
        for (const int micro : micros) sum += value_of(unit, segment, i, micro);
        squares += sum * sum;
      }
    });
    return squares;
  }

  std::unique_ptr<Owners> o_ = make_owners(options_of(GetParam()));
  engine::GradientSquares squares_{o_->setup, o_->core, o_->hardware, o_->model};
  engine::DeviceUnits device_units_{o_->setup, o_->core, o_->hardware, o_->model, squares_};
  Gradients gradients_{o_->setup, o_->core, o_->hardware, o_->model, o_->ranks, device_units_, squares_};
};

TEST_P(GradientRoutes, AddUpMicroBatches) {
  EXPECT_FALSE(gradients_.any());
  give_all(0);
  expect_sums({0});
  give_all(1);
  expect_sums({0, 1});
  EXPECT_TRUE(gradients_.any());
  gradients_.put_away();
  expect_sums({0, 1});
}

TEST_P(GradientRoutes, ComeToOneSumOfSquares) {
  give_all(0);
  gradients_.put_away();
  EXPECT_EQ(gradients_.summarize().squares, squares_of({0}));
  give_all(1);
  gradients_.put_away();
  const engine::GradientSummary summary = gradients_.summarize();
  EXPECT_EQ(summary.squares, squares_of({0, 1})) << "squares of what was there before are of no use";
  EXPECT_TRUE(summary.finite);
}

TEST_P(GradientRoutes, NameTheFirstThatIsNotFinite) {
  give_all(0);
  std::vector<float> bad(static_cast<size_t>(layout(4).segments[1].elements), 1.0F);
  bad.back() = std::numeric_limits<float>::infinity();
  give(4, 1, bad);
  gradients_.put_away();
  EXPECT_FALSE(gradients_.summarize().finite);
  EXPECT_EQ(gradients_.first_not_finite(), "block1.b");
  EXPECT_FALSE(gradients_.any_nan());
}

TEST_P(GradientRoutes, ScaleWithoutTouchingWhatLiesThere) {
  give_all(0);
  gradients_.scale(0.5);
  expect_sums({0}, 0.5F);
  {
    const MutexLock lock(o_->core.mutex());
    EXPECT_EQ(gradients_.factor(0, 0), 0.5);
  }
  gradients_.apply_factor(0, 0);
  expect_sums({0}, 0.5F);
  const MutexLock lock(o_->core.mutex());
  EXPECT_EQ(gradients_.factor(0, 0), 1.0);
  EXPECT_EQ(gradients_.factor(1, 0), 0.5);
}

TEST_P(GradientRoutes, StartAnewWhereTheyWereCleared) {
  give_all(0);
  gradients_.clear();
  EXPECT_FALSE(gradients_.any());
  give_all(1);
  expect_sums({1});
}

TEST_P(GradientRoutes, ScaleNothingThatComesLater) {
  give_all(0);
  gradients_.scale(0.5);
  gradients_.put_away();
  {
    const MutexLock lock(o_->core.mutex());
    gradients_.handed_over();
  }
  give_all(1);
  expect_sums({1});
}

/// As torch has it: what a step has used is replaced by the next gradient, or used again.
TEST_P(GradientRoutes, StayAfterAStepUntilOthersCome) {
  give_all(0);
  gradients_.put_away();
  {
    const MutexLock lock(o_->core.mutex());
    gradients_.handed_over();
    EXPECT_EQ(gradients_.presence(0, 0), engine::Presence::used);
  }
  EXPECT_FALSE(gradients_.any());
  gradients_.reuse();
  EXPECT_TRUE(gradients_.any());
  expect_sums({0});
  {
    const MutexLock lock(o_->core.mutex());
    gradients_.handed_over();
  }
  give_all(1);
  expect_sums({1});
}

TEST_P(GradientRoutes, RefuseWhatDoesNotFitByName) {
  const auto message = [&](auto call) {
    try {
      call();
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message([&] { (void)gradients_.check(0, 1, 5, "BF16"); }).find("embed.scale has 5 bytes"),
            std::string::npos);
  EXPECT_NE(message([&] { (void)gradients_.check(0, 1, 6, "F64"); }).find("embed.scale is F64"),
            std::string::npos);
  EXPECT_NE(message([&] { (void)gradients_.check(3, 0, 2000, "F32"); }).find("frozen.weight is frozen"),
            std::string::npos);
  EXPECT_FALSE(gradients_.any());
}

INSTANTIATE_TEST_SUITE_P(Routes, GradientRoutes,
                         ::testing::Values(Route::whole, Route::spilled, Route::on_device),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// ---- several ranks' gradients until they are summed

/// A pool that has room for one unit's gradients. The rounds, which sum them, are the test's thread.
class Pool : public ::testing::Test {
 protected:
  std::unique_ptr<Owners> make() {
    OwnersOptions options;
    options.ranks = std::move(world_[0]);
    options.time = nullptr;  // callers wait for the rounds, and not for the store
    options.config.placement = Placement::host;
    options.change_plan = [](engine::Plan& plan) { plan.gradient_pool_bytes = 32 << 10; };
    return make_owners(std::move(options));
  }

  /// Opens unit 4 on a thread of its own. Returns what it threw, "" for nothing.
  std::future<std::string> open_elsewhere() {
    return std::async(std::launch::async, [this] {
      const MutexLock lock(o_->core.mutex());
      try {
        sums_.open(4);
      } catch (const std::exception& error) {
        return std::string(error.what());
      }
      return std::string();
    });
  }
  void wait_until_it_waits(std::future<std::string>& opening) {
    while (opening.wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
      const MutexLock lock(o_->core.mutex());
      if (sums_.stuck()) return;
    }
  }

  std::vector<std::unique_ptr<engine::Communicator>> world_ =
      engine::make_in_process_world(2, std::chrono::seconds(60));
  std::unique_ptr<Owners> o_ = make();
  engine::GradientSquares squares_{o_->setup, o_->core, o_->hardware, o_->model};
  engine::DeviceUnits device_units_{o_->setup, o_->core, o_->hardware, o_->model, squares_};
  engine::GradientSums sums_{o_->setup, o_->core, o_->hardware, o_->model, o_->ranks, device_units_};
};

/// The caller was told, and may clear what there is and go on: who waits later has not been refused.
TEST_F(Pool, RefusesTheCallerWhoWaitsAndNoLaterOne) {
  {
    const MutexLock lock(o_->core.mutex());
    sums_.open(1);
    sums_.arrived(1, 0);
  }
  std::future<std::string> first = open_elsewhere();
  wait_until_it_waits(first);
  {
    const MutexLock lock(o_->core.mutex());
    sums_.refuse();
    o_->core.changed.notify_all();
  }
  EXPECT_NE(first.get().find("no room for the gradient of block1"), std::string::npos);
  std::future<std::string> second = open_elsewhere();
  wait_until_it_waits(second);
  {
    const MutexLock lock(o_->core.mutex());
    sums_.summed(1);
    o_->core.changed.notify_all();
  }
  EXPECT_EQ(second.get(), "");
}

// ---- staging

/// Two buffers, everything spilled, transfers that end when the test says so.
class Staging : public ::testing::Test {
 protected:
  ~Staging() override { o_->core.store->drain(); }

  static std::unique_ptr<Owners> make() {
    OwnersOptions options;
    options.change_plan = [](engine::Plan& plan) { plan.staging_buffers = 2; };
    return make_owners(std::move(options));
  }
  int64_t bytes_of(int32_t chunk) const { return o_->setup.gradient_bytes(chunk); }

  void fill(int32_t chunk, std::byte value, engine::GradientStaging::Closing closing)
      REQUIRES(engine::engine_mutex) {
    std::byte* const memory = staging_.open(chunk);
    staging_.wait(chunk);
    std::memset(memory, static_cast<int>(value), static_cast<size_t>(bytes_of(chunk)));
    staging_.close(chunk, closing);
  }
  void expect(int32_t chunk, std::byte value) REQUIRES(engine::engine_mutex) {
    const std::byte* const memory = staging_.open(chunk);
    staging_.wait(chunk);
    EXPECT_EQ(std::count(memory, memory + bytes_of(chunk), value), bytes_of(chunk)) << "chunk " << chunk;
    staging_.close(chunk, engine::GradientStaging::Closing::unchanged);
  }

  std::unique_ptr<Owners> o_ = make();
  engine::GradientStaging staging_{o_->setup, o_->core, o_->hardware, o_->model};
};

using Closing = engine::GradientStaging::Closing;

TEST_F(Staging, BringsBackWhatHadToLeave) {
  const MutexLock lock(o_->core.mutex());
  for (const int32_t chunk : {0, 1, 2})
    fill(chunk, std::byte{static_cast<uint8_t>(0x10 + chunk)}, Closing::changed);
  EXPECT_FALSE(o_->model.chunks[0].gradient_extent.empty()) << "there are two buffers, and three chunks came";
  for (const int32_t chunk : {0, 1, 2}) expect(chunk, std::byte{static_cast<uint8_t>(0x10 + chunk)});
  staging_.flush();
  for (const int32_t chunk : {0, 1, 2}) EXPECT_FALSE(o_->model.chunks[chunk].gradient_extent.empty());
  for (const int32_t chunk : {0, 1, 2}) expect(chunk, std::byte{static_cast<uint8_t>(0x10 + chunk)});
}

TEST_F(Staging, WritesWhatIsCompleteAndKeepsTheRestInMemory) {
  const MutexLock lock(o_->core.mutex());
  fill(0, std::byte{0x11}, Closing::changed);
  EXPECT_EQ(o_->core.store->stats().transfers, 0);
  fill(1, std::byte{0x22}, Closing::complete);
  {
    const engine::Unlocked unlocked(o_->core.mutex());
    let_transfers_end(*o_);
  }
  EXPECT_EQ(o_->core.store->stats().transfers, 1);
  EXPECT_TRUE(o_->model.chunks[0].gradient_extent.empty());
  EXPECT_FALSE(o_->model.chunks[1].gradient_extent.empty());
}

TEST_F(Staging, ForgetsWhatIsGoneAndFreesItsExtent) {
  const MutexLock lock(o_->core.mutex());
  fill(0, std::byte{0x11}, Closing::complete);
  fill(1, std::byte{0x22}, Closing::complete);
  staging_.flush();
  const int64_t held = o_->core.store->stats().allocated_bytes;
  staging_.discard([](int32_t chunk) { return chunk == 0; });
  EXPECT_TRUE(o_->model.chunks[0].gradient_extent.empty());
  EXPECT_LT(o_->core.store->stats().allocated_bytes, held);
  expect(1, std::byte{0x22});
}

}  // namespace
}  // namespace overspill::testing
