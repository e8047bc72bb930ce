// A segment's gradient of several ranks, read and set between passes: every rank sees the same, the step uses
// it, and reading changes nothing.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "cpu_optim/elements.h"
#include "tests/engine/rank_world.h"

namespace overspill::testing {
namespace {

using engine::Engine;

constexpr int64_t kElements = 5000;  // several chunks, and shards that end inside one

std::vector<engine::UnitSpec> units() {
  const auto unit = [](const char* name, optim::Format format, const char* dtype) {
    engine::UnitSpec spec{name, format, dtype, {}, optim::optimizer_named("sgd")};
    for (const int64_t elements : {kElements, int64_t{37}}) {
      engine::SegmentSpec segment;
      segment.name = fmt::format("{}.{}", name, elements);
      segment.shape = {elements};
      spec.segments.push_back(std::move(segment));
    }
    return spec;
  };
  return {unit("one", optim::Format::exact, "BF16"), unit("two", optim::Format::fp32, "F32")};
}

/// Small quarters: every sum and mean of up to four ranks is exact in bf16.
float value(int rank, int micro, int64_t element) {
  return static_cast<float>((rank + 1) * (micro + 1) * 4) * static_cast<float>(element % 7 - 3) / 4;
}

/// The second segment gets none from rank 1.
bool gives(int rank, int segment) {
  return rank != 1 || segment == 0;
}

void give(Engine& engine, int rank, int micro) {
  for (int32_t unit = 1; unit >= 0; --unit) {
    const engine::Unit& u = engine.layout().units[unit];
    for (int32_t segment = 0; segment < 2; ++segment) {
      if (!gives(rank, segment)) continue;
      std::vector<float> values(static_cast<size_t>(u.segments[segment].elements));
      for (size_t i = 0; i < values.size(); ++i) values[i] = value(rank, micro, static_cast<int64_t>(i));
      const auto type = u.dtype == "F32" ? optim::Element::fp32 : optim::Element::bf16;
      std::vector<std::byte> bytes(values.size() * static_cast<size_t>(optim::bytes(type)));
      optim::narrow(type, values, bytes.data());
      engine.add_gradient(unit, segment, bytes, u.dtype);
    }
  }
}

std::vector<float> expected(int world, int micro_batches, int segment, bool sum) {
  std::vector<float> out(static_cast<size_t>(segment == 0 ? kElements : 37));
  for (size_t i = 0; i < out.size(); ++i) {
    for (int rank = 0; rank < world; ++rank) {
      for (int micro = 0; micro < micro_batches && gives(rank, segment); ++micro)
        out[i] += value(rank, micro, static_cast<int64_t>(i));
    }
    if (!sum) out[i] /= static_cast<float>(world);
  }
  return out;
}

std::vector<float> read(Engine& engine, int32_t unit, int32_t segment) {
  std::vector<float> out(static_cast<size_t>(segment == 0 ? kElements : 37), -1.0F);
  if (!engine.read_whole_gradient(unit, segment, out)) return {};
  return out;
}

std::vector<float> weights(Engine& engine, int32_t unit, int32_t segment) {
  std::vector<float> out(static_cast<size_t>(segment == 0 ? kElements : 37));
  engine.read_weight(unit, segment, std::as_writable_bytes(std::span(out)), "F32");
  return out;
}

/// `world` engines, a thread each; fails where one throws.
void on_engines(int world, const RankOptions& options, const std::function<void(Engine&, int)>& body) {
  const auto errors = on_ranks(world, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
    const auto engine = model_rank(units(), options, std::move(ranks));
    body(*engine, rank);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

const std::vector<optim::Hyper> kPlain = {optim::SgdConfig{.lr = 1.0F}};

class WholeGradients : public ::testing::TestWithParam<std::tuple<int, int, int>> {
 protected:
  RankOptions options() const {
    const auto [stage, world, micro_batches] = GetParam();
    return {.stage = stage, .micro_batches = micro_batches, .max_grad_norm = 0};
  }
  int world() const { return std::get<1>(GetParam()); }
  int micro_batches() const { return std::get<2>(GetParam()); }
};

TEST_P(WholeGradients, AreTheMeanAfterEachMicroBatchAndLeaveTheStepAsItIs) {
  on_engines(world(), options(), [&](Engine& engine, int rank) {
    EXPECT_TRUE(read(engine, 0, 0).empty());
    for (int micro = 0; micro < micro_batches(); ++micro) {
      give(engine, rank, micro);
      for (int32_t unit = 0; unit < 2; ++unit) {
        for (int32_t segment = 0; segment < 2; ++segment)
          EXPECT_EQ(read(engine, unit, segment), expected(world(), micro + 1, segment, false));
      }
    }
    engine.step(kPlain);
    EXPECT_TRUE(read(engine, 0, 0).empty());
    for (int32_t unit = 0; unit < 2; ++unit) {
      for (int32_t segment = 0; segment < 2; ++segment) {
        std::vector<float> moved = weights(engine, unit, segment);
        for (float& weight : moved) weight = weight == 0 ? 0 : -weight;
        EXPECT_EQ(moved, expected(world(), micro_batches(), segment, false));
      }
    }
  });
}

TEST_P(WholeGradients, AreTheSumWhereThatIsAsked) {
  RankOptions asked = options();
  asked.sum_over_ranks = true;
  on_engines(world(), asked, [&](Engine& engine, int rank) {
    for (int micro = 0; micro < micro_batches(); ++micro) give(engine, rank, micro);
    EXPECT_EQ(read(engine, 0, 0), expected(world(), micro_batches(), 0, true));
    engine.step(kPlain);
    std::vector<float> moved = weights(engine, 1, 0);
    for (float& weight : moved) weight = weight == 0 ? 0 : -weight;
    EXPECT_EQ(moved, expected(world(), micro_batches(), 0, true));
  });
}

TEST_P(WholeGradients, AreWhatWasPutInTheirPlaceAndWhatComesIsAdded) {
  for (const bool sum : {false, true}) {
    RankOptions asked = options();
    asked.sum_over_ranks = sum;
    on_engines(world(), asked, [&](Engine& engine, int rank) {
      std::vector<float> others(kElements);
      for (size_t i = 0; i < others.size(); ++i) others[i] = static_cast<float>(i % 5) / 2 - 1;
      EXPECT_FALSE(engine.replace_whole_gradient(0, 0, others));
      give(engine, rank, 0);
      for (int32_t unit = 0; unit < 2; ++unit) {
        EXPECT_TRUE(engine.replace_whole_gradient(unit, 0, others));
        EXPECT_EQ(read(engine, unit, 0), others);
        EXPECT_EQ(read(engine, unit, 1), expected(world(), 1, 1, sum)) << "the one beside it";
      }
      for (int micro = 1; micro < micro_batches(); ++micro) give(engine, rank, micro);
      const std::vector<float> first = expected(world(), 1, 0, sum);
      const std::vector<float> all = expected(world(), micro_batches(), 0, sum);
      for (size_t i = 0; i < others.size(); ++i) others[i] += all[i] - first[i];
      engine.step(kPlain);
      std::vector<float> moved = weights(engine, 1, 0);
      for (float& weight : moved) weight = weight == 0 ? 0 : -weight;
      EXPECT_EQ(moved, others);
    });
  }
}

TEST_P(WholeGradients, OfARanksOwnPassesAreThereAtStages0And1) {
  on_engines(world(), options(), [&](Engine& engine, int rank) {
    std::vector<float> out(kElements);
    if (world() > 1 && options().stage > 1 && micro_batches() == 1) {
      EXPECT_THROW(engine.read_own_gradient(0, 0, out), std::invalid_argument);
      return;
    }
    EXPECT_FALSE(engine.read_own_gradient(0, 0, out));
    give(engine, rank, 0);
    EXPECT_TRUE(engine.read_own_gradient(0, 0, out));
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], value(rank, 0, static_cast<int64_t>(i)));
  });
}

TEST_P(WholeGradients, StatesAreReadInPartsThatMakeTheWhole) {
  on_engines(world(), options(), [&](Engine& engine, int) {
    const auto [begin, elements] = engine.own_part(1, 0);
    EXPECT_GE(begin, 0);
    EXPECT_LE(begin + elements, kElements);
    if (world() == 1 || options().stage == 0) {
      EXPECT_EQ(elements, kElements);
    }
    std::vector<float> out(static_cast<size_t>(elements));
    EXPECT_THROW(engine.read_own_state(1, 0, "m", out), std::invalid_argument) << "plain SGD has none";
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, WholeGradients,
                         ::testing::Combine(::testing::Range(0, 4), ::testing::Values(1, 2, 4),
                                            ::testing::Values(1, 3)),
                         [](const auto& info) {
                           return fmt::format("stage{}_world{}_micro{}", std::get<0>(info.param),
                                              std::get<1>(info.param), std::get<2>(info.param));
                         });

/// Of Adam, whose states differ from rank to rank.
TEST(OwnStates, AreThePartsOfWhatAllRanksReadTogether) {
  for (const int stage : {0, 1, 3}) {
    const auto errors = on_ranks(2, [&](int rank, std::unique_ptr<engine::Communicator> ranks) {
      const auto engine = toy_rank({.stage = stage}, std::move(ranks));
      toy_load(*engine);
      for (int step = 0; step < 2; ++step) toy_step(*engine, step, 1, rank);
      const auto& segments = engine->layout().units[0].segments;
      int64_t seen = 0;
      for (int32_t segment = 0; segment < std::ssize(segments); ++segment) {
        std::vector<float> whole(static_cast<size_t>(segments[segment].elements));
        engine->read_state(0, segment, "m", whole);
        const auto [begin, elements] = engine->own_part(0, segment);
        std::vector<float> own(static_cast<size_t>(elements));
        engine->read_own_state(0, segment, "m", own);
        EXPECT_TRUE(std::equal(own.begin(), own.end(), whole.begin() + begin));
        seen += elements;
        own.push_back(0);
        EXPECT_THROW(engine->read_own_state(0, segment, "m", own), std::invalid_argument);
      }
      EXPECT_GT(seen, 0);
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
  }
}

}  // namespace
}  // namespace overspill::testing
