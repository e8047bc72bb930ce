#pragma once

#include <sys/stat.h>

#include <filesystem>

namespace overspill::testing {

inline bool same_file_system(const std::filesystem::path& a, const std::filesystem::path& b) {
  struct stat one {};
  struct stat other {};
  return ::stat(a.c_str(), &one) == 0 && ::stat(b.c_str(), &other) == 0 && one.st_dev == other.st_dev;
}

}  // namespace overspill::testing
