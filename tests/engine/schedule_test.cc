// Layout, trace, plan and arena: what is decided before a byte moves.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>

#include "engine/memory/budget.h"
#include "engine/memory/range_allocator.h"
#include "engine/partition/layout.h"
#include "engine/partition/strides.h"
#include "engine/plan/plan.h"
#include "engine/weights/trace.h"

namespace overspill::engine {
namespace {

using optim::Format;

TEST(Layout, PadsUnitsToWholeBlocksOfEveryComponent) {
  // The worked example of layout.h.
  const Layout layout =
      make_layout({{"u", Format::exact, "BF16", {{"a", {5000}, 0, {}}, {"b", {100}, 0, {}}}}}, 1 << 20, 1, 2);
  const Unit& unit = layout.units[0];
  EXPECT_EQ(unit.segments[1].begin, 5024);
  EXPECT_EQ(unit.elements, 8192);
  EXPECT_EQ(unit.shard_elements, 4096);
  ASSERT_EQ(layout.chunks.size(), 1U);
  const Chunk& chunk = layout.chunks[0];  // rank 1 holds [4096, 8192): the end of a, and b
  ASSERT_EQ(chunk.runs.size(), 2U);
  EXPECT_EQ(chunk.runs[0].begin, 0);
  EXPECT_EQ(chunk.runs[0].elements, 904);
  EXPECT_EQ(chunk.runs[1].begin, 5024 - 4096);
  EXPECT_EQ(chunk.runs[1].elements, 100);
}

TEST(Layout, CutsShardsIntoEqualChunksThatCoverThem) {
  for (int64_t elements : {1, 2047, 2048, 2049, 100'000, 1'000'003}) {
    const Layout layout =
        make_layout({{"u", Format::exact, "BF16", {{"a", {elements}, 0, {}}}}}, 65536, 0, 1);
    int64_t next = 0;
    for (const Chunk& chunk : layout.chunks) {
      EXPECT_EQ(chunk.begin, next);
      EXPECT_LE(chunk.elements, 65536);
      EXPECT_EQ(chunk.elements % 2048, 0);
      next += chunk.elements;
    }
    EXPECT_EQ(next, layout.units[0].shard_elements);
  }
}

TEST(Layout, RefusesWhatDoesNotFit) {
  const auto make = [](UnitFormat format, const char* dtype, std::vector<SegmentSpec> segments) {
    make_layout({{"u", format, dtype, std::move(segments)}}, 1024, 0, 1);
  };
  EXPECT_THROW(make(Format::exact, "F32", {{"a", {1}, 0, {}}}), std::invalid_argument);
  EXPECT_THROW(make(engine::kFrozen, "NOPE", {{"a", {1}, 0, {}}}), std::invalid_argument);
  EXPECT_THROW(make(Format::fp32, "F32", {}), std::invalid_argument);
  EXPECT_THROW(make(Format::fp32, "F32", {{"a", {1}, 0, {}}, {"a", {1}, 0, {}}}), std::invalid_argument);
  EXPECT_THROW(make(Format::fp32, "F32", {{"a", {int64_t{1} << 40, int64_t{1} << 40}, 0, {}}}),
               std::invalid_argument);
  EXPECT_THROW(make_layout({}, 1024, 0, 1), std::invalid_argument);
}

TEST(Layout, KeepsStridesInOneForm) {
  using Strides = std::vector<int64_t>;
  const auto kept = [](Strides shape, Strides strides) {
    const SegmentSpec spec{"a", std::move(shape), 0, {}, std::move(strides)};
    return make_layout({{"u", Format::fp32, "F32", {spec}}}, 1024, 0, 1).units[0].segments[0].strides;
  };
  EXPECT_EQ(kept({4, 3, 5, 7}, {105, 1, 21, 3}), (Strides{105, 1, 21, 3})) << "channels_last";
  EXPECT_EQ(kept({4, 3}, {1, 4}), (Strides{1, 4}));
  EXPECT_EQ(kept({4, 3}, {}), Strides{});
  EXPECT_EQ(kept({4, 3}, {3, 1}), Strides{});
  EXPECT_EQ(kept({8, 1, 3, 3}, {9, 1, 3, 1}), Strides{}) << "channels_last of one channel is row-major";
  EXPECT_EQ(kept({4, 1, 3}, {1, 999, 4}), (Strides{1, 1, 4})) << "the stride of extent 1 addresses nothing";
  EXPECT_EQ(kept({1}, {7}), Strides{});
  EXPECT_EQ(kept({0, 4}, {1, 1}), Strides{});
}

TEST(Layout, RefusesStridesThatAreNoPermutation) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const std::vector<std::vector<int64_t>> bad = {{1, 1},  {0, 1},     {1, 3},     {4, 1},        {2, 8},
                                                 {-1, 4}, {1, -4},    {1},        {1, 4, 12},    {1, 5},
                                                 {6, 1},  {1, kHuge}, {kHuge, 1}, {kHuge, kHuge}};
  for (const auto& strides : bad) {
    try {
      make_layout({{"u", Format::fp32, "F32", {{"conv.weight", {4, 3}, 0, {}, strides}}}}, 1024, 0, 1);
      ADD_FAILURE() << "accepted " << ::testing::PrintToString(strides);
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find("conv.weight"), std::string::npos) << error.what();
    }
  }
  const int64_t wide = int64_t{1} << 40;  // a product that overflows is no product
  EXPECT_FALSE(normal_strides(std::vector<int64_t>{wide, wide}, std::vector<int64_t>{1, wide}));
  EXPECT_FALSE(normal_strides(std::vector<int64_t>{-2, 3}, std::vector<int64_t>{1, 2}));
}

TEST(Trace, PredictsFromTheLastPassOfItsKind) {
  Trace trace(5);
  const PassKind training{true, true};
  const PassKind evaluation{false, false};
  trace.begin(training);
  for (int unit : {0, 1, 2, 1, 0}) trace.acquired(unit);
  EXPECT_TRUE(trace.upcoming(3).empty()) << "nothing was recorded yet";
  trace.begin(evaluation);
  for (int unit : {3, 4}) trace.acquired(unit);
  trace.begin(training);
  trace.acquired(0);
  const auto next = trace.upcoming(3);
  EXPECT_EQ(std::vector<int32_t>(next.begin(), next.end()), (std::vector<int32_t>{1, 2, 1}));
  EXPECT_EQ(trace.next_use(2), 1);
  EXPECT_EQ(trace.next_use(0), 3);
  EXPECT_EQ(trace.next_use(4), Trace::kNever);
  EXPECT_EQ(trace.departures(), 0);
  const auto order = trace.forward_order();
  EXPECT_EQ(std::vector<int32_t>(order.begin(), order.end()), (std::vector<int32_t>{0, 1, 2, 3, 4}));
}

TEST(Trace, FindsItsWayBackAfterADeparture) {
  Trace trace(6);
  trace.begin({});
  for (int unit : {0, 1, 2, 3, 4}) trace.acquired(unit);
  trace.begin({});
  trace.acquired(0);
  trace.acquired(5);  // never seen
  EXPECT_TRUE(trace.upcoming(2).empty());
  trace.acquired(3);  // further on
  EXPECT_EQ(trace.upcoming(1).front(), 4);
  EXPECT_EQ(trace.departures(), 2);
  trace.begin({});
  for (int unit : {0, 5, 3}) trace.acquired(unit);
  EXPECT_EQ(trace.departures(), 2) << "what departed was traced anew";
}

TEST(RangeAllocator, ReusesEverythingItGaveOut) {
  RangeAllocator arena(1 << 16, 64);
  std::vector<int64_t> offsets;
  for (int round = 0; round < 100; ++round) {
    while (auto offset = arena.allocate(
               64 + (round * 37 + static_cast<int64_t>(offsets.size()) * 101) % 4000,
               offsets.size() % 2 == 0 ? RangeAllocator::End::low : RangeAllocator::End::high)) {
      for (int64_t other : offsets) ASSERT_NE(other, *offset);
      offsets.push_back(*offset);
    }
    while (!offsets.empty()) {
      const size_t at = (offsets.size() * 7 + static_cast<size_t>(round)) % offsets.size();
      arena.release(offsets[at]);
      offsets.erase(offsets.begin() + static_cast<std::ptrdiff_t>(at));
    }
    EXPECT_EQ(arena.free_bytes(), 1 << 16);
    EXPECT_EQ(arena.largest_free_run(), 1 << 16) << "neighbours must merge";
  }
  EXPECT_THROW(arena.release(0), std::logic_error);
}

std::vector<UnitSpec> blocks(int count) {
  std::vector<UnitSpec> units;
  for (int i = 0; i < count; ++i) {
    units.push_back(
        {fmt::format("block{}", i), Format::exact, "BF16", {{fmt::format("w{}", i), {1 << 20}, 0, {}}}});
  }
  return units;
}

TEST(Plan, KeepsToEveryBudgetOrSaysWhatWouldDo) {
  Config config;
  config.nvme = {"/somewhere"};
  config.chunk_elements = 256 * 1024;
  const Layout layout = make_layout(blocks(16), config.chunk_elements, 0, 1);
  int64_t least = 0;
  int64_t last_nvme = -1;
  int64_t last_buffers = 0;
  for (int64_t budget = 4 << 20; budget <= int64_t{300} << 20; budget += 4 << 20) {
    config.host_budget_bytes = budget;
    try {
      const Plan plan = make_plan(layout, config, {true});
      EXPECT_LE(plan.host_bytes(), budget);
      const int64_t buffers = plan.ring_slots * plan.ring_slot_bytes +
                              plan.staging_buffers * plan.staging_buffer_bytes + plan.gather_host_bytes;
      if (last_nvme >= 0) {
        EXPECT_LE(plan.nvme_read_bytes_per_step, last_nvme + 2 * std::max<int64_t>(0, buffers - last_buffers))
            << "a larger budget must not move more, but for what larger buffers take from weights";
      }
      last_nvme = plan.nvme_read_bytes_per_step;
      last_buffers = buffers;
    } catch (const BudgetError& error) {
      least = budget;
      EXPECT_NE(std::string(error.what()).find("smallest budget that would do"), std::string::npos);
    }
  }
  EXPECT_GT(least, 0) << "the smallest budgets must be refused";
  EXPECT_EQ(last_nvme, 0) << "the largest takes everything home";
}

TEST(Plan, WeightsThatDoNotAllFitLeaveRoomForBuffers) {
  Config config;
  config.nvme = {"/somewhere"};
  config.chunk_elements = 64 * 1024;
  const Layout layout = make_layout(blocks(100), config.chunk_elements, 0, 1);
  config.host_budget_bytes = int64_t{100} << 20;  // half of the weights
  const Plan plan = make_plan(layout, config, {true});
  EXPECT_EQ(plan.ring_slots, 8);
  EXPECT_EQ(plan.staging_buffers, 8);
  EXPECT_EQ(plan.gather_host_bytes, 7 * ((2 << 20) + 4096)) << "as many as are prefetched";
  EXPECT_GT(plan.weights_host_bytes, int64_t{70} << 20);
  EXPECT_GT(plan.weights_nvme_bytes, int64_t{70} << 20);
}

TEST(Plan, TheRingGrowsWhereGradientsAreHomeAndBeforeStatesAre) {
  Config config;
  config.nvme = {"/somewhere"};
  config.chunk_elements = 64 * 1024;
  const Layout layout = make_layout(blocks(40), config.chunk_elements, 0, 1);  // 640 chunks
  const int64_t weights_and_gradients = int64_t{40} << 22;
  config.host_budget_bytes = weights_and_gradients + (int64_t{20} << 20);
  const Plan some = make_plan(layout, config, {true});
  EXPECT_GT(some.ring_slots, 8);
  EXPECT_LT(some.ring_slots, 64);
  EXPECT_LT(some.states_host_bytes, some.ring_slot_bytes);
  config.host_budget_bytes = weights_and_gradients + (int64_t{80} << 20);
  const Plan more = make_plan(layout, config, {true});
  EXPECT_EQ(more.ring_slots, 64);
  EXPECT_GT(more.states_host_bytes, 0);
  config.chunk_elements = 1 << 20;  // 40 chunks: a slot for every eighth, but not less than eight
  EXPECT_EQ(make_plan(make_layout(blocks(40), config.chunk_elements, 0, 1), config, {true}).ring_slots, 8);
}

TEST(Plan, TheSmallestBudgetItNamesIsEnoughAndOneByteLessIsNot) {
  Config config;
  config.nvme = {"/somewhere"};
  config.host_budget_bytes = 1;
  const Layout layout = make_layout(blocks(5), config.chunk_elements, 0, 1);
  int64_t named = 0;
  try {
    make_plan(layout, config, {true});
    FAIL() << "one byte cannot be enough";
  } catch (const BudgetError& error) {
    const std::string text = error.what();
    named = std::stoll(text.substr(text.find('(', text.find("smallest budget")) + 1));
  }
  config.host_budget_bytes = named;
  EXPECT_LE(make_plan(layout, config, {true}).host_bytes(), named);
  config.host_budget_bytes = named - 1;
  EXPECT_THROW(make_plan(layout, config, {true}), BudgetError);
}

}  // namespace
}  // namespace overspill::engine
