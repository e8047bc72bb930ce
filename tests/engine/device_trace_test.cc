// What the device's own events tell of a step, and the trace that shows it.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "engine/telemetry/chrome_trace.h"
#include "kernels/simulated_device.h"
#include "tests/engine/device_case.h"
#include "tests/engine/framework.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

/// Every copy and every lease's work, each unit's work after the copy that it needs, gradients after that.
TEST(DeviceTrace, IsTrueToWhatWasWaitedFor) {
  std::shared_ptr<kernels::Device> device;
  const auto engine = device_engine({}, device);
  Framework framework(*device);
  framework.step(*engine, 0, 1);
  EXPECT_TRUE(engine->take_device_spans().empty()) << "nobody asked for it";
  engine->record_journal(true);
  framework.step(*engine, 1, 1);
  engine->record_journal(false);
  const auto entries = engine->take_journal();
  const auto spans = engine->take_device_spans();
  EXPECT_TRUE(engine->take_device_spans().empty());

  using Kind = engine::DeviceSpan::Kind;
  const auto units = static_cast<int>(engine->layout().units.size());
  for (int u = 0; u < units; ++u) {
    std::vector<engine::DeviceSpan> of[3];
    for (const engine::DeviceSpan& span : spans) {
      EXPECT_LE(span.begin_ns, span.end_ns);
      if (span.unit == u) of[static_cast<int>(span.kind)].push_back(span);
    }
    const auto& [up, compute, down] = of;
    ASSERT_EQ(compute.size(), 2u) << "forward and backward of unit " << u;
    EXPECT_EQ(compute[0].queue, framework.queue().native);
    if (engine->layout().units[u].trainable()) {
      ASSERT_FALSE(up.empty()) << "unit " << u << " was updated";
    }
    if (!up.empty()) {
      EXPECT_GE(compute[0].end_ns, up[0].end_ns) << "unit " << u;
    }
    size_t given = 0;
    for (size_t s = 0; s < engine->layout().units[u].segments.size(); ++s) {
      if (engine->layout().units[u].trainable() && !toy_skips(u, static_cast<int>(s), 1, 0)) ++given;
    }
    EXPECT_EQ(down.size(), given) << "unit " << u << ": each of its gradients, whole";
    for (const engine::DeviceSpan& copy : down) EXPECT_GE(copy.end_ns, compute[1].begin_ns);
  }

  std::ostringstream out;
  engine::write_chrome_trace(out, engine->layout(), entries, spans);
  const auto events = nlohmann::json::parse(out.str())["traceEvents"];
  std::map<int, std::string> tracks;
  std::map<std::string, size_t> shown;
  for (const auto& e : events) {
    if (e["ph"] == "M") tracks[e["tid"]] = e["args"]["name"];
  }
  for (const auto& e : events) {
    if (e["ph"] == "X") ++shown[tracks[e["tid"]]];
  }
  const auto count = [&](Kind kind) {
    return static_cast<size_t>(
        std::count_if(spans.begin(), spans.end(), [&](const auto& span) { return span.kind == kind; }));
  };
  EXPECT_EQ(shown["device: copies up"], count(Kind::copy_up));
  EXPECT_EQ(shown["device: copies down"], count(Kind::copy_down));
  EXPECT_EQ(shown["device: computes (0)"], count(Kind::compute));
}

}  // namespace
}  // namespace overspill::testing
