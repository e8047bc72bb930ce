// The parts of the update, each made alone: the ring of slots, the order of the chunks, and what a worker
// does. The whole is in schedule_test.cc and exactness_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "cpu_optim/half.h"
#include "engine/resources.h"
#include "engine/states/ring.h"
#include "engine/states/update_order.h"
#include "engine/states/update_task.h"
#include "io/memory_store.h"
#include "tests/engine/parts.h"

namespace overspill::testing {
namespace {

using engine::Component;
using engine::Extents;
using engine::Guess;
using engine::kAllComponents;
using engine::Residency;
using engine::StateRing;
using engine::UpdateOrder;

/// What the parts share, over a store whose transfers end when the test says so, on the test's thread.
class UpdateParts : public ::testing::Test, public StateRing::User {
 protected:
  void written(int32_t chunk) override { written_.push_back(chunk); }
  void pump() override { ++pumped_; }

  Residency residency(int32_t chunk) const { return owners_->model.chunks[chunk].residency; }

  Extents allocate(int32_t chunk) const {
    Extents fresh{};
    for (Component component : kAllComponents) {
      if (owners_->setup.in_store(chunk, component))
        fresh[static_cast<size_t>(component)] =
            owners_->core.store->allocate(owners_->setup.component_bytes(chunk, component));
    }
    return fresh;
  }

  /// Brings a chunk into its slot, as a worker finds it, and gives every state one value.
  void read_and_fill(StateRing& ring, int32_t chunk, std::byte value) {
    ring.read(chunk);
    let_transfers_end(*owners_);
    owners_->model.chunks[chunk].become(Residency::updating);
    for (Component component : kAllComponents) {
      if (owners_->setup.in_store(chunk, component)) std::ranges::fill(ring.memory(chunk, component), value);
    }
    for (io::Sealed& state : ring.states(chunk)) {
      if (state.bytes() == 0) continue;
      state.open(*owners_->core.store, 0, state.bytes());
      state.seal(0, state.bytes());
    }
  }

  /// Gives a chunk a version in the store.
  void write(StateRing& ring, int32_t chunk, std::byte value) {
    read_and_fill(ring, chunk, value);
    ring.write(chunk, allocate(chunk));
    let_transfers_end(*owners_);
    std::swap(owners_->model.chunks[chunk].extents, owners_->model.chunks[chunk].guessed_extents);
  }

  std::unique_ptr<Owners> owners_ =
      make_owners({.change_plan = [](engine::Plan& plan) { plan.ring_slots = 2; }});
  std::vector<int32_t> written_;
  int pumped_ = 0;
};

// ---- the ring

TEST_F(UpdateParts, TheRingKeepsASlotUntilTheNewVersionIsWritten) {
  StateRing ring(owners_->setup, owners_->core, owners_->hardware, owners_->model, *this);
  read_and_fill(ring, 0, std::byte{0x11});
  ring.write(0, allocate(0));
  EXPECT_EQ(residency(0), Residency::writing);
  EXPECT_EQ(ring.chunk_in(0), 0);
  EXPECT_TRUE(written_.empty());
  let_transfers_end(*owners_);
  EXPECT_EQ(residency(0), Residency::home);
  EXPECT_EQ(ring.chunk_in(0), -1);
  EXPECT_EQ(written_, std::vector<int32_t>{0});
  EXPECT_GT(pumped_, 0);
  EXPECT_FALSE(owners_->model.chunks[0].guessed_extents[0].empty());
}

TEST_F(UpdateParts, TheRingReadsBackWhatItWrote) {
  StateRing ring(owners_->setup, owners_->core, owners_->hardware, owners_->model, *this);
  write(ring, 0, std::byte{0x11});
  ring.read(0);
  EXPECT_EQ(residency(0), Residency::reading);
  EXPECT_FALSE(ring.ready(0));
  let_transfers_end(*owners_);
  EXPECT_TRUE(ring.ready(0));
  for (Component component : kAllComponents) {
    if (!owners_->setup.in_store(0, component)) continue;
    const auto memory = ring.memory(0, component);
    EXPECT_EQ(std::ranges::count(memory, std::byte{0x11}), std::ssize(memory));
  }
}

TEST_F(UpdateParts, TheRingGivesUpACopyAndNothingElse) {
  StateRing ring(owners_->setup, owners_->core, owners_->hardware, owners_->model, *this);
  write(ring, 0, std::byte{0x11});
  write(ring, 1, std::byte{0x22});
  ring.read(0);
  ring.read(1);
  EXPECT_FALSE(ring.has_free());
  EXPECT_FALSE(ring.at_rest()) << "reads are on their way";
  EXPECT_FALSE(ring.drop_a_copy()) << "reads are on their way";
  EXPECT_THROW(ring.read(2), std::logic_error);
  let_transfers_end(*owners_);
  EXPECT_TRUE(ring.at_rest());
  owners_->model.chunks[1].pending = true;
  EXPECT_TRUE(ring.drop_a_copy());
  EXPECT_EQ(residency(0), Residency::home);
  EXPECT_EQ(residency(1), Residency::staged);
  EXPECT_FALSE(ring.drop_a_copy()) << "the other one is asked for";
}

TEST_F(UpdateParts, TheRingKeepsASlotThatIsLent) {
  StateRing ring(owners_->setup, owners_->core, owners_->hardware, owners_->model, *this);
  ring.read(0);
  let_transfers_end(*owners_);
  ring.lend(0);
  EXPECT_FALSE(ring.ready(0));
  EXPECT_FALSE(ring.at_rest());
  EXPECT_FALSE(ring.drop_a_copy());
  pumped_ = 0;
  ring.returned(0);
  EXPECT_TRUE(ring.ready(0));
  EXPECT_EQ(pumped_, 1);
}

TEST_F(UpdateParts, TheRingRefusesAChunkThatIsNotInASlot) {
  StateRing ring(owners_->setup, owners_->core, owners_->hardware, owners_->model, *this);
  EXPECT_THROW(ring.memory(0, Component::hi), std::logic_error);
  ring.read(0);
  let_transfers_end(*owners_);
  owners_->model.chunks[1].slot = 0;  // of another chunk
  EXPECT_THROW(ring.release(1), std::logic_error);
}

TEST_F(UpdateParts, AFailedWriteLeavesTheOldVersionInPlace) {
  StateRing ring(owners_->setup, owners_->core, owners_->hardware, owners_->model, *this);
  read_and_fill(ring, 0, std::byte{0x11});
  owners_->core.fail("a test");
  ring.write(0, allocate(0));
  let_transfers_end(*owners_);
  EXPECT_EQ(written_, std::vector<int32_t>{0});
  EXPECT_TRUE(owners_->model.chunks[0].guessed_extents[0].empty());
}

// ---- the order

class Order : public UpdateParts {
 protected:
  /// As step() does.
  void schedule(std::initializer_list<int32_t> chunks) {
    order_.begin_step();
    int64_t position = 0;
    for (const int32_t chunk : chunks) {
      owners_->model.chunks[chunk].pending = true;
      owners_->model.chunks[chunk].position = position++;
      order_.expect_again(chunk);
      order_.add(chunk);
    }
  }
  void stage(int32_t chunk) {
    ring_.read(chunk);
    let_transfers_end(*owners_);
  }

  engine::Speculation speculation_{owners_->setup, owners_->hardware, owners_->model};
  StateRing ring_{owners_->setup, owners_->core, owners_->hardware, owners_->model, *this};
  UpdateOrder order_{owners_->setup, owners_->model, owners_->demand, speculation_, ring_};
};

TEST_F(Order, IsThatOfTheStepButForWhatSomebodyWaitsFor) {
  schedule({0, 1, 2, 3});
  EXPECT_EQ(order_.next_to_read(), 0);
  stage(0);
  EXPECT_EQ(order_.next_to_read(), 1);
  const int32_t unit = owners_->setup.layout.chunks[3].unit;
  const int32_t first = owners_->setup.layout.units[unit].first_chunk;
  ASSERT_GT(first, 1) << "another unit than the first chunks'";
  owners_->demand.want_updates(unit);
  EXPECT_EQ(order_.next_to_read(), first);
  owners_->demand.end_updates(unit);
  EXPECT_EQ(order_.next_to_read(), 1);
}

TEST_F(Order, OfUpdatesIsThatOfTheStepWhateverIsStagedFirst) {
  schedule({0, 1});
  EXPECT_EQ(order_.next_to_update(), -1) << "nothing is staged";
  stage(1);
  EXPECT_EQ(order_.next_to_update(), 1);
  stage(0);
  EXPECT_EQ(order_.next_to_update(), 0);
  ring_.lend(0);
  EXPECT_EQ(order_.next_to_update(), 1) << "weights are copied from the slot of chunk 0";
}

TEST_F(Order, ReadsAheadOfTheNextStepWhileASlotIsFree) {
  schedule({0, 1, 2});
  for (const int32_t chunk : {0, 1, 2}) owners_->model.chunks[chunk].pending = false;
  order_.end_guesses();
  EXPECT_EQ(order_.next_to_read(), 0);
  stage(0);
  EXPECT_EQ(order_.next_to_read(), 1);
  stage(1);
  EXPECT_EQ(order_.next_to_read(), -1) << "both slots are taken";
  ring_.release_all();
  order_.stop_reading_ahead();
  EXPECT_EQ(order_.next_to_read(), -1) << "it was told to stop";
  order_.read_ahead();
  EXPECT_EQ(order_.next_to_read(), 2) << "it goes on";
  order_.start_ahead_anew();
  EXPECT_EQ(order_.next_to_read(), 0);
}

TEST_F(Order, WaitsForAChunkWhoseLastVersionIsOnItsWayOut) {
  schedule({0, 1});
  read_and_fill(ring_, 0, std::byte{});
  ring_.write(0, allocate(0));
  EXPECT_EQ(order_.next_to_read(), -1);
  let_transfers_end(*owners_);
  EXPECT_EQ(order_.next_to_read(), 0);
}

TEST_F(Order, OfGuessesIsTheLatestFirst) {
  for (const int32_t chunk : {2, 1, 0}) {
    owners_->model.chunks[chunk].guess = Guess::wanted;
    order_.add_guess(chunk);
  }
  EXPECT_EQ(order_.next_to_read(), 0);
  stage(0);
  EXPECT_EQ(order_.next_to_read(), 1);
  EXPECT_EQ(order_.next_to_update(), 0);
}

// ---- what a worker does

class Task : public ::testing::Test {
 protected:
  engine::Layout layout_ = engine::make_layout(toy_units({.format = optim::Format::fp32}), 4096, 0, 1);
  const engine::Unit& unit_ = layout_.units[0];
  const engine::Chunk& chunk_ = layout_.chunks[0];
  int64_t elements_ = chunk_.elements;
  std::vector<float> weights_ = std::vector<float>(elements_, 2.0F);
  std::vector<float> m_ = std::vector<float>(elements_, 0.25F);
  std::vector<float> v_ = std::vector<float>(elements_, 0.5F);
  std::vector<float> gradients_ = std::vector<float>(elements_, 1.0F);
  std::vector<optim::Factors> factors_ = std::vector<optim::Factors>(
      unit_.segments.size(), optim::make_factors(optim::AdamConfig{.lr = 0.5}, 3, 1.0));
  std::vector<uint8_t> present_ = std::vector<uint8_t>(unit_.segments.size(), 1);

  static std::byte* bytes(std::vector<float>& of) { return reinterpret_cast<std::byte*>(of.data()); }
  engine::UpdateTask task() {
    return {.unit = unit_,
            .chunk = chunk_,
            .memory = {.component = {bytes(weights_), bytes(m_), bytes(v_)}, .index = 0, .seed = 0},
            .gradients = bytes(gradients_),
            .element = optim::Element::fp32,
            .factors = factors_,
            .present = present_};
  }
};

TEST_F(Task, UpdatesWhatHasAGradientAndNothingElse) {
  present_.assign(present_.size(), 0);
  engine::UpdateTask none = task();
  none.run(nullptr);
  EXPECT_EQ(weights_, std::vector<float>(elements_, 2.0F));
  present_.assign(present_.size(), 1);
  engine::UpdateTask all = task();
  all.run(nullptr);
  for (const engine::Run& run : chunk_.runs) {
    EXPECT_NE(weights_[run.begin], 2.0F);
    EXPECT_EQ(weights_[run.begin + run.elements - 1], weights_[run.begin]);
  }
}

TEST_F(Task, ClearsWhatWasNeverWritten) {
  std::vector<float> m_of_zero(elements_), v_of_zero(elements_);
  engine::UpdateTask expected = task();
  std::vector<float> weights = weights_;
  expected.memory.component = {bytes(weights), bytes(m_of_zero), bytes(v_of_zero)};
  expected.run(nullptr);
  engine::UpdateTask cleared = task();
  const auto size = static_cast<size_t>(elements_) * sizeof(float);
  cleared.never_written[1] = {bytes(m_), size};
  cleared.never_written[2] = {bytes(v_), size};
  cleared.run(nullptr);
  EXPECT_EQ(weights_, weights);
  EXPECT_EQ(m_, m_of_zero);
  EXPECT_EQ(v_, v_of_zero);
}

TEST_F(Task, MakesTheNewVersionBesideTheOldOne) {
  std::vector<float> second(elements_), second_m(elements_), second_v(elements_);
  engine::UpdateTask guess = task();
  guess.old = {bytes(weights_), bytes(m_), bytes(v_)};
  guess.memory.component = {bytes(second), bytes(second_m), bytes(second_v)};
  guess.run(nullptr);
  EXPECT_EQ(weights_, std::vector<float>(elements_, 2.0F));
  EXPECT_EQ(m_, std::vector<float>(elements_, 0.25F));
  EXPECT_EQ(v_, std::vector<float>(elements_, 0.5F));
  engine::UpdateTask in_place = task();
  in_place.run(nullptr);
  EXPECT_EQ(second, weights_);
  EXPECT_EQ(second_m, m_);
  EXPECT_EQ(second_v, v_);
}

}  // namespace
}  // namespace overspill::testing
