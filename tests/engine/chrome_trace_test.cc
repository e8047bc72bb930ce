// The picture of a step: well-formed, complete, and true to the schedule.
#include "engine/telemetry/chrome_trace.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "engine/engine.h"
#include "engine/resources.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Happening;
using engine::JournalEntry;
using nlohmann::json;

json trace_of(const engine::Layout& layout, const std::vector<JournalEntry>& entries) {
  std::ostringstream out;
  engine::write_chrome_trace(out, layout, entries);
  return json::parse(out.str())["traceEvents"];
}

TEST(ChromeTrace, ShowsEveryUpdateOfAStepOnceAndNoSlotTwiceAtATime) {
  engine::Config config;
  config.host_budget_bytes = int64_t{1} << 30;
  config.placement = engine::Placement::half;
  config.chunk_elements = 4096;
  config.nvme = {"unused"};
  engine::ResourceOptions options;
  options.io_backend = "memory";
  engine::Engine engine(toy_units(), config, engine::make_resources(toy_units(), config, options));
  toy_load(engine);
  toy_step(engine, 0, 1, 0);
  engine.synchronize();
  engine.record_journal(true);
  toy_step(engine, 1, 1, 0);
  engine.synchronize();
  const auto entries = engine.take_journal();
  const json events = trace_of(engine.layout(), entries);

  std::map<std::string, int> updates;
  std::map<int, std::vector<std::pair<double, double>>> slots;
  std::map<std::string, int> open;
  for (const json& e : events) {
    const std::string phase = e["ph"];
    if (phase == "M" || phase == "i") continue;
    const std::string name = e["name"];
    if (phase == "X" && e["tid"] != 0) slots[e["tid"]].emplace_back(e["ts"], e["dur"]);
    if (phase != "e" && name.starts_with("update ")) ++updates[name];
    if (phase == "b") ++open[std::string(e["id"])];
    if (phase == "e") --open[std::string(e["id"])];
  }
  const auto scheduled = std::count_if(entries.begin(), entries.end(), [](const JournalEntry& e) {
    return e.happening == Happening::scheduled;
  });
  EXPECT_GT(scheduled, 0);
  EXPECT_EQ(updates.size(), static_cast<size_t>(scheduled));
  for (const auto& [name, count] : updates) EXPECT_EQ(count, 1) << name;
  for (const auto& [id, count] : open) EXPECT_EQ(count, 0) << id;
  EXPECT_FALSE(slots.empty());
  for (auto& [track, spans] : slots) {
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i)
      EXPECT_LE(spans[i - 1].first + spans[i - 1].second, spans[i].first + 1e-6) << "track " << track;
  }
}

TEST(ChromeTrace, ClosesWhatHasNotEndedAndLeavesOutWhatBeganBefore) {
  const engine::Layout layout = engine::make_layout(toy_units(), 4096, 0, 1);
  const json events = trace_of(layout, {{1000, Happening::staged, 0, 0, 0},
                                        {2000, Happening::updating, 0, 0, 0},
                                        {5000, Happening::acquired, 1}});
  int spans = 0;
  for (const json& e : events) {
    if (e["ph"] != "X") continue;
    ++spans;
    EXPECT_EQ(e["ts"], 1.0);
    EXPECT_EQ(e["dur"], 3.0);
  }
  EXPECT_EQ(spans, 1);
  EXPECT_EQ(trace_of(layout, {}).size(), 1U);  // the caller's track has a name
}

}  // namespace
}  // namespace overspill::testing
