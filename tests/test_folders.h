// Folders of tests.
#pragma once

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string_view>

namespace overspill::testing {

/// An empty one in `parent` that no other process has.
inline std::filesystem::path empty_folder(const std::filesystem::path& parent, std::string_view name) {
  std::filesystem::path folder = parent / fmt::format("test-of-overspill-{}-{}", name, ::getpid());
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

inline bool same_file_system(const std::filesystem::path& a, const std::filesystem::path& b) {
  struct stat one {};
  struct stat other {};
  return ::stat(a.c_str(), &one) == 0 && ::stat(b.c_str(), &other) == 0 && one.st_dev == other.st_dev;
}

}  // namespace overspill::testing
