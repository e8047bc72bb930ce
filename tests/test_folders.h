// Folders and files of tests.
#pragma once

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
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

/// One bit of the byte at `at`.
inline void flip_a_bit(const std::filesystem::path& path, int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 4));
  if (!file.good()) throw std::runtime_error("a bit of " + path.string() + " cannot be flipped");
}

}  // namespace overspill::testing
