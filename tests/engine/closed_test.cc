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

#include "cpu_optim/optimizer.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "engine/plan/predict.h"
#include "engine/resources.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Engine;

/// Calls of public methods, by their names.
using Calls = std::multimap<std::string, std::function<void(Engine&)>>;

/// What a closed engine refuses.
const Calls& refused() {
  static std::vector<float> values(6208);
  static const auto bytes = [] { return std::as_writable_bytes(std::span(values)); };
  static const std::vector<optim::Hyper> groups = toy_groups(0);
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "overspill-never-there";
  static const Calls all = {
      {"load_weight", [](Engine& e) { e.load_weight(0, 0, bytes(), "F32"); }},
      {"read_weight", [](Engine& e) { e.read_weight(0, 0, bytes(), "F32"); }},
      {"start_states", [](Engine& e) { e.start_states(groups); }},
      {"read_state", [](Engine& e) { e.read_state(0, 0, "m", values); }},
      {"own_part", [](Engine& e) { e.own_part(0, 0); }},
      {"read_own_state", [](Engine& e) { e.read_own_state(0, 0, "m", values); }},
      {"write_state", [](Engine& e) { e.write_state(0, 0, "m", values); }},
      {"updates_of", [](Engine& e) { e.updates_of(0, 0); }},
      {"set_updates_of", [](Engine& e) { e.set_updates_of(0, 0, 1); }},
      {"begin_pass",
       [](Engine& e) {
         e.begin_pass({true, true});
       }},
      {"begin_backward", [](Engine& e) { e.begin_backward(); }},
      {"acquire", [](Engine& e) { (void)e.acquire(0); }},
      {"acquire", [](Engine& e) { (void)e.acquire(0, engine::Queue{}); }},
      {"keep_activation", [](Engine& e) { (void)e.keep_activation({}); }},
      {"resident_now", [](Engine& e) { e.resident_now(0); }},
      {"read_part", [](Engine& e) { e.read_part(0, 0, 0, bytes()); }},
      {"begin_gradient", [](Engine& e) { (void)e.begin_gradient(0, 0, "F32"); }},
      {"written", [](Engine& e) { e.written(0, 0, bytes().first(6208 * 2)); }},
      {"add_gradient", [](Engine& e) { e.add_gradient(0, 0, bytes(), "F32"); }},
      {"add_gradient",
       [](Engine& e) {
         e.add_gradient(0, 0, engine::DeviceArray{bytes().data(), 6208 * 4, "F32", nullptr}, {});
       }},
      {"clear_gradients", [](Engine& e) { e.clear_gradients(); }},
      {"zero_gradients", [](Engine& e) { e.zero_gradients(); }},
      {"replace_gradient", [](Engine& e) { e.replace_gradient(0, 0, bytes(), "F32"); }},
      {"read_gradient",
       [](Engine& e) {
         std::vector<std::byte> room(bytes().size());
         e.read_gradient(0, 0, room, "F32");
       }},
      {"read_whole_gradient", [](Engine& e) { e.read_whole_gradient(0, 0, values); }},
      {"replace_whole_gradient", [](Engine& e) { e.replace_whole_gradient(0, 0, values); }},
      {"read_own_gradient", [](Engine& e) { e.read_own_gradient(0, 0, values); }},
      {"clipped_by_caller", [](Engine& e) { e.clipped_by_caller(); }},
      {"set_loss_scale", [](Engine& e) { e.set_loss_scale(2); }},
      {"reuse_gradients", [](Engine& e) { e.reuse_gradients(); }},
      {"use_gradients", [](Engine& e) { e.use_gradients(); }},
      {"skip_step", [](Engine& e) { e.skip_step(); }},
      {"has_gradient", [](Engine& e) { e.has_gradient(0, 0); }},
      {"generation", [](Engine& e) { e.generation(0); }},
      {"expect_step", [](Engine& e) { e.expect_step(groups); }},
      {"step", [](Engine& e) { e.step(groups); }},
      {"grad_norm", [](Engine& e) { e.grad_norm(); }},
      {"clip_grad_norm", [](Engine& e) { e.clip_grad_norm(1.0); }},
      {"synchronize", [](Engine& e) { e.synchronize(); }},
      {"save", [=](Engine& e) { e.save(folder, "{}"); }},
      {"save_in_background",
       [=](Engine& e) { e.save_in_background(folder, [](const auto&) { return std::string("{}"); }); }},
      {"wait_for_save", [](Engine& e) { e.wait_for_save(); }},
      {"wait_for_snapshot", [](Engine& e) { e.wait_for_snapshot(); }},
      {"load", [=](Engine& e) { e.load(folder); }},
      {"record_journal", [](Engine& e) { e.record_journal(true); }},
      {"take_journal", [](Engine& e) { e.take_journal(); }},
      {"take_device_spans", [](Engine& e) { e.take_device_spans(); }},
  };
  return all;
}

/// What it still answers.
const Calls& answered() {
  static const std::vector<int64_t> budgets = {1 << 20, 64 << 20};
  static const Calls all = {
      {"device", [](Engine& e) { EXPECT_NE(e.device(), nullptr); }},
      {"layout", [](Engine& e) { EXPECT_EQ(e.layout().units.size(), 6U); }},
      {"plan", [](Engine& e) { EXPECT_FALSE(e.plan().text().empty()); }},
      {"stats", [](Engine& e) { EXPECT_EQ(e.stats().step, 4); }},
      {"hurry_save", [](Engine& e) { e.hurry_save(); }},
      {"save_progress", [](Engine& e) { EXPECT_FALSE(e.save_progress().under_way); }},
      {"report", [](Engine& e) { EXPECT_EQ(e.report().step, 4); }},
      {"report_inside", [](Engine& e) { EXPECT_EQ(e.report_inside().step, 4); }},
      {"report_sum", [](Engine& e) { EXPECT_EQ(e.report_sum().step, 4); }},
      {"figures", [](Engine& e) { EXPECT_GT(e.figures().steps, 0); }},
      {"predict", [](Engine& e) { EXPECT_GT(e.predict().step_s, 0); }},
      {"predict_budgets", [](Engine& e) { EXPECT_EQ(e.predict_budgets(budgets).size(), 2U); }},
      {"stall", [](Engine& e) { EXPECT_EQ(e.stall(), ""); }},
      {"close", [](Engine& e) { e.close(); }},
  };
  return all;
}

/// What the engine says of it; empty: it answers.
std::string told(Engine& engine, const Calls::mapped_type& call) {
  try {
    call(engine);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
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
    for (const auto& [name, call] : refused()) EXPECT_EQ(told(engine, call), "the engine was closed") << name;
    for (const auto& [name, call] : answered()) EXPECT_EQ(told(engine, call), "") << name;
    EXPECT_EQ(toy_leased(engine, lease, 1, 0), seen) << "a lease outlives the engine";
    lease.use_on({});
  }
}

TEST(Closed, NoPublicMethodIsForgotten) {
  std::set<std::string> tried;
  for (const Calls* calls : {&refused(), &answered()}) {
    for (const auto& [name, call] : *calls) tried.insert(name);
  }
  const std::set<std::string> declared = public_methods();
  ASSERT_GT(declared.size(), 25U) << "the header reads differently";
  EXPECT_EQ(tried, declared);
}

}  // namespace
}  // namespace overspill::testing
