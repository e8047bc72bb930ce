// A model divided beside the engine (tensor or pipeline parallelism): norms span all of its parts.
#include <gtest/gtest.h>

#include <barrier>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_optim/optimizer.h"
#include "engine/collectives/in_process.h"
#include "engine/engine.h"
#include "engine/resources.h"
#include "tests/engine/rank_world.h"

namespace overspill::testing {
namespace {

using engine::Communicator;

constexpr int64_t kOwn = 3000, kShared = 100;  // elements: of a part's own, of what all parts hold
constexpr double kLimit = 1.0;

/// One rank of `data` ranks that share part `part` of a model of two parts.
class Part {
 public:
  Part(int part, std::unique_ptr<Communicator> data, std::unique_ptr<Communicator> model) : part_(part) {
    engine::Config config;
    config.host_budget_bytes = 8 << 20;
    config.threads = 1;
    config.chunk_elements = 1024;
    config.max_grad_norm = kLimit;
    const std::vector<engine::UnitSpec> units = {
        {"own", optim::Format::fp32, "F32", {{"own.weight", {kOwn}, 0, {}}}},
        {"shared", optim::Format::fp32, "F32", {{"shared.weight", {kShared}, 0, {}, {}, part == 0}}}};
    engine::Resources resources = make_resources(units, config, {}, std::move(data));
    resources.ranks.model_ranks = std::move(model);
    engine_ = std::make_unique<engine::Engine>(units, config, std::move(resources));
    const std::vector<float> ones(kOwn, 1.0F);
    for (int32_t u : {0, 1}) {
      const auto bytes = std::as_bytes(std::span(ones).first(static_cast<size_t>(u == 0 ? kOwn : kShared)));
      engine_->load_weight(u, 0, bytes, "F32");
    }
    engine_->start_states(groups_);
  }

  /// Gradients of part + 1 and of 2, `bad` in one place of the part's own.
  void backward(float bad = 0) {
    engine_->begin_pass({true, true});
    std::vector<float> own(kOwn, static_cast<float>(part_ + 1));
    if (bad != 0) own[17] = bad;
    const std::vector<float> shared(kShared, 2.0F);
    engine_->begin_backward();
    engine_->add_gradient(1, 0, std::as_bytes(std::span(shared)), "F32");
    engine_->add_gradient(0, 0, std::as_bytes(std::span(own)), "F32");
  }
  engine::StepResult step() { return engine_->step(groups_); }
  engine::Engine& engine() { return *engine_; }

  float shared_weight() {
    std::vector<float> values(kShared);
    engine_->read_weight(1, 0, std::as_writable_bytes(std::span(values)), "F32");
    return values[0];
  }

 private:
  int part_;
  std::unique_ptr<engine::Engine> engine_;
  const std::vector<optim::Hyper> groups_ = {optim::AdamConfig{.lr = 0.1}};
};

/// body(one rank of a part, the part's number) on a thread each: two parts, each held by `data` ranks. What
/// each threw.
std::vector<std::string> on_parts(int data, const std::function<void(Part&, int)>& body) {
  constexpr auto kPatience = std::chrono::seconds(60);
  std::vector<std::vector<std::unique_ptr<Communicator>>> of_part, of_rank;
  for (int part = 0; part < 2; ++part) of_part.push_back(engine::make_in_process_world(data, kPatience));
  for (int rank = 0; rank < data; ++rank) of_rank.push_back(engine::make_in_process_world(2, kPatience));
  std::vector<std::string> errors(2 * static_cast<size_t>(data));
  std::vector<std::thread> threads;
  for (int part = 0; part < 2; ++part) {
    for (int rank = 0; rank < data; ++rank) {
      threads.emplace_back([&, part, rank] {
        try {
          Part one(part, std::move(of_part[part][rank]), std::move(of_rank[rank][part]));
          body(one, part);
        } catch (const std::exception& error) {
          errors[static_cast<size_t>(part) * static_cast<size_t>(data) + static_cast<size_t>(rank)] =
              error.what();
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

class ModelRanks : public ::testing::TestWithParam<int> {};  // ranks that share a part

TEST_P(ModelRanks, HaveOneNormThatCountsEachParameterOnce) {
  const int data = GetParam();
  const double squares = kOwn * (1.0 + 4.0) + kShared * 4.0;  // of the mean of ranks that give the same
  const double clip = kLimit / (std::sqrt(squares) + 1e-6);
  std::vector<float> shared(2);
  const auto errors = on_parts(data, [&](Part& one, int part) {
    one.backward();
    EXPECT_DOUBLE_EQ(one.engine().grad_norm(), std::sqrt(squares));
    const engine::StepResult result = one.step();
    EXPECT_DOUBLE_EQ(result.norm, std::sqrt(squares));
    EXPECT_DOUBLE_EQ(result.clip, clip);
    const float weight = one.shared_weight();
    if (one.engine().layout().slice == 0) shared[static_cast<size_t>(part)] = weight;
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_LT(shared[0], 1.0F);
  EXPECT_EQ(shared[0], shared[1]) << "copies stay copies";
}

TEST_P(ModelRanks, SkipAStepTogether) {
  const auto errors = on_parts(GetParam(), [&](Part& one, int part) {
    one.backward(part == 1 ? std::numeric_limits<float>::infinity() : 0);
    EXPECT_TRUE(one.step().skipped);
    EXPECT_EQ(one.shared_weight(), 1.0F);
    one.backward();
    EXPECT_FALSE(one.step().skipped);
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST_P(ModelRanks, EndWithTheOneThatFails) {
  std::barrier failing(GetParam());  // else the first to go would end the other's backward
  const auto errors = on_parts(GetParam(), [&](Part& one, int part) {
    one.backward();
    if (part == 1) {
      failing.arrive_and_wait();
      throw std::runtime_error("no more");
    }
    one.step();
  });
  for (size_t i = 0; i < errors.size(); ++i) {
    const bool failed = i >= errors.size() / 2;
    EXPECT_NE(errors[i].find(failed ? "no more" : "its engine was destroyed by an exception"),
              std::string::npos)
        << errors[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Data, ModelRanks, ::testing::Values(1, 2),
                         [](const auto& info) { return "ranks" + std::to_string(info.param); });

}  // namespace
}  // namespace overspill::testing
