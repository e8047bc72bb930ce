#include "io/lock_holder.h"

#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>

namespace overspill::io {
namespace {

// Not in linux/magic.h everywhere.
constexpr long kZfs = 0x2fc12fc1, kBcachefs = 0xca451a4e, kJfs = 0x3153464a, kExfat = 0x2011bab0,
               kNtfs3 = 0x7366746e, kXfs = 0x58465342;

std::string line_of(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string own_pid_namespace() {
  std::array<char, 64> target{};
  const ssize_t bytes = ::readlink("/proc/self/ns/pid", target.data(), target.size());
  return bytes > 0 ? std::string(target.data(), static_cast<size_t>(bytes)) : "";
}

}  // namespace

LockHolder LockHolder::self() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return {.process = std::to_string(::getpid()),
          .host = host.data(),
          .boot = line_of("/proc/sys/kernel/random/boot_id"),
          .pid_namespace = own_pid_namespace()};
}

LockHolder LockHolder::parse(std::string_view text) {
  LockHolder holder;
  if (text == kRemoving) return holder;
  for (std::string* field : {&holder.process, &holder.host, &holder.boot, &holder.pid_namespace}) {
    const size_t end = std::min(text.find('\n'), text.size());
    *field = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return holder;
}

std::string LockHolder::text() const {
  return fmt::format("{}\n{}\n{}\n{}\n", process, host, boot, pid_namespace);
}

bool LockHolder::on_this_machine() const {
  return !boot.empty() && boot == self().boot;
}

std::string LockHolder::description() const {
  std::string name = fmt::format("process {}", process.empty() ? "(unknown)" : process);
  if (boot.empty()) return name;
  if (!on_this_machine()) return fmt::format("{} on {}", name, host.empty() ? "another machine" : host);
  if (pid_namespace == self().pid_namespace) return name;
  return fmt::format("{} of another container on this machine, which counts processes by itself", name);
}

bool is_of_one_machine(int fd) {
  constexpr std::array kLocal = {long{EXT4_SUPER_MAGIC},
                                 kXfs,
                                 long{BTRFS_SUPER_MAGIC},
                                 long{TMPFS_MAGIC},
                                 long{RAMFS_MAGIC},
                                 kZfs,
                                 long{F2FS_SUPER_MAGIC},
                                 kBcachefs,
                                 long{OVERLAYFS_SUPER_MAGIC},
                                 kJfs,
                                 long{MSDOS_SUPER_MAGIC},
                                 kExfat,
                                 kNtfs3};
  struct statfs info {};
  return ::fstatfs(fd, &info) == 0 && std::ranges::find(kLocal, long{info.f_type}) != kLocal.end();
}

}  // namespace overspill::io
