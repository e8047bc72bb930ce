#include "io/owned_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <random>

#include "io/files.h"

namespace overspill::io {
namespace {

constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

/// How a folder that this process makes here comes out: some file systems map users, or give every file one
/// owner and mode.
std::optional<struct stat> made_here(int base) {
  const std::string name = fmt::format(".overspill-{}-{:08x}", ::getpid(), std::random_device()());
  if (::mkdirat(base, name.c_str(), 0700) != 0) return std::nullopt;
  struct stat made {};
  const bool seen = ::fstatat(base, name.c_str(), &made, AT_SYMLINK_NOFOLLOW) == 0;
  ::unlinkat(base, name.c_str(), AT_REMOVEDIR);
  return seen ? std::optional(made) : std::nullopt;
}

}  // namespace

UniqueFd open_base(const std::filesystem::path& path) {
  UniqueFd base(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (base) return base;
  if (errno == ENOTDIR && std::filesystem::is_regular_file(path)) {
    throw StoreError({.kind = ErrorKind::invalid,
                      .operation = Operation::open,
                      .path = path.string(),
                      .detail = "it is a file, where the store's path must be an existing folder"});
  }
  throw system_error(Operation::open, path, "the store's path must be an existing folder");
}

UniqueFd open_folder(int base, const std::string& name) {
  return UniqueFd(::openat(base, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
}

std::string foreign(int base, int folder) {
  struct stat found {};
  if (::fstat(folder, &found) != 0) return "it cannot be examined";
  if (found.st_uid == ::geteuid()) return "";
  const auto own = made_here(base);
  const uid_t user = own ? own->st_uid : ::geteuid();
  if (found.st_uid == user) return "";
  return fmt::format("it belongs to user {}, and this is a run of user {}", found.st_uid, user);
}

std::string distrust(int base, int folder) {
  if (std::string why = foreign(base, folder); !why.empty()) return why;
  struct stat found {};
  if (::fstat(folder, &found) != 0) return "it cannot be examined";
  const auto others = static_cast<mode_t>(found.st_mode & kOthersWrite);
  if (others == 0) return "";
  const auto own = made_here(base);
  if (own && (others & ~own->st_mode) == 0) return "";
  return fmt::format("others may write to it (mode {:04o}): chmod go-w", found.st_mode & 07777);
}

std::string kind_of_entry(int base, const std::string& name) {
  struct stat found {};
  if (::fstatat(base, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) != 0) return "gone";
  if (S_ISLNK(found.st_mode)) return "a symbolic link";
  return S_ISDIR(found.st_mode) ? "a folder" : "a file";
}

std::vector<std::string> names_in(int folder, std::string_view prefix) {
  std::vector<std::string> names;
  UniqueFd fd(::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return names;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::fdopendir(fd.get()), &::closedir);
  if (entries == nullptr) return names;
  fd.release();  // closedir closes it
  while (const dirent* entry = ::readdir(entries.get())) {
    if (std::string_view(entry->d_name).starts_with(prefix)) names.emplace_back(entry->d_name);
  }
  return names;
}

bool same_regular_file(int fd, int folder, const char* name) {
  struct stat by_fd {};
  struct stat by_name {};
  return ::fstat(fd, &by_fd) == 0 && S_ISREG(by_fd.st_mode) &&
         ::fstatat(folder, name, &by_name, AT_SYMLINK_NOFOLLOW) == 0 && by_fd.st_ino == by_name.st_ino &&
         by_fd.st_dev == by_name.st_dev;
}

}  // namespace overspill::io
