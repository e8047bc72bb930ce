#include "engine/checkpoint/save_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <vector>

#include "engine/checkpoint/index_file.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/rank_reports.h"
#include "engine/checkpoint/resident_file.h"
#include "io/job_folder.h"
#include "io/owned_folder.h"
#include "io/part_folder.h"
#include "io/slab_share.h"
#include "io/unique_fd.h"

namespace overspill::engine {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kRank = "rank";

/// Behind "rank" and a number; the whole name where it does not begin so.
std::string_view behind_rank(std::string_view name) {
  if (!name.starts_with(kRank)) return name;
  const size_t end = name.find_first_not_of("0123456789", kRank.size());
  if (end == kRank.size()) return name;
  return end == std::string_view::npos ? std::string_view() : name.substr(end);
}

bool is_rank_folder(std::string_view name) {
  return name.starts_with(kRank) && behind_rank(name).empty();
}

bool is_between(std::string_view name, std::string_view begin, std::string_view end) {
  return name.size() > begin.size() + end.size() && name.starts_with(begin) && name.ends_with(end);
}

std::vector<std::string> entries_of(int folder) {
  std::vector<std::string> names = io::names_in(folder, "");
  std::erase_if(names, [](const std::string& name) { return name == "." || name == ".."; });
  std::ranges::sort(names);
  return names;
}

bool is_regular(int folder, const std::string& name) {
  struct stat found = {};
  return ::fstatat(folder, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(found.st_mode);
}

[[noreturn]] void refuse(const fs::path& folder, const fs::path& entry, const std::string& what) {
  throw CheckpointError(fmt::format(
      "a save writes into {} before it is complete, but {} is {} that no save has put there. Nothing "
      "was removed: move it away, or save under another name",
      folder.string(), entry.string(), what));
}

/// The folder, in its own; empty where there is none.
io::UniqueFd open_save(const fs::path& folder) {
  const fs::path parent = folder.parent_path();
  const io::UniqueFd base(::open(parent.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!base && errno == ENOENT) return {};
  io::UniqueFd opened;
  if (base) opened = io::open_folder(base.get(), folder.filename().string());
  if (opened || (base && errno == ENOENT)) return opened;
  if (base && (errno == ENOTDIR || errno == ELOOP))
    refuse(folder, folder, io::kind_of_entry(base.get(), folder.filename().string()));
  throw CheckpointError(fmt::format("{}: cannot be opened: {}; check the folder's permissions",
                                    folder.string(), std::generic_category().message(errno)));
}

void require_files(const fs::path& save, int folder, const fs::path& path) {
  for (const std::string& name : entries_of(folder)) {
    if (is_file_of_a_save(name) && is_regular(folder, name)) continue;
    refuse(save, path / name, io::kind_of_entry(folder, name));
  }
}

void remove_files(int folder) {
  for (const std::string& name : entries_of(folder)) {
    if (is_file_of_a_save(name)) ::unlinkat(folder, name.c_str(), 0);
  }
}

}  // namespace

bool is_file_of_a_save(std::string_view name) {
  const std::string_view behind = behind_rank(name);
  if (behind.size() < name.size()) return behind.starts_with("-") && is_file_of_a_save(behind.substr(1));
  return name == kManifestFile || name == kUnfinishedManifestFile || name == kIndexFile ||
         name == kUnfinishedIndexFile || name == kReportFile || name == kResidentFile ||
         name == kOwnStatesFile || is_between(name, io::kSlabPrefix, ".bin") ||
         is_between(name, io::kPartPrefix, io::kPartSuffix) ||
         is_between(name, "extents-", ".bin") ||  // io/slab_export.cc
         is_between(name, io::kMarkPrefix, ".txt");
}

std::string_view rank_prefix(std::string_view name) {
  const std::string_view behind = behind_rank(name);
  if (behind.size() == name.size() || !behind.starts_with('-')) return {};
  return name.substr(0, name.size() - behind.size() + 1);
}

void require_only_a_save(const fs::path& folder) {
  const io::UniqueFd opened = open_save(folder);
  if (!opened) return;
  for (const std::string& name : entries_of(opened.get())) {
    if (is_file_of_a_save(name) && is_regular(opened.get(), name)) continue;
    const io::UniqueFd rank = is_rank_folder(name) ? io::open_folder(opened.get(), name) : io::UniqueFd();
    if (!rank) refuse(folder, folder / name, io::kind_of_entry(opened.get(), name));
    require_files(folder, rank.get(), folder / name);
  }
}

io::UniqueFd hold_save(const fs::path& folder) {
  io::UniqueFd opened = open_save(folder);
  if (!opened) return opened;
  const io::UniqueFd base = io::open_base(folder.parent_path());
  if (const std::string why = io::foreign(base.get(), opened.get()); !why.empty()) {
    throw CheckpointError(fmt::format(
        "{} is the name under which a save works, and {}: save under another name", folder.string(), why));
  }
  while (::flock(opened.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return opened;
    throw SaveUnderWay(
        fmt::format("{} is being written by another save, of this process or of another one: wait "
                    "for it, or save under another name",
                    folder.string()));
  }
  return opened;
}

void remove_save(const fs::path& folder) {
  const io::UniqueFd opened = open_save(folder);
  if (!opened) return;
  ::unlinkat(opened.get(), kManifestFile, 0);
  io::remove_parts(folder, &is_file_of_a_save);  // while the folder says where they are
  for (const std::string& name : entries_of(opened.get())) {
    if (is_rank_folder(name)) io::remove_parts(folder / name, &is_file_of_a_save);
  }
  remove_files(opened.get());
  for (const std::string& name : entries_of(opened.get())) {
    if (!is_rank_folder(name)) continue;
    if (const io::UniqueFd rank = io::open_folder(opened.get(), name)) remove_files(rank.get());
    ::unlinkat(opened.get(), name.c_str(), AT_REMOVEDIR);
  }
  if (::rmdir(folder.c_str()) == 0 || errno == ENOENT) return;
  throw CheckpointError(
      fmt::format("{}: what a save left there cannot be removed: {}; remove the folder, or "
                  "choose another one",
                  folder.string(), std::generic_category().message(errno)));
}

}  // namespace overspill::engine
