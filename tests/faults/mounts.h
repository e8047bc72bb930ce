// Mounts that only this process and its children see, and that go with them.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "tests/faults/scene.h"

namespace overspill::testing {

/// Runs a program of $PATH without output; its exit status, 127 where it is missing.
inline int run_program(const std::vector<std::string>& words) {
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int nowhere = ::open("/dev/null", O_RDWR);
    for (const int fd : {0, 1, 2}) ::dup2(nowhere, fd);
    const char* path = ::getenv("PATH");
    ::setenv("PATH", (std::string(path == nullptr ? "" : path) + ":/usr/sbin:/sbin").c_str(), 1);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }
  int status = 0;
  return ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 126;
}

/// From here on mounts are this process's own. "" or why not.
inline std::string own_mounts() {
  static const std::string why = []() -> std::string {
    if (::geteuid() != 0) return "only root can mount";
    if (::unshare(CLONE_NEWNS) != 0 || ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0)
      return fmt::format("this machine gives no mount namespace: {}", std::strerror(errno));
    return "";
  }();
  return why;
}

/// Somewhere something is mounted; unmounted at the end, whoever still uses it.
class Mountpoint {
 public:
  Mountpoint() { fs::create_directory(path()); }
  ~Mountpoint() { ::umount2(path().c_str(), MNT_DETACH); }
  Mountpoint(const Mountpoint&) = delete;
  Mountpoint& operator=(const Mountpoint&) = delete;
  fs::path path() const { return scratch_.path() / "mounted here"; }
  fs::path beside(const std::string& name) const { return scratch_.path() / name; }

 private:
  ScratchFolder scratch_;
};

}  // namespace overspill::testing
