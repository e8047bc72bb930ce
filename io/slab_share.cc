#include "io/slab_share.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <random>
#include <utility>

#include "io/files.h"
#include "io/stall_watch.h"

namespace overspill::io {
namespace {

// Begins as a slab's name does, so whoever removes a dead run's slabs removes it too.
constexpr const char* kOwnName = "slab-mark";

/// Names of the file that do not lie in the job's folder; nothing where that cannot be told.
std::optional<int64_t> links_outside(int fd, const std::filesystem::path& own) {
  const auto look = look_at(fd);
  if (!look) return std::nullopt;
  return look->names - (same_file(fd, own) ? 1 : 0);
}

void explain(int fd, const std::string& job, uint64_t number) {
  std::random_device random;
  const std::string text = fmt::format(
      "Slab files in this folder are hard links to files of the run \"{}\".\n"
      "While that run lives it leaves their bytes alone until this file and the slabs are deleted.\n"
      "After the run has ended this file means nothing.\n"
      "No other file has this text, so that no tool takes two of them for copies of one: {}-{:08x}{:08x}\n",
      job, number, random(), random());
  // The text is for people; without it the mark does its work.
  [[maybe_unused]] const ssize_t written = ::pwrite(fd, text.data(), text.size(), 0);
}

}  // namespace

std::optional<uint64_t> SlabShares::begin(const SlabFile& slab, const std::filesystem::path& folder,
                                          const std::string& job) {
  const MutexLock lock(mutex_);
  Share share;
  const uint64_t number = ++last_;  // never again, as a file that cannot be removed keeps its name
  share.own = slab.path.parent_path() / fmt::format("{}-{}", kOwnName, number);
  share.mark = UniqueFd(::open(share.own.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!share.mark) throw system_error(Operation::open, share.own);
  explain(share.mark.get(), job, number);
  for (int attempt = 0;; ++attempt) {
    share.outside =
        folder / fmt::format("{}{}{}.txt", kMarkPrefix, job, attempt == 0 ? "" : fmt::format("-{}", attempt));
    if (::link(share.own.c_str(), share.outside.c_str()) == 0) break;
    if (errno == EEXIST) continue;
    const bool must_copy = refuses_links(errno);
    const StoreError error =
        system_error(Operation::link, share.outside, fmt::format("hard link to {}", share.own.string()));
    ::unlink(share.own.c_str());
    if (must_copy) return std::nullopt;
    throw error;
  }
  if (links_outside(share.mark.get(), share.own) != 1) {  // a file system that does not count
    ::unlink(share.outside.c_str());
    ::unlink(share.own.c_str());
    return std::nullopt;
  }
  shares_.emplace(number, std::move(share));
  return number;
}

uint64_t SlabShares::take_up(const std::filesystem::path& outside, const std::filesystem::path& own_folder) {
  const MutexLock lock(mutex_);
  const uint64_t number = ++last_;
  Share share{.own = own_folder / fmt::format("{}-{}", kOwnName, number),
              .outside = outside,
              .mark = {},
              .slabs = {}};
  if (::link(outside.c_str(), share.own.c_str()) != 0)
    throw system_error(Operation::link, outside, fmt::format("hard link to {}", share.own.string()));
  share.mark = UniqueFd(::open(share.own.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  const auto look = share.mark ? look_at(share.mark.get()) : std::nullopt;
  if (!look || !look->own_regular || !same_file(share.mark.get(), outside)) {
    ::unlink(share.own.c_str());
    throw StoreError({.kind = ErrorKind::denied,
                      .operation = Operation::open,
                      .path = outside.string(),
                      .detail = "it is no file of this user's, or was replaced"});
  }
  shares_.emplace(number, std::move(share));
  return number;
}

void SlabShares::add(uint64_t share, const SlabFile& slab, const std::filesystem::path& outside) {
  const MutexLock lock(mutex_);
  shares_.at(share).slabs.emplace(&slab, outside);
}

void SlabShares::named(uint64_t number, const std::filesystem::path& folder, const std::string& prefix) {
  const MutexLock lock(mutex_);
  const auto move = [&](std::filesystem::path& name) { name = folder / (prefix + name.filename().string()); };
  Share& share = shares_.at(number);
  move(share.outside);
  for (auto& [slab, name] : share.slabs) move(name);
}

std::filesystem::path SlabShares::path(uint64_t share) const {
  const MutexLock lock(mutex_);
  return shares_.at(share).outside;
}

/// Names of the slab outside the job's folder that this export accounts for: as many as its mark has, but not
/// the one that it made itself where the mark is still there and the slab is not.
int64_t SlabShares::Share::names_of(const SlabFile& slab) const {
  const auto linked = slabs.find(&slab);
  if (linked == slabs.end()) return 0;
  const int64_t marks = links_outside(mark.get(), own).value_or(0);
  const bool lost = same_file(mark.get(), outside) && !same_file(slab.fd.get(), linked->second);
  return marks - (lost ? 1 : 0);
}

// A folder is gone when its mark is, when no slab has the name that the export gave it, and when no more
// names lead to its slabs than the other exports account for: a tool that moves a folder file by file may
// take the mark first. The slab's names are counted before those of the others, so that one which goes in
// between makes the answer "alive".
bool SlabShares::alive(uint64_t number) const {
  const MutexLock lock(mutex_);
  const Share& share = shares_.at(number);
  if (links_outside(share.mark.get(), share.own) != 0) return true;
  for (const auto& [slab, name] : share.slabs) {
    if (same_file(slab->fd.get(), name)) return true;
    const auto found = links_outside(slab->fd.get(), slab->path);
    if (!found) return true;
    int64_t others = 0;
    for (const auto& [other_number, other] : shares_) {
      if (other_number != number) others += other.names_of(*slab);
    }
    if (*found > others) return true;
  }
  // After a power cut a folder whose removal is not on the disk yet would be there again, with bytes that
  // were given to others.
  try {
    return sync_file_system(watch_, share.mark.get(), share.own.string()) != 0;
  } catch (const StoreError&) {  // the disk does not answer: nothing is known of the removal
    return true;
  }
}

void SlabShares::end(uint64_t number) noexcept {
  const MutexLock lock(mutex_);
  const auto found = shares_.find(number);
  if (found == shares_.end()) return;
  ::unlink(found->second.own.c_str());
  shares_.erase(found);
}

}  // namespace overspill::io
