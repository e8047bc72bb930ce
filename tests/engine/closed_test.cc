// What an engine says after close(): every public method answers, or throws an error that says why not.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "engine/plan/predict.h"
#include "engine/resources.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Engine;

enum class Then : uint8_t { answers, refuses };
struct Call {
  Then then;
  std::function<void(Engine&)> make;
};

const std::multimap<std::string, Call>& calls() {
  static std::vector<float> values(6208);
  static const auto bytes = [] { return std::as_writable_bytes(std::span(values)); };
  static const std::vector<optim::Hyper> groups = toy_groups(0);
  static const std::vector<int64_t> budgets = {1 << 20, 64 << 20};
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "overspill-never-there";
  static const std::multimap<std::string, Call> all = {
      {"load_weight", {Then::refuses, [](Engine& e) { e.load_weight(0, 0, bytes(), "F32"); }}},
      {"read_weight", {Then::refuses, [](Engine& e) { e.read_weight(0, 0, bytes(), "F32"); }}},
      {"start_states", {Then::refuses, [](Engine& e) { e.start_states(groups); }}},
      {"read_state", {Then::refuses, [](Engine& e) { e.read_state(0, 0, "m", values); }}},
      {"own_part", {Then::refuses, [](Engine& e) { e.own_part(0, 0); }}},
      {"read_own_state", {Then::refuses, [](Engine& e) { e.read_own_state(0, 0, "m", values); }}},
      {"write_state", {Then::refuses, [](Engine& e) { e.write_state(0, 0, "m", values); }}},
      {"updates_of", {Then::refuses, [](Engine& e) { e.updates_of(0, 0); }}},
      {"set_updates_of", {Then::refuses, [](Engine& e) { e.set_updates_of(0, 0, 1); }}},
      {"begin_pass",
       {Then::refuses,
        [](Engine& e) {
          e.begin_pass({true, true});
        }}},
      {"begin_backward", {Then::refuses, [](Engine& e) { e.begin_backward(); }}},
      {"acquire", {Then::refuses, [](Engine& e) { (void)e.acquire(0); }}},
      {"acquire", {Then::refuses, [](Engine& e) { (void)e.acquire(0, engine::Queue{}); }}},
      {"resident_now", {Then::refuses, [](Engine& e) { e.resident_now(0); }}},
      {"written", {Then::refuses, [](Engine& e) { e.written(0, 0, bytes().first(6208 * 2)); }}},
      {"add_gradient", {Then::refuses, [](Engine& e) { e.add_gradient(0, 0, bytes(), "F32"); }}},
      {"add_gradient",
       {Then::refuses,
        [](Engine& e) {
          e.add_gradient(0, 0, engine::DeviceArray{bytes().data(), 6208 * 4, "F32", nullptr}, {});
        }}},
      {"clear_gradients", {Then::refuses, [](Engine& e) { e.clear_gradients(); }}},
      {"zero_gradients", {Then::refuses, [](Engine& e) { e.zero_gradients(); }}},
      {"replace_gradient", {Then::refuses, [](Engine& e) { e.replace_gradient(0, 0, bytes(), "F32"); }}},
      {"read_gradient",
       {Then::refuses,
        [](Engine& e) {
          std::vector<std::byte> room(bytes().size());
          e.read_gradient(0, 0, room, "F32");
        }}},
      {"read_whole_gradient", {Then::refuses, [](Engine& e) { e.read_whole_gradient(0, 0, values); }}},
      {"replace_whole_gradient", {Then::refuses, [](Engine& e) { e.replace_whole_gradient(0, 0, values); }}},
      {"read_own_gradient", {Then::refuses, [](Engine& e) { e.read_own_gradient(0, 0, values); }}},
      {"clipped_by_caller", {Then::refuses, [](Engine& e) { e.clipped_by_caller(); }}},
      {"reuse_gradients", {Then::refuses, [](Engine& e) { e.reuse_gradients(); }}},
      {"use_gradients", {Then::refuses, [](Engine& e) { e.use_gradients(); }}},
      {"skip_step", {Then::refuses, [](Engine& e) { e.skip_step(); }}},
      {"has_gradient", {Then::refuses, [](Engine& e) { e.has_gradient(0, 0); }}},
      {"generation", {Then::refuses, [](Engine& e) { e.generation(0); }}},
      {"expect_step", {Then::refuses, [](Engine& e) { e.expect_step(groups); }}},
      {"step", {Then::refuses, [](Engine& e) { e.step(groups); }}},
      {"grad_norm", {Then::refuses, [](Engine& e) { e.grad_norm(); }}},
      {"clip_grad_norm", {Then::refuses, [](Engine& e) { e.clip_grad_norm(1.0); }}},
      {"synchronize", {Then::refuses, [](Engine& e) { e.synchronize(); }}},
      {"save", {Then::refuses, [=](Engine& e) { e.save(folder, "{}"); }}},
      {"load", {Then::refuses, [=](Engine& e) { e.load(folder); }}},
      {"device", {Then::answers, [](Engine& e) { EXPECT_NE(e.device(), nullptr); }}},
      {"layout", {Then::answers, [](Engine& e) { EXPECT_EQ(e.layout().units.size(), 6U); }}},
      {"plan", {Then::answers, [](Engine& e) { EXPECT_FALSE(e.plan().text().empty()); }}},
      {"stats", {Then::answers, [](Engine& e) { EXPECT_EQ(e.stats().step, 4); }}},
      {"report", {Then::answers, [](Engine& e) { EXPECT_EQ(e.report().step, 4); }}},
      {"report_inside", {Then::answers, [](Engine& e) { EXPECT_EQ(e.report_inside().step, 4); }}},
      {"figures", {Then::answers, [](Engine& e) { EXPECT_GT(e.figures().steps, 0); }}},
      {"predict", {Then::answers, [](Engine& e) { EXPECT_GT(e.predict().step_s, 0); }}},
      {"predict_budgets",
       {Then::answers, [](Engine& e) { EXPECT_EQ(e.predict_budgets(budgets).size(), 2U); }}},
      {"record_journal", {Then::refuses, [](Engine& e) { e.record_journal(true); }}},
      {"take_journal", {Then::refuses, [](Engine& e) { e.take_journal(); }}},
      {"take_device_spans", {Then::refuses, [](Engine& e) { e.take_device_spans(); }}},
      {"stall", {Then::answers, [](Engine& e) { EXPECT_EQ(e.stall(), ""); }}},
      {"close", {Then::answers, [](Engine& e) { e.close(); }}},
  };
  return all;
}

/// Names of what class Engine declares in public, by its header.
std::set<std::string> public_methods() {
  std::ifstream in(OVERSPILL_ENGINE_HEADER);
  std::set<std::string> names;
  bool inside = false;
  const std::regex declaration(R"(^  [A-Za-z_][\w:<>&*, ]* [&*]?(\w+)\()");
  for (std::string line; std::getline(in, line);) {
    if (line == "class Engine {") inside = true;
    if (inside && line == " private:") break;
    std::smatch found;
    if (inside && std::regex_search(line, found, declaration)) names.insert(found[1]);
  }
  return names;
}

TEST(Closed, EveryPublicMethodAnswersOrSaysWhyNot) {
  for (const engine::Placement placement : {engine::Placement::host, engine::Placement::nvme}) {
    SCOPED_TRACE(placement_name(placement));
    engine::Config config;
    config.host_budget_bytes = 64 << 20;
    config.nvme = {"/nowhere"};  // the store is in memory
    config.threads = 2;
    config.chunk_elements = 4096;
    config.placement = placement;
    Engine engine(toy_units(), config, make_resources(toy_units(), config, {"host", "memory", 1}));
    toy_load(engine);
    for (int step = 0; step < 4; ++step) toy_step(engine, step, 1, 0);
    engine::Lease lease = engine.acquire(1);
    const std::vector<float> seen = toy_leased(engine, lease, 1, 0);
    engine.close();
    for (const auto& [name, call] : calls()) {
      SCOPED_TRACE(name);
      std::string told;
      try {
        call.make(engine);
      } catch (const std::invalid_argument& error) {
        told = error.what();
      }
      EXPECT_EQ(told, call.then == Then::refuses ? "the engine was closed" : "");
    }
    EXPECT_EQ(toy_leased(engine, lease, 1, 0), seen) << "a lease outlives the engine";
    lease.use_on({});
  }
}

TEST(Closed, NoPublicMethodIsForgotten) {
  std::set<std::string> tried;
  for (const auto& [name, call] : calls()) tried.insert(name);
  const std::set<std::string> declared = public_methods();
  ASSERT_GT(declared.size(), 25U) << "the header reads differently";
  EXPECT_EQ(tried, declared);
}

}  // namespace
}  // namespace overspill::testing
