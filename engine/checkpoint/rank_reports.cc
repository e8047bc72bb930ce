#include "engine/checkpoint/rank_reports.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <system_error>
#include <thread>

#include "engine/checkpoint/manifest.h"

namespace overspill::engine {
namespace {

constexpr size_t kReportBytesMax = 64 * 1024;
constexpr size_t kRoom = 4096;
// A network file system may show a new name late.
constexpr std::chrono::seconds kNameIsLate{90};
constexpr std::chrono::milliseconds kFirstPause{2}, kLongestPause{200};

[[noreturn]] void fail(const std::filesystem::path& path, const char* what, int os_error) {
  throw CheckpointError(fmt::format("{}: {}: {}; free space or choose another folder", path.string(), what,
                                    std::generic_category().message(os_error)));
}

enum class Lock : uint8_t { free, held, unknown };

Lock lock_of(int file) {
  while (::flock(file, LOCK_SH | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    return errno == EWOULDBLOCK ? Lock::held : Lock::unknown;
  }
  ::flock(file, LOCK_UN);
  return Lock::free;
}

/// Pauses between looks at the folder.
class Patiently {
 public:
  explicit Patiently(const std::function<void()>& go_on) : go_on_(go_on) {}
  void pause() {
    go_on_();
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, kLongestPause);
  }

 private:
  const std::function<void()>& go_on_;
  std::chrono::milliseconds pause_ = kFirstPause;
};

}  // namespace

RankReports::RankReports(const std::filesystem::path& partial, int rank, int ranks)
    : partial_(partial), rank_(rank), ranks_(ranks) {
  const std::filesystem::path path = file_of(rank);
  own_ = io::UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!own_) fail(path, "cannot be created", errno);
  ::flock(own_.get(), LOCK_EX | LOCK_NB);  // where there are no locks, only deaths stay unknown
  // Its room is taken now: on a disk that has become full this rank could say nothing.
  const std::string room(kRoom, ' ');
  if (::pwrite(own_.get(), room.data(), room.size(), 0) != std::ssize(room)) {
    const int os_error = errno;
    ::unlink(path.c_str());
    fail(path, "cannot be written", os_error);
  }
}

RankReports::~RankReports() {
  if (own_) ::flock(own_.get(), LOCK_UN);  // a forked child may have the descriptor, too
}

std::filesystem::path RankReports::file_of(int rank) const {
  return partial_ / fmt::format("rank{}-{}", rank, kReportFile);
}

bool RankReports::say(const char* kind, const std::string& words) noexcept {
  try {
    std::string text = fmt::format("{} {}", kind, words).substr(0, kReportBytesMax - 1);
    std::ranges::replace(text, '\n', ' ');
    text += '\n';  // whoever reads it sees that it is whole
    return ::pwrite(own_.get(), text.data(), text.size(), 0) == std::ssize(text) &&
           ::ftruncate(own_.get(), std::ssize(text)) == 0;
  } catch (const std::exception&) {
    return false;
  }
}

void RankReports::say_written(const std::string& words) {
  if (!say("written", words)) fail(file_of(rank_), "cannot be written", errno);
}

void RankReports::say_failed(const std::string& why) noexcept {
  if (!say("failed", why)) ::flock(own_.get(), LOCK_UN);
}

RankReports::Heard RankReports::hear(int rank) const {
  const io::UniqueFd file(::open(file_of(rank).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (!file) return {errno == ENOENT ? Report::dead : Report::none, "its file in the folder is gone"};
  const Lock lock = lock_of(file.get());  // before the look: it may speak and leave in between
  std::string text(kReportBytesMax, '\0');
  const ssize_t got = ::pread(file.get(), text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  if (text.empty() || text.back() != '\n')
    return {lock == Lock::free ? Report::dead : Report::none, "it ended before it had written its part"};
  text.pop_back();
  const size_t space = std::min(text.find(' '), text.size());
  const bool written = text.substr(0, space) == "written";
  return {written ? Report::written : Report::failed, text.substr(std::min(space + 1, text.size()))};
}

bool RankReports::is_there(int rank) const {
  const io::UniqueFd file(::open(file_of(rank).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  return file && lock_of(file.get()) == Lock::held;
}

std::vector<std::string> RankReports::gather(const std::function<void()>& go_on) const {
  std::vector<std::string> all(1);
  for (int rank = 1; rank < ranks_; ++rank) {
    Patiently patiently(go_on);
    Heard heard;
    while ((heard = hear(rank)).report == Report::none) patiently.pause();
    if (heard.report != Report::written) throw CheckpointError(fmt::format("rank {}: {}", rank, heard.words));
    all.push_back(std::move(heard.words));
  }
  return all;
}

void RankReports::wait_for_others(const std::function<void()>& go_on) const {
  for (int rank = 1; rank < ranks_; ++rank) {
    Patiently patiently(go_on);
    while (is_there(rank)) patiently.pause();
  }
}

void RankReports::remove_others() const {
  for (int rank = 1; rank < ranks_; ++rank) ::unlink(file_of(rank).c_str());
}

void RankReports::remove_own(const std::filesystem::path& folder) const {
  ::unlink((folder / file_of(rank_).filename()).c_str());
}

void RankReports::wait_for_name(const std::filesystem::path& folder,
                                const std::function<void()>& go_on) const {
  std::error_code ignored;
  const auto is_named = [&] { return std::filesystem::exists(folder / kManifestFile, ignored); };
  std::optional<std::chrono::steady_clock::time_point> gone;
  for (Patiently patiently(go_on); !is_named(); patiently.pause()) {
    const Heard first = hear(0);
    if (first.report == Report::failed) {
      // Of whom rank 0 has heard it, or of rank 0.
      throw GivenUp(first.words.starts_with("rank ") ? first.words : fmt::format("rank 0: {}", first.words));
    }
    if (first.report != Report::dead) continue;
    const auto now = std::chrono::steady_clock::now();
    if (!gone) gone = now;
    const bool may_be_named = !std::filesystem::exists(partial_, ignored);
    if (!may_be_named || now - *gone > kNameIsLate)
      throw CheckpointError(fmt::format("rank 0: {}", first.words));
  }
}

}  // namespace overspill::engine
