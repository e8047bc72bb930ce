// A log of the file calls under one folder, and every disk that a power cut can leave of it.
//
// The rules are POSIX's and no file system's: a write survives a cut for sure once its file was synced, a
// name (made, linked, renamed, removed) once its folder was. Until then each may survive or not, alone.
#pragma once

#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/engine/file_calls.h"

namespace overspill::testing {

class Disk : public FileWatcher {
 public:
  /// `root` is an empty folder. Syncs are noted, not made.
  explicit Disk(const std::filesystem::path& root);
  Disk(const Disk& other)
      : root_(other.root_), mounts_(other.mounts_), nodes_(other.nodes_), log_(other.log_) {}

  /// From now on no file gets a second name, as on a file system without hard links.
  void refuse_links() { refuses_links_ = true; }
  /// From now on the folder is a file system of its own: no name leads from one to the other, and a sync of
  /// all is of one.
  void mount(const std::filesystem::path& folder) { mounts_.push_back(folder.string()); }
  int failure_of(const FileCall& call) override;

  void done(const FileCall& call, std::span<const std::byte> data) override;
  bool syncs() const override { return false; }

  size_t calls() const {
    const std::lock_guard lock(mutex_);
    return log_.size();
  }
  /// Of a call of the whole run, when it is over.
  std::string text(size_t call) const;
  /// Of the file that this call writes to; empty where it is none of this disk. Any thread.
  std::string path_of(const FileCall& write) const;
  bool is_sync(size_t call) const {
    return log_[call].kind == FileCall::Kind::sync || log_[call].kind == FileCall::Kind::sync_all;
  }

  bool is_sync_of_all(size_t call) const { return log_[call].kind == FileCall::Kind::sync_all; }
  bool is_write(size_t call) const { return log_[call].kind == FileCall::Kind::write; }

  /// Of the first `calls`: those that a cut may undo.
  std::vector<size_t> unsynced(size_t calls) const;

  /// A cut after `calls`: what is left where `lost` did not survive, and of the writes `torn` only a half.
  /// Put into `target`, without the folders of that prefix.
  void leave(size_t calls, const std::set<size_t>& lost, const std::set<size_t>& torn,
             std::string_view left_out, const std::filesystem::path& target) const;

  /// As if this call had never been made.
  void forget(size_t call);

 private:
  using Node = int;
  struct Event {
    FileCall::Kind kind;
    Node node;             // what is written, synced, or gets a name
    Node folder = -1;      // of the name
    std::string name;      // given, or removed
    std::string old_name;  // rename, in the same folder
    int64_t offset = 0;
    std::vector<std::byte> data;
    int64_t bytes = 0;  // allocate: the file's least length
    std::string path;   // for people
    std::string mount;  // the file system
  };
  struct File {
    std::vector<std::byte> written;
    int64_t bytes = 0;  // at least those written: the rest is a hole, as in most of a slab
  };
  struct Tree {
    std::map<Node, std::map<std::string, Node>> folders;
    std::map<Node, File> files;
  };

  bool inside(const std::string& path) const;
  std::string mount_of(const std::string& path) const;
  Node find(const std::string& path) const;
  std::pair<Node, std::string> place(const std::string& path) const;
  void open(const FileCall& call);
  void rename(const FileCall& call);
  void add_name(const FileCall& call, const std::string& path, Node node);
  void apply(Tree& tree, const Event& event, bool half) const;
  static void write_file(const Tree& tree, Node node, const std::filesystem::path& path);
  /// Files by the first of their names in `written`: the others are links to it.
  void write_out(const Tree& tree, Node folder, std::string_view left_out,
                 const std::filesystem::path& target, std::map<Node, std::filesystem::path>& written) const;

  const std::string root_;
  bool refuses_links_ = false;
  std::vector<std::string> mounts_;
  mutable std::mutex mutex_;
  std::map<std::string, Node> nodes_;  // by path, now
  struct Open {
    Node node;
    int64_t position;
    std::string path;
  };
  std::map<int, Open> open_;
  Node next_node_ = 1;
  std::vector<Event> log_;
};

}  // namespace overspill::testing
