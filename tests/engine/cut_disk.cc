#include "tests/engine/cut_disk.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

namespace overspill::testing {

namespace fs = std::filesystem;
using Kind = FileCall::Kind;

Disk::Disk(const fs::path& root) : root_(root.string()) {
  nodes_[root_] = 0;
}

bool Disk::inside(const std::string& path) const {
  return path == root_ || path.starts_with(root_ + "/");
}

std::string Disk::mount_of(const std::string& path) const {
  for (const std::string& mount : mounts_) {
    if (path == mount || path.starts_with(mount + "/")) return mount;
  }
  return root_;
}

int Disk::failure_of(const FileCall& call) {
  const bool links = call.kind == Kind::link;
  if (links && refuses_links_) return EPERM;
  if (!links && call.kind != Kind::rename) return 0;
  return mount_of(call.path) == mount_of(call.other) ? 0 : EXDEV;
}

Disk::Node Disk::find(const std::string& path) const {
  const auto found = nodes_.find(path);
  return found == nodes_.end() ? -1 : found->second;
}

std::pair<Disk::Node, std::string> Disk::place(const std::string& path) const {
  const size_t slash = path.rfind('/');
  return {find(path.substr(0, slash)), path.substr(slash + 1)};
}

void Disk::done(const FileCall& call, std::span<const std::byte> data) {
  const std::lock_guard lock(mutex_);
  switch (call.kind) {
    case Kind::open:
      return open(call);
    case Kind::close:
      open_.erase(call.fd);
      return;
    case Kind::make_folder:
      if (inside(call.path)) add_name(call, call.path, next_node_++);
      return;
    case Kind::link:
      if (inside(call.other)) add_name(call, call.other, find(call.path));
      return;
    case Kind::rename:
      return rename(call);
    case Kind::remove: {
      if (!inside(call.path)) return;
      const auto [folder, name] = place(call.path);
      log_.push_back(
          {call.kind, find(call.path), folder, name, "", 0, {}, 0, call.path, mount_of(call.path)});
      nodes_.erase(call.path);
      return;
    }
    case Kind::sync_all: {
      const auto found = open_.find(call.fd);
      if (found == open_.end()) return;
      const std::string mount = mount_of(found->second.path);
      log_.push_back({call.kind, -1, -1, "", "", 0, {}, 0, mount, mount});
      return;
    }
    case Kind::write:
    case Kind::allocate:
    case Kind::sync: {
      const auto found = open_.find(call.fd);
      if (found == open_.end()) return;
      Open& file = found->second;
      const int64_t offset = call.offset >= 0 ? call.offset : file.position;
      if (call.offset < 0) file.position += static_cast<int64_t>(data.size());
      log_.push_back({call.kind,
                      file.node,
                      -1,
                      "",
                      "",
                      offset,
                      {data.begin(), data.end()},
                      call.kind == Kind::allocate ? call.offset + call.bytes : 0,
                      file.path,
                      mount_of(file.path)});
      return;
    }
  }
}

void Disk::open(const FileCall& call) {
  open_.erase(call.fd);
  if (!inside(call.path)) return;
  if (find(call.path) < 0) {
    if ((call.flags & O_CREAT) == 0) return;
    add_name(call, call.path, next_node_++);
  }
  open_[call.fd] = {find(call.path), 0, call.path};
}

void Disk::add_name(const FileCall& call, const std::string& path, Node node) {
  nodes_[path] = node;
  const auto [folder, name] = place(path);
  log_.push_back({call.kind, node, folder, name, "", 0, {}, 0, path, mount_of(path)});
}

void Disk::rename(const FileCall& call) {
  if (!inside(call.path)) return;
  const auto [folder, old_name] = place(call.path);
  const auto [new_folder, name] = place(call.other);
  const std::string mount = mount_of(call.path);
  // Into another folder: two changes, of which each may survive without the other.
  if (folder != new_folder) {
    const Node node = find(call.path);
    log_.push_back({Kind::link, node, new_folder, name, "", 0, {}, 0, call.other, mount});
    log_.push_back({Kind::remove, node, folder, old_name, "", 0, {}, 0, call.path, mount});
  } else {
    log_.push_back({call.kind, find(call.path), folder, name, old_name, 0, {}, 0, call.other, mount});
  }
  std::map<std::string, Node> moved;
  for (const auto& [path, node] : nodes_) {
    const bool below = path == call.path || path.starts_with(call.path + "/");
    moved[below ? call.other + path.substr(call.path.size()) : path] = node;
  }
  nodes_ = std::move(moved);
}

std::string Disk::text(size_t call) const {
  const Event& event = log_[call];
  std::string path = event.path == root_ ? "." : event.path.substr(root_.size() + 1);
  return fmt::format("{} {}", name_of(event.kind), path);
}

std::string Disk::path_of(const FileCall& write) const {
  const std::lock_guard lock(mutex_);
  const auto found = open_.find(write.fd);
  return found == open_.end() ? "" : found->second.path;
}

std::vector<size_t> Disk::unsynced(size_t calls) const {
  std::vector<size_t> out;
  std::set<Node> synced;  // by what comes later
  std::set<std::string> mounts_synced;
  for (size_t i = calls; i-- > 0;) {
    const Event& event = log_[i];
    if (event.kind == Kind::sync) synced.insert(event.node);
    if (event.kind == Kind::sync_all) mounts_synced.insert(event.mount);
    if (is_sync(i) || mounts_synced.contains(event.mount)) continue;
    if (!synced.contains(event.folder >= 0 ? event.folder : event.node)) out.push_back(i);
  }
  std::ranges::reverse(out);
  return out;
}

void Disk::forget(size_t call) {
  log_.erase(log_.begin() + static_cast<std::ptrdiff_t>(call));
}

void Disk::apply(Tree& tree, const Event& event, bool half) const {
  switch (event.kind) {
    case Kind::make_folder:
      tree.folders[event.node];
      tree.folders[event.folder][event.name] = event.node;
      return;
    case Kind::open:
    case Kind::link:
      tree.folders[event.folder][event.name] = event.node;
      return;
    case Kind::rename:
      tree.folders[event.folder].erase(event.old_name);
      tree.folders[event.folder][event.name] = event.node;
      return;
    case Kind::remove:
      tree.folders[event.folder].erase(event.name);
      return;
    case Kind::write:
    case Kind::allocate: {
      File& file = tree.files[event.node];
      const size_t bytes = event.data.size() / (half ? 2 : 1);
      const size_t end = static_cast<size_t>(event.offset) + bytes;
      if (bytes > 0 && file.written.size() < end) file.written.resize(end);
      std::copy_n(event.data.begin(), bytes, file.written.begin() + event.offset);
      file.bytes = std::max({file.bytes, event.bytes, static_cast<int64_t>(end)});
      return;
    }
    case Kind::sync:
    case Kind::sync_all:
    case Kind::close:
      return;
  }
}

void Disk::leave(size_t calls, const std::set<size_t>& lost, const std::set<size_t>& torn,
                 std::string_view left_out, const fs::path& target) const {
  Tree tree;
  for (size_t i = 0; i < calls; ++i) {
    if (!lost.contains(i)) apply(tree, log_[i], torn.contains(i));
  }
  // A name whose folder's own making was lost hangs in the air: folders are nodes by the names they have.
  for (const auto& event : log_) {
    if (event.kind == Kind::make_folder) tree.folders[event.node];
  }
  std::map<Node, fs::path> written;
  write_out(tree, 0, left_out, target, written);
}

void Disk::write_file(const Tree& tree, Node node, const fs::path& path) {
  std::ofstream out(path, std::ios::binary);
  const auto found = tree.files.find(node);
  if (found == tree.files.end()) return;
  const File& file = found->second;
  out.write(reinterpret_cast<const char*>(file.written.data()), std::ssize(file.written));
  out.close();
  fs::resize_file(path, static_cast<uintmax_t>(file.bytes));
}

void Disk::write_out(const Tree& tree, Node folder, std::string_view left_out, const fs::path& target,
                     std::map<Node, fs::path>& written) const {
  fs::create_directories(target);
  for (const auto& [name, node] : tree.folders.at(folder)) {
    if (tree.folders.contains(node)) {
      if (left_out.empty() || !name.starts_with(left_out))
        write_out(tree, node, left_out, target / name, written);
      continue;
    }
    const auto [first, is_first] = written.emplace(node, target / name);
    if (!is_first) {
      fs::create_hard_link(first->second, target / name);
      continue;
    }
    write_file(tree, node, target / name);
  }
}

}  // namespace overspill::testing
