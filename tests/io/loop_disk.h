// A disk of a chosen speed, for tests and measurements: ext4 on a loop device, throttled by the kernel
// (cgroup v1 blkio, which counts O_DIRECT where it is submitted). Takes root.
#pragma once

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include "io/unique_fd.h"

namespace overspill::io {

/// Why the machine refuses. Callers skip, and print it.
class NoLoopDisk : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class LoopDisk {
 public:
  /// Makes `<folder>/<name>.img` of `bytes`, mounted at `<folder>/<name>`. Throws NoLoopDisk.
  LoopDisk(const std::filesystem::path& folder, const std::string& name, int64_t bytes)
      : image_(folder / (name + ".img")), mount_(folder / name) {
    if (::geteuid() != 0) throw NoLoopDisk("loop devices take root");
    try {
      make(bytes);
    } catch (...) {
      take_apart();
      throw;
    }
  }
  ~LoopDisk() { take_apart(); }
  LoopDisk(const LoopDisk&) = delete;
  LoopDisk& operator=(const LoopDisk&) = delete;

  /// For this process's cgroup; 0 lifts the limit. Throws NoLoopDisk.
  void throttle(int64_t read_bytes_per_s, int64_t write_bytes_per_s) {
    limit("read", read_bytes_per_s);
    limit("write", write_bytes_per_s);
    throttled_ = read_bytes_per_s > 0 || write_bytes_per_s > 0;
  }

  const std::filesystem::path& path() const { return mount_; }
  const std::string& device() const { return device_; }  // "/dev/loop3"

 private:
  void make(int64_t bytes) {
    {
      const UniqueFd fd(::open(image_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
      if (!fd || ::posix_fallocate(fd.get(), 0, bytes) != 0)
        throw NoLoopDisk(fmt::format("no room for {} bytes at {}", bytes, image_.string()));
    }
    run("mkfs.ext4 -q -F -m 0 -E lazy_itable_init=0,lazy_journal_init=0 " + image_.string());
    device_ = run("losetup --find --show --direct-io=on " + image_.string());
    if (device_.empty()) throw NoLoopDisk("losetup refuses");
    std::filesystem::create_directory(mount_);
    if (::mount(device_.c_str(), mount_.c_str(), "ext4", 0, nullptr) != 0)
      throw NoLoopDisk("mounts are refused here");
    mounted_ = true;
  }

  void take_apart() noexcept {
    try {
      if (throttled_) throttle(0, 0);
      if (mounted_ && ::umount(mount_.c_str()) != 0) ::umount2(mount_.c_str(), MNT_DETACH);
      if (!device_.empty()) run("losetup --detach " + device_);
    } catch (const std::exception& error) {
      fmt::print(stderr, "loop disk: {}\n", error.what());
    }
    ::unlink(image_.c_str());
    ::rmdir(mount_.c_str());
  }

  /// What the command prints, without the line's end. Throws NoLoopDisk where it fails.
  static std::string run(const std::string& command) {
    std::FILE* pipe = ::popen(("PATH=$PATH:/sbin:/usr/sbin " + command + " 2>/dev/null").c_str(), "r");
    if (pipe == nullptr) throw NoLoopDisk("no shell");
    std::string text;
    for (int c = 0; (c = std::fgetc(pipe)) != EOF;) text += static_cast<char>(c);
    if (::pclose(pipe) != 0) throw NoLoopDisk("refused: " + command);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }

  void limit(const char* direction, int64_t bytes_per_s) const {
    struct stat info {};
    if (::stat(device_.c_str(), &info) != 0) throw NoLoopDisk(device_ + " is gone");
    std::string line, group;
    for (std::ifstream file("/proc/self/cgroup"); std::getline(file, line);) {
      if (const auto at = line.find(":blkio:"); at != std::string::npos) group = line.substr(at + 7);
    }
    std::ofstream file(fmt::format("/sys/fs/cgroup/blkio{}/blkio.throttle.{}_bps_device", group, direction));
    file << fmt::format("{}:{} {}", major(info.st_rdev), minor(info.st_rdev), bytes_per_s) << std::flush;
    if (!file) throw NoLoopDisk("cgroup v1 blkio cannot be used here");
  }

  std::filesystem::path image_;
  std::filesystem::path mount_;
  std::string device_;
  bool mounted_ = false;
  bool throttled_ = false;
};

}  // namespace overspill::io
