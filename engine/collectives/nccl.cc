#include "engine/collectives/nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "engine/collectives/nccl_library.h"
#include "engine/collectives/same_call.h"
#include "io/say.h"

namespace overspill::engine {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kPieceAlign = 256;  // of what lies in staging

/// What each rank says of itself before there is a communicator.
struct Hello {
  std::array<char, 512> failure{};  // why it cannot take part; empty: it can
  int64_t version = 0;
  int64_t staging_bytes = 0;
  int64_t small_bytes = 0;
  nccl::UniqueId id{};  // of rank 0
};

nccl::DataType type_of(optim::Element element) {
  switch (element) {
    case optim::Element::bf16:
      return nccl::DataType::bfloat16;
    case optim::Element::fp16:
      return nccl::DataType::float16;
    case optim::Element::fp32:
      break;
  }
  return nccl::DataType::float32;
}

/// An error's text without the name of the call that `control` made.
std::string_view reason_of(std::string_view text) {
  const size_t colon = text.find(": ");
  return colon == std::string_view::npos ? text : text.substr(colon + 2);
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<Communicator> control, std::shared_ptr<kernels::Device> device,
                   const NcclOptions& options)
      : options_(options),
        control_(std::move(control)),
        rank_(control_->rank()),
        world_(control_->world()),
        device_(std::move(device)),
        said_words_(kHeaderWords + 2 * static_cast<size_t>(world_)),
        said_(said_words_ * static_cast<size_t>(world_)) {}

  ~NcclCommunicator() override {
    if (comm_ == nullptr) return;
    if (!NcclCommunicator::failure().empty()) {  // the others may not come to an end of all
      nccl_.comm_abort(comm_);
      return;
    }
    // Finished together with the others where all went well: their GPUs may still read from this one's.
    nccl::Result state = nccl_.comm_finalize(comm_);
    const auto give_up = Clock::now() + options_.timeout;
    while (state == nccl::Result::in_progress && Clock::now() < give_up) {
      if (nccl_.comm_get_async_error(comm_, &state) != nccl::Result::success) break;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    if (state == nccl::Result::success) {
      nccl_.comm_destroy(comm_);
    } else {
      nccl_.comm_abort(comm_);
    }
  }

  /// Collective: all ranks have joined, or all throw.
  void join() {
    std::vector<Hello> hellos(static_cast<size_t>(world_));
    hellos[rank_] = say_hello();
    control_->all_gather(std::as_writable_bytes(std::span(hellos)));
    for (int rank = 0; rank < world_; ++rank) {
      const Hello& hello = hellos[rank];
      if (hello.failure[0] != '\0')
        throw CommunicatorError(fmt::format("NCCL on rank {}: {}", rank, hello.failure.data()));
      if (hello.version != hellos[0].version) {
        throw CommunicatorError(fmt::format("rank {} has NCCL {}, rank 0 has {}", rank,
                                            nccl::version_text(static_cast<int>(hello.version)),
                                            nccl::version_text(static_cast<int>(hellos[0].version))));
      }
      if (hello.staging_bytes != hellos[0].staging_bytes || hello.small_bytes != hellos[0].small_bytes) {
        throw CommunicatorError(fmt::format(
            "rank {} has {} bytes of staging and sends up to {} past NCCL, rank 0 {} and {}", rank,
            hello.staging_bytes, hello.small_bytes, hellos[0].staging_bytes, hellos[0].small_bytes));
      }
    }
    device_->make_current();
    nccl::Config config;
    check("start", nccl_.comm_init_rank_config(&comm_, world_, hellos[0].id, rank_, &config));
    await_launch("start");
    over_control("start", [&] { control_->barrier(); });
  }

  int rank() const override { return rank_; }
  int world() const override { return world_; }

  void all_gather(std::span<std::byte> data) override {
    const char* call = name_of(Call::all_gather);
    throw_if_failed(call);
    if (is_small(data.size())) return over_control(call, [&] { control_->all_gather(data); });
    announce({0, data.size(), data.size(), Call::all_gather}, {}, {});
    const auto slice = std::ssize(data) / world_;
    const int64_t most = piece_bytes(world_);
    for (int64_t at = 0; at < slice && world_ > 1; at += most) {
      const int64_t bytes = std::min(most, slice - at);
      std::byte* const own = staging_.data() + rank_ * bytes;
      stream_->copy_from_host(own, data.data() + rank_ * slice + at, bytes);
      check(call, nccl_.all_gather(own, staging_.data(), static_cast<size_t>(bytes), nccl::DataType::int8,
                                   comm_, stream_->native()));
      await_launch(call);
      for_peers([&](int peer) {
        stream_->copy_to_host(data.data() + peer * slice + at, staging_.data() + peer * bytes, bytes);
      });
    }
    await_stream(call);
  }

  void all_to_all(std::span<const std::byte> send, std::span<std::byte> receive) override {
    const char* call = name_of(Call::all_to_all);
    throw_if_failed(call);
    if (is_small(std::max(send.size(), receive.size())))
      return over_control(call, [&] { control_->all_to_all(send, receive); });
    announce({0, send.size(), receive.size(), Call::all_to_all}, {}, {});
    const size_t slice = send.size() / static_cast<size_t>(world_);
    const auto of = [&](int peer) { return static_cast<size_t>(peer) * slice; };
    move_pairs(
        call, [&](int peer) { return send.subspan(of(peer), slice); },
        [&](int peer) { return receive.subspan(of(peer), slice); });
    std::ranges::copy(send.subspan(of(rank_), slice), receive.subspan(of(rank_), slice).begin());
  }

  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) override {
    exchange(send, receive, Memory::host);
  }

  const kernels::Device* device() const override { return device_.get(); }

  void exchange_on_device(std::span<const std::span<const std::byte>> send,
                          std::span<const std::span<std::byte>> receive) override {
    exchange(send, receive, Memory::device);
  }

  bool reduces() const override { return true; }

  /// Of any size over NCCL: `control` may have no reduction.
  void reduce_scatter_sum(std::span<const std::byte> send, std::span<std::byte> sum,
                          optim::Element element) override {
    const char* call = name_of(Call::reduce_scatter_sum);
    throw_if_failed(call);
    static_cast<void>(whole_elements(sum, element));
    announce({0, send.size(), sum.size() * static_cast<size_t>(world_), Call::reduce_scatter_sum}, {}, {});
    const auto slice = std::ssize(sum);
    const int64_t most = piece_bytes(world_ + 1);
    std::byte* const own = staging_.data() + world_ * most;
    for (int64_t at = 0; at < slice; at += most) {
      const int64_t bytes = std::min(most, slice - at);
      for (int rank = 0; rank < world_; ++rank)
        stream_->copy_from_host(staging_.data() + rank * bytes, send.data() + rank * slice + at, bytes);
      check(call,
            nccl_.reduce_scatter(staging_.data(), own, static_cast<size_t>(bytes / optim::bytes(element)),
                                 type_of(element), nccl::Reduction::sum, comm_, stream_->native()));
      await_launch(call);
      stream_->copy_to_host(sum.data() + at, own, bytes);
    }
    await_stream(call);
  }

  void all_reduce_sum(std::span<double> values) override {
    throw_if_failed("all_reduce_sum");
    over_control("all_reduce_sum", [&] { control_->all_reduce_sum(values); });
  }

  void barrier() override {
    const char* call = name_of(Call::barrier);
    throw_if_failed(call);
    over_control(call, [&] { control_->barrier(); });
  }

  void abort(const char* reason) noexcept override {
    // The others are told first: what this rank's own call throws then cannot reach them before the reason.
    control_->abort(reason);
    const MutexLock lock(mutex_);
    if (aborted_.empty()) aborted_ = fmt::format("rank {} aborted: {}", rank_, reason);
  }

  std::string failure() override {
    const MutexLock lock(mutex_);
    if (!failure_.empty()) return failure_;
    return aborted_.empty() ? control_->failure() : aborted_;
  }

 private:
  enum class Memory : uint8_t { host, device };
  static constexpr size_t kHeaderWords = sizeof(Announcement) / sizeof(uint64_t);

  /// Everything that one rank can find wrong by itself is found here.
  Hello say_hello() {
    Hello hello;
    hello.staging_bytes = options_.staging_bytes;
    hello.small_bytes = options_.small_bytes;
    try {
      nccl_ = nccl::load(options_.library);
      hello.version = nccl_.version;
      if (piece_bytes(2 * world_) < kPieceAlign) {
        throw CommunicatorError(fmt::format("{} bytes of staging are too few for {} ranks; {} are enough",
                                            options_.staging_bytes, world_, 2 * world_ * kPieceAlign));
      }
      staging_ = device_->allocate(options_.staging_bytes);
      stream_ = device_->make_stream();
      if (stream_->native() == nullptr)
        throw CommunicatorError(fmt::format("NCCL cannot work on a stream of a {} device", device_->name()));
      device_->make_current();
      if (rank_ != 0) return hello;
      if (const nccl::Result result = nccl_.get_unique_id(&hello.id); result != nccl::Result::success)
        throw CommunicatorError(fmt::format("a new id: {}", nccl_.get_error_string(result)));
    } catch (const std::exception& error) {
      const std::string_view text = error.what();
      text.substr(0, hello.failure.size() - 1).copy(hello.failure.data(), hello.failure.size());
      if (text.empty()) hello.failure[0] = '?';
    }
    return hello;
  }

  bool is_small(size_t bytes) const { return bytes <= static_cast<size_t>(options_.small_bytes); }
  int64_t piece_bytes(int pieces) const {
    return options_.staging_bytes / pieces / kPieceAlign * kPieceAlign;
  }

  template <class Function>
  void for_peers(const Function& function) const {
    for (int peer = 0; peer < world_; ++peer) {
      if (peer != rank_) function(peer);
    }
  }

  // ---- what the ranks say over `control`

  /// Returns when every rank has begun this call and all sizes fit; otherwise all ranks throw the same. Each
  /// tells every other the call, and by peer what it sends and has room for. Always an exchange, which no
  /// small call is: so `control` sees when a rank has taken the other way.
  void announce(Announcement own, std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive) {
    own.number = ++calls_;
    std::ranges::fill(said_by(rank_), uint64_t{0});
    std::memcpy(said_by(rank_).data(), &own, sizeof own);
    for (size_t peer = 0; peer < send.size(); ++peer) {
      said_by(rank_)[kHeaderWords + peer] = send[peer].size();
      said_by(rank_)[kHeaderWords + static_cast<size_t>(world_) + peer] = receive[peer].size();
    }
    says_.assign(static_cast<size_t>(world_), std::as_bytes(said_by(rank_)));
    hears_.clear();
    for (int peer = 0; peer < world_; ++peer) hears_.push_back(std::as_writable_bytes(said_by(peer)));
    const char* call = name_of(own.call);
    over_control(call, [&] { control_->exchange(says_, hears_); });
    std::string difference = find_difference(world_, [&](int rank) {
      Announcement said;
      std::memcpy(static_cast<void*>(&said), said_by(rank).data(), sizeof said);
      return CallShape{name_of(said.call), said.send_bytes, said.receive_bytes, true};
    });
    if (difference.empty()) {
      difference = find_odd_pair(
          world_, [&](int from, int to) { return said_by(from)[kHeaderWords + static_cast<size_t>(to)]; },
          [&](int from, int to) { return said_by(to)[kHeaderWords + static_cast<size_t>(world_ + from)]; });
    }
    if (!difference.empty()) fail(call, difference);
  }

  std::span<uint64_t> said_by(int rank) {
    return std::span(said_).subspan(static_cast<size_t>(rank) * said_words_, said_words_);
  }

  template <class Function>
  void over_control(const char* call, const Function& function) {
    try {
      function();
    } catch (const CommunicatorError& error) {
      fail(call, std::string(reason_of(error.what())));
    }
  }

  // ---- bytes

  void exchange(std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive, Memory memory) {
    const char* call = name_of(Call::exchange);
    throw_if_failed(call);
    announce({0, 0, 0, Call::exchange}, send, receive);
    move_pairs(
        call, [&](int peer) { return send[peer]; }, [&](int peer) { return receive[peer]; }, memory);
  }

  /// Both ends of a pair cut it into the same pieces, wherever it lies, and piece k of every pair is in the
  /// k-th group: a rank that has no piece left makes no group.
  template <class Send, class Receive>
  void move_pairs(const char* call, const Send& send, const Receive& receive, Memory memory = Memory::host) {
    const int64_t most = piece_bytes(2 * world_);
    int64_t longest = 0;
    for_peers([&](int peer) {
      longest = std::max({longest, std::ssize(send(peer)), std::ssize(receive(peer))});
    });
    const auto piece = [&](auto span, int64_t at) {
      return span.subspan(static_cast<size_t>(std::min(at, std::ssize(span))),
                          static_cast<size_t>(std::clamp<int64_t>(std::ssize(span) - at, 0, most)));
    };
    if (longest == 0) return;
    std::byte* const out = staging_.data();
    std::byte* const in = out + world_ * most;
    const bool staged = memory == Memory::host;
    for (int64_t at = 0; at < longest; at += most) {
      for_peers([&](int peer) {
        const auto part = piece(send(peer), at);
        if (staged) stream_->copy_from_host(out + peer * most, part.data(), std::ssize(part));
      });
      check(call, nccl_.group_start());
      for_peers([&](int peer) {
        const std::span<const std::byte> sent = piece(send(peer), at);
        const std::span<std::byte> received = piece(receive(peer), at);
        const std::byte* const from = staged ? out + peer * most : sent.data();
        std::byte* const to = staged ? in + peer * most : received.data();
        constexpr auto kType = nccl::DataType::int8;
        if (!sent.empty()) check(call, nccl_.send(from, sent.size(), kType, peer, comm_, stream_->native()));
        if (!received.empty())
          check(call, nccl_.recv(to, received.size(), kType, peer, comm_, stream_->native()));
      });
      check(call, nccl_.group_end());
      await_launch(call);
      for_peers([&](int peer) {
        if (!staged) return;
        const auto part = piece(receive(peer), at);
        stream_->copy_to_host(part.data(), in + peer * most, std::ssize(part));
      });
    }
    await_stream(call);
  }

  // ---- waiting, and what goes wrong meanwhile

  void check(const char* call, nccl::Result result) {
    if (result == nccl::Result::success || result == nccl::Result::in_progress) return;
    const char* more = nccl_.get_last_error(comm_);
    fail_alone(call, fmt::format("NCCL: {}{}{}", nccl_.get_error_string(result),
                                 more != nullptr && *more != '\0' ? ": " : "", more != nullptr ? more : ""));
  }

  /// Whether NCCL has put all that it was given on the stream: until then nothing may follow it there.
  bool launched(const char* call) {
    nccl::Result state = nccl::Result::success;
    check(call, nccl_.comm_get_async_error(comm_, &state));
    check(call, state);
    return state == nccl::Result::success;
  }

  void await_launch(const char* call) {
    await(call, "begin", [&] { return launched(call); });
  }

  void await_stream(const char* call) {
    const kernels::Event finished = stream_->record();
    await(call, "finish", [&] { return finished.done() || (launched(call), false); });
    try {
      finished.wait();
    } catch (const kernels::DeviceError& error) {
      fail_alone(call, error.what());
    }
  }

  template <class Condition>
  void await(const char* call, const char* what, const Condition& condition) {
    const auto give_up = Clock::now() + options_.timeout;
    for (int tries = 0; !condition(); ++tries) {
      if (const std::string why = failure(); !why.empty()) fail(call, why);
      if (Clock::now() >= give_up) {
        fail_alone(call, fmt::format("all ranks joined, and NCCL did not {} within {} ms", what,
                                     options_.timeout.count()));
      }
      // At first as fast as can be; then the processor belongs to the updates.
      if (tries > 200) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  /// What this rank alone has found. Where others found something first, it is told that.
  [[noreturn]] void fail_alone(const char* call, const std::string& why) {
    control_->abort(why.c_str());
    const std::string first = control_->failure();
    fail(call, first.empty() ? fmt::format("rank {}: {}", rank_, why) : first);
  }

  /// Ends the world, here and, over `control`, for the others.
  [[noreturn]] void fail(const char* call, const std::string& why) {
    {
      const MutexLock lock(mutex_);
      if (failure_.empty()) failure_ = why;
    }
    control_->abort(failure().c_str());
    if (comm_ != nullptr) {
      nccl_.comm_abort(std::exchange(comm_, nullptr));
      drain(call);
    }
    throw_if_failed(call);
    std::abort();  // not reached: there is a failure
  }

  /// Nothing of the caller's memory is in use any more.
  void drain(const char* call) {
    const kernels::Event over = stream_->record();
    const auto give_up = Clock::now() + options_.timeout;
    while (!over.done()) {
      if (Clock::now() >= give_up) {
        io::say_on_stderr(fmt::format("overspill: rank {}: {}: {}; the GPU's work did not end in {} ms more",
                                      rank_, call, failure(), options_.timeout.count()));
        std::abort();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  void throw_if_failed(const char* call) {
    const MutexLock lock(mutex_);
    if (failure_.empty()) return;
    throw CommunicatorError(fmt::format("{}: {}", call, failure_));
  }

  const NcclOptions options_;
  const std::unique_ptr<Communicator> control_;
  const int rank_;
  const int world_;
  const std::shared_ptr<kernels::Device> device_;
  nccl::Api nccl_;
  kernels::DeviceMemory staging_;
  std::unique_ptr<kernels::Stream> stream_;
  nccl::Comm comm_ = nullptr;
  uint64_t calls_ = 0;
  // announce(): by rank, a header, what it sends to each rank, what it has room for from each.
  const size_t said_words_;
  std::vector<uint64_t> said_;
  std::vector<std::span<const std::byte>> says_;
  std::vector<std::span<std::byte>> hears_;
  Mutex mutex_;
  std::string failure_ GUARDED_BY(mutex_);  // why it ended here
  std::string aborted_ GUARDED_BY(mutex_);  // by abort(), on any thread
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(std::unique_ptr<Communicator> control,
                                                     std::shared_ptr<kernels::Device> device,
                                                     const NcclOptions& options) {
  auto ranks = std::make_unique<NcclCommunicator>(std::move(control), std::move(device), options);
  ranks->join();
  return ranks;
}

}  // namespace overspill::engine
