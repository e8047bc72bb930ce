// What does not answer: it is told with growing gaps, and given up when its time is over, with its memory
// left to the kernel. The watch with a clock that is played, the queue with a backend that is, and rings that
// really break.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "io/piece_queue.h"
#include "io/stall_watch.h"
#include "io/unique_fd.h"
#include "tests/io/store_test_util.h"

namespace overspill::io {
namespace {

using std::chrono::nanoseconds;
using std::chrono::seconds;
using Kind = Transfer::Kind;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kPiece = kChecksumBlockBytes;

class PlayedWatch : public testing::Test {
 protected:
  explicit PlayedWatch(seconds give_up_after = seconds(0))
      : watch_(
            {.tell_after = seconds(10), .give_up_after = give_up_after},
            [this](const std::string& line) { said_.push_back(line); }, [this] { return now_; }) {
    watch_.add({.path = "/mnt/a",
                .silent_since = [this] { return since_; },
                .unanswered = [this] { return unanswered_; },
                .give_up = [this](const Error& why) { given_up_.push_back(why); },
                .tend = nullptr});
  }
  /// Looks every second, as the thread would.
  void pass(int count) {
    for (int i = 0; i < count; ++i) {
      now_ += seconds(1);
      watch_.look();
    }
  }
  void ask(int64_t bytes) {
    unanswered_ = {.operation = Operation::write, .file = "/mnt/a/slab-0.bin", .length_bytes = bytes};
    since_ = now_;
  }

  nanoseconds now_ = seconds(1000);
  std::optional<nanoseconds> since_;
  std::optional<Unanswered> unanswered_;
  std::vector<std::string> said_;
  std::vector<Error> given_up_;
  StallWatch watch_;
};

TEST_F(PlayedWatch, TellsWithGrowingGapsAndWhenThePathAnswersAgain) {
  ask(4096);
  pass(9);
  EXPECT_TRUE(said_.empty()) << said_.front();
  EXPECT_EQ(watch_.board()->text(), "");
  std::vector<int> told_at;
  for (int second = 10; second <= 100; ++second) {
    const size_t before = said_.size();
    pass(1);
    if (said_.size() > before) told_at.push_back(second);
  }
  EXPECT_EQ(told_at, (std::vector<int>{10, 20, 40, 80}));
  for (const char* part : {"/mnt/a ", "10 s", "write of 4096 bytes", "/mnt/a/slab-0.bin"})
    EXPECT_TRUE(contains(said_.front(), part)) << part << " is missing in: " << said_.front();
  EXPECT_TRUE(contains(watch_.board()->text(), "has not answered for 80 s"));
  EXPECT_EQ(watch_.stats(0).now_ns, nanoseconds(seconds(80)).count());

  said_.clear();
  since_.reset();
  unanswered_.reset();
  pass(30);
  ASSERT_EQ(said_.size(), 1U);
  EXPECT_TRUE(contains(said_.front(), "answers again, after 101 s")) << said_.front();
  EXPECT_EQ(watch_.board()->text(), "");
  EXPECT_EQ(watch_.stats(0).count, 1);
  EXPECT_EQ(watch_.stats(0).longest_ns, nanoseconds(seconds(101)).count());
  EXPECT_EQ(watch_.stats(0).now_ns, 0);
  EXPECT_TRUE(given_up_.empty()) << "without a deadline nobody gives up";
}

TEST_F(PlayedWatch, AnAnswerStartsTheCountAnew) {
  for (int i = 0; i < 20; ++i) {  // a slow disk with a long queue: something is always asked of it
    ask(4096);
    pass(9);
  }
  EXPECT_TRUE(said_.empty());
}

TEST_F(PlayedWatch, WorkThatMovesIsNoStallAndWorkThatStandsStillIsNamed) {
  {
    StallWatch::Progress work(&watch_, Operation::write, "/mnt/a/copy");
    for (int i = 0; i < 5; ++i) {
      pass(9);
      work.moved();
    }
    EXPECT_TRUE(said_.empty()) << said_.front();
    pass(11);
    ASSERT_EQ(said_.size(), 1U);
    EXPECT_TRUE(contains(said_.front(), "write of /mnt/a/copy")) << said_.front();
    work.moved();
    pass(1);
    ASSERT_EQ(said_.size(), 2U);
    EXPECT_TRUE(contains(said_.back(), "answers again")) << said_.back();
  }
  pass(100);
  EXPECT_EQ(said_.size(), 2U) << "it is over";
  StallWatch::Progress nobody_looks(nullptr, Operation::write, "/mnt/a/copy");
  nobody_looks.moved();
}

TEST_F(PlayedWatch, ItsEndLeavesNoStallOnTheBoard) {
  ask(4096);
  pass(11);
  ASSERT_NE(watch_.board()->text(), "");
  since_.reset();  // it answers, and the store ends before the next look
  watch_.stop();
  EXPECT_EQ(watch_.board()->text(), "");
}

/// While it lives no thread can be made: none has so much room for its stack.
class NoThreads {
 public:
  NoThreads() {
    ::pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    ::pthread_attr_init(&huge);
    ::pthread_attr_setstacksize(&huge, size_t{1} << 47);
    ::pthread_setattr_default_np(&huge);
    ::pthread_attr_destroy(&huge);
  }
  ~NoThreads() {
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_{};
};

TEST(Watch, ThatGetsNoThreadSaysSo) {
  StallWatch watch(StallPolicy{});
  const NoThreads none;
  const Error error = error_of([&] { watch.start(); });
  EXPECT_EQ(error.kind, ErrorKind::threads);
  EXPECT_TRUE(contains(error.message(), "ulimit -u")) << error.message();
  EXPECT_FALSE(contains(error.message(), "ulimit -n")) << error.message();
}

class Deadline : public PlayedWatch {
 protected:
  Deadline() : PlayedWatch(seconds(15)) {}
};

TEST_F(Deadline, GivesUpOnceWithATypedErrorThatNamesPathOperationAndSeconds) {
  ask(4096);
  pass(14);
  EXPECT_TRUE(given_up_.empty());
  pass(10);
  ASSERT_EQ(given_up_.size(), 1U);
  EXPECT_EQ(given_up_[0].kind, ErrorKind::stalled);
  const std::string message = given_up_[0].message();
  for (const char* part : {"write failed", "/mnt/a/slab-0.bin", "4096 bytes", "15 s", "io_deadline_seconds"})
    EXPECT_TRUE(contains(message, part)) << part << " is missing in: " << message;
  EXPECT_NE(watch_.board()->text(), "") << "it hangs still";
}

TEST_F(Deadline, WorkInMemoryOfTheCallersIsToldAndNotGivenUp) {
  StallWatch::Progress work(&watch_, Operation::write, "/mnt/a/copy");
  pass(40);
  ASSERT_FALSE(said_.empty());
  EXPECT_FALSE(contains(said_.front(), "gives up")) << said_.front();
  EXPECT_TRUE(given_up_.empty());
}

TEST_F(Deadline, ItsEndLeavesOnTheBoardWhatWasGivenUp) {
  ask(4096);
  pass(20);
  ASSERT_EQ(given_up_.size(), 1U);
  watch_.stop();
  EXPECT_NE(watch_.board()->text(), "") << "a thread of it hangs still";
}

TEST_F(Deadline, ASyncThatGetsNoThreadIsMadeByItsCallerAndLeavesNoStall) {
  const ScratchFolder folder;
  const std::string path = (folder.path() / "file").string();
  const UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  ASSERT_TRUE(file);
  {
    const NoThreads none;
    EXPECT_EQ(sync_data(&watch_, file.get(), path), 0);
  }
  pass(30);
  EXPECT_EQ(watch_.board()->text(), "");
  EXPECT_TRUE(said_.empty()) << said_.front();
  EXPECT_EQ(sync_data(&watch_, file.get(), path), 0);
}

// ---- the queue

class GivenUp : public testing::Test, private TransferOwner {
 protected:
  Transfer& push(Kind kind, int pieces = 1) {
    transfers_.push_back(std::make_unique<Transfer>(make_transfer(
        kind, {.slab = 0, .generation = 1, .offset = 0, .bytes = pieces * kPiece}, memory_.data())));
    queue_.push(*transfers_.back());
    return *transfers_.back();
  }
  Piece take() {
    Piece piece;
    EXPECT_TRUE(queue_.next(piece));
    queue_.asked(piece);
    return piece;
  }
  bool settle(Piece& piece, int64_t result) {
    queue_.answered(piece);
    return queue_.settle(piece, result);
  }

  PieceQueue queue_{*this, 8, kPiece, nullptr};
  std::vector<Transfer*> completed_;

 private:
  Target locate(const Transfer&) override { return {.fd = -1, .slab = 0, .sums = sums_}; }
  std::string path_of(const Target&) override { return "played"; }
  void completed(Transfer& transfer) noexcept override { completed_.push_back(&transfer); }

  AlignedMemory memory_{4 * kPiece};
  std::vector<uint64_t> sums_ = std::vector<uint64_t>(4);
  std::vector<std::unique_ptr<Transfer>> transfers_;
};

TEST_F(GivenUp, EveryoneWhoWaitsHearsOfItAndLateAnswersReachNobody) {
  push(Kind::read, 3);
  Piece first = take(), second = take();  // the third piece is not issued
  push(Kind::write);
  push(Kind::read);
  Piece failed = take();              // of the first transfer
  EXPECT_TRUE(settle(failed, -EIO));  // it waits for another try
  EXPECT_TRUE(queue_.unanswered());
  EXPECT_EQ(queue_.unanswered()->requests, 2);
  EXPECT_FALSE(queue_.kernel_keeps_memory());

  queue_.give_up({.kind = ErrorKind::stalled, .path = "played"});
  queue_.fail_all();
  ASSERT_EQ(completed_.size(), 3U);
  for (const Transfer* one : completed_) EXPECT_EQ(one->error->kind, ErrorKind::stalled);
  EXPECT_TRUE(queue_.kernel_keeps_memory());

  Transfer& later = push(Kind::read);
  Piece none;
  EXPECT_FALSE(queue_.next(none));
  queue_.fail_all();
  EXPECT_EQ(completed_.back(), &later);

  completed_.clear();
  EXPECT_TRUE(settle(first, kPiece)) << "the kernel has answered after all";
  EXPECT_TRUE(queue_.kernel_keeps_memory());
  EXPECT_TRUE(settle(second, -EIO));
  EXPECT_FALSE(queue_.kernel_keeps_memory());
  EXPECT_TRUE(completed_.empty());
  EXPECT_EQ(queue_.retries().reads, 1);
}

/// An owner that is slow: in the call of a test's choice it waits until wait_for_threads() has returned, or
/// for a moment where that rightly waits for it.
class SlowOwner : public testing::Test, private TransferOwner {
 protected:
  enum class Call { none, given_up, first_retry, completed };

  /// Runs `caller` on a thread, which makes `call`, and ends the queue meanwhile.
  template <typename Caller>
  void end_during(Call call, Caller caller) {
    slow_ = call;
    queue_.threads_begin(1);  // one that hangs in the kernel
    std::thread thread(caller);
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return entered_; });
    }
    queue_.give_up({.kind = ErrorKind::stalled, .path = "played"});
    queue_.stop();
    EXPECT_FALSE(queue_.wait_for_threads());
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread.join();
    EXPECT_FALSE(ended_during_call_) << "whoever ends the store would free the owner now";
  }
  Piece read() {
    queue_.push(transfer_);
    Piece piece;
    EXPECT_TRUE(queue_.next(piece));
    return piece;
  }

  PieceQueue queue_{*this, 8, kPiece, nullptr};

 private:
  Target locate(const Transfer&) override { return {.fd = -1, .slab = 0, .sums = sums_}; }
  std::string path_of(const Target&) override { return "played"; }
  void given_up() noexcept override { linger(Call::given_up); }
  void first_retry(const Error&) noexcept override { linger(Call::first_retry); }
  void completed(Transfer&) noexcept override { linger(Call::completed); }

  void linger(Call call) {
    std::unique_lock lock(mutex_);
    if (call != slow_ || std::exchange(entered_, true)) return;
    changed_.notify_all();
    changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return ended_; });
    ended_during_call_ = ended_;
  }

  AlignedMemory memory_{kPiece};
  std::vector<uint64_t> sums_ = std::vector<uint64_t>(1);
  Transfer transfer_ =
      make_transfer(Kind::read, {.slab = 0, .generation = 1, .offset = 0, .bytes = kPiece}, memory_.data());
  std::mutex mutex_;
  std::condition_variable changed_;
  Call slow_ = Call::none;
  bool entered_ = false;
  bool ended_ = false;
  bool ended_during_call_ = false;
};

TEST_F(SlowOwner, IsNotLeftWhileItIsToldThatItsQueueWasGivenUp) {
  end_during(Call::given_up, [&] { queue_.give_up({.kind = ErrorKind::ring, .path = "played"}); });
}

TEST_F(SlowOwner, IsNotLeftWhileItIsToldOfTheFirstRetry) {
  Piece piece = read();
  end_during(Call::first_retry, [&] { queue_.settle(piece, -EIO); });
}

TEST_F(SlowOwner, IsNotLeftWhileItIsToldOfACompletion) {
  Piece piece = read();
  end_during(Call::completed, [&] { queue_.settle(piece, -EINVAL); });
}

// ---- rings that break, forked children

/// From here on the ring's system call fails in every thread.
bool refuse_ring_calls() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(EBADF)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) == 0;
}

constexpr int kSkipped = 77;

TEST(Ring, OneThatBreaksFailsTheStoreAndNotTheProcess) {
  const ScratchFolder folder;
  const int status = exit_status_of([&] {
    FileStoreOptions options = file_options(folder.path());
    options.backend = FileStoreOptions::Backend::uring;
    options.patience.stall.tell_after = std::chrono::milliseconds(1);
    std::unique_ptr<Store> store;
    try {
      store = make_file_store(options);
    } catch (const StoreError&) {
      return kSkipped;
    }
    store->reserve(4 * kMiB);
    AlignedMemory memory(kMiB);
    const Extent extent = store->allocate(kMiB);
    if (write(*store, extent, memory)) return 1;
    if (!refuse_ring_calls()) return kSkipped;
    for (int i = 0; i < 3; ++i) {  // also whoever asks later
      const auto error = read(*store, extent, memory);
      if (!error || error->kind != ErrorKind::ring) return 2;
      if (!contains(error->message(), "io_backend")) return 3;
    }
    store->register_memory(memory.all());
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    if (store->stats().paths[0].stalls.now_ns != 0) return 4;  // no disk hangs
    store.reset();
    return 0;
  });
  if (status == kSkipped) GTEST_SKIP() << "io_uring or seccomp is refused here";
  EXPECT_EQ(status, 0);
}

/// Where a machine gives fewer threads than are asked for, what began ends again.
TEST(Threads, ThatTheMachineRefusesAreATypedError) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root may become a user who has no other process";
  const ScratchFolder folder;
  std::filesystem::permissions(folder.path(), std::filesystem::perms::all);
  // The folder above may be closed to others (a clone in root's home), hence the descriptor.
  const int at = ::open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_GE(at, 0);
  EXPECT_EQ(exit_status_of([&] {
              constexpr uid_t kNobodyElse = 54'321;
              const rlimit few{4, 4};
              if (::setrlimit(RLIMIT_NPROC, &few) != 0 || ::fchdir(at) != 0 || ::setuid(kNobodyElse) != 0)
                return 1;
              FileStoreOptions options = file_options(".");
              options.backend = FileStoreOptions::Backend::threads;
              options.threads = 8;
              try {
                make_file_store(options);
              } catch (const StoreError& error) {
                return error.error().kind == ErrorKind::threads && contains(error.what(), "8 threads") ? 0
                                                                                                       : 2;
              }
              return 3;
            }),
            0);
  ::close(at);
}

TEST(Fork, AStoreEndsInAForkedChildAndLivesOnInItsParent) {
  const ScratchFolder folder;
  for (const auto backend : {FileStoreOptions::Backend::automatic, FileStoreOptions::Backend::threads}) {
    FileStoreOptions options = file_options(folder.path());
    options.backend = backend;
    auto store = make_file_store(options);
    store->reserve(4 * kMiB);
    AlignedMemory memory(kMiB);
    const Extent extent = store->allocate(kMiB);
    ASSERT_FALSE(write(*store, extent, memory));
    EXPECT_EQ(exit_status_of([&] {
                ::alarm(60);
                store.reset();
                return 0;
              }),
              0);
    EXPECT_FALSE(read(*store, extent, memory));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace overspill::io
