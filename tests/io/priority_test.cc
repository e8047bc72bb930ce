// What goes first on a path, without a disk: the queue, and a backend that is played by hand.
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "io/piece_queue.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

using Kind = Transfer::Kind;
using Priority = Transfer::Priority;

class Queue : public testing::Test, private TransferOwner {
 protected:
  /// A transfer of `pieces` pieces, known by its name.
  void push(const std::string& name, Priority priority, int pieces = 1) {
    Transfer& transfer = transfers_.emplace_back();
    names_.push_back(name);
    transfer.kind = priority == Priority::write_behind ? Kind::write : Kind::read;
    transfer.priority = priority;
    transfer.extent = {.slab = 0, .generation = 1, .offset = 0, .bytes = pieces * kPiece};
    transfer.memory = memory_.data();
    transfer.context = &names_.back();
    queue_.push(transfer);
  }
  /// The backend takes one piece; the name of its transfer.
  std::string take() {
    Piece& piece = held_.emplace_back();
    if (!queue_.next(piece)) {
      held_.pop_back();
      return "";
    }
    return name_of(*piece.active->transfer);
  }
  /// The kernel is done with the oldest piece.
  void settle() {
    Piece piece = held_.front();
    held_.pop_front();
    EXPECT_TRUE(queue_.settle(piece, -ENXIO));  // which nobody tries again
  }

  PieceQueue queue_{*this, 8, kPiece, nullptr};
  std::vector<std::string> completed_;

 private:
  static std::string name_of(const Transfer& transfer) {
    return *static_cast<const std::string*>(transfer.context);
  }
  Target locate(const Transfer&) override { return {.fd = -1, .slab = 0, .sums = sums_}; }
  std::string path_of(const Target&) override { return "played"; }
  void first_retry(const Error&) noexcept override {}
  void completed(Transfer& transfer) noexcept override { completed_.push_back(name_of(transfer)); }

  AlignedMemory memory_{4 * kPiece};
  std::vector<uint64_t> sums_ = std::vector<uint64_t>(4);
  std::deque<Transfer> transfers_;
  std::deque<std::string> names_;
  std::deque<Piece> held_;
};

TEST_F(Queue, ADemandReadOvertakesReadAheadAndWriteBehind) {
  push("write 1", Priority::write_behind);
  push("ahead 1", Priority::prefetch);
  push("write 2", Priority::write_behind);
  push("demand 1", Priority::demand);
  push("ahead 2", Priority::prefetch);
  push("demand 2", Priority::demand);
  for (const char* expected : {"demand 1", "demand 2", "ahead 1", "ahead 2", "write 1", "write 2", ""})
    EXPECT_EQ(take(), expected);
}

TEST_F(Queue, ADemandReadOvertakesWhatHasBegun) {
  push("write", Priority::write_behind, 3);
  EXPECT_EQ(take(), "write");
  push("demand", Priority::demand, 2);
  EXPECT_EQ(take(), "demand");
  EXPECT_EQ(take(), "demand");
  EXPECT_EQ(take(), "write");
  EXPECT_EQ(take(), "write");
  EXPECT_EQ(take(), "");
}

// The ring frees slots in the order in which their writes were submitted, and the next read needs any slot:
// so the first submitted is the first needed.
TEST_F(Queue, WriteBehindIsDrainedInTheOrderInWhichSlotsAreNeeded) {
  for (int i = 0; i < 4; ++i) push("write " + std::to_string(i), Priority::write_behind, 2);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(take(), "write " + std::to_string(i));
    EXPECT_EQ(take(), "write " + std::to_string(i)) << "one is finished before the next begins";
    settle();
    settle();
  }
  EXPECT_EQ(completed_, (std::vector<std::string>{"write 0", "write 1", "write 2", "write 3"}));
}

TEST_F(Queue, CountsWhatIsOnItsWay) {
  push("ahead", Priority::prefetch, 2);
  push("demand", Priority::demand);
  EXPECT_EQ(queue_.meter().read().in_flight, 2);
  while (!take().empty()) {
  }
  settle();
  settle();
  settle();
  const PathStats stats = queue_.meter().read();
  EXPECT_EQ(stats.in_flight, 0);
  EXPECT_EQ(stats.in_flight_max, 2);
  EXPECT_EQ(stats.bytes_read, 0) << "what failed does not count";
  EXPECT_EQ(stats.demand_reads.count, 0);
  EXPECT_GT(stats.busy_ns, 0);
}

}  // namespace
}  // namespace overspill::io
