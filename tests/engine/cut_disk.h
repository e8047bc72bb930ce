// A log of the file calls under one folder, and every disk that a power cut can leave of it.
//
// The rules are POSIX's and no file system's: a write survives a cut for sure once its file was synced, a
// name (made, linked, renamed, removed) once its folder was. Until then each may survive or not, alone.
#pragma once

#include <cerrno>
#include <filesystem>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "tests/engine/file_calls.h"

namespace overspill::testing {

class Disk : public FileWatcher {
 public:
  /// `root` is an empty folder. Syncs are noted, not made.
  explicit Disk(const std::filesystem::path& root);
  Disk(const Disk& other) : root_(other.root_), nodes_(other.nodes_), log_(other.log_) {}

  /// From now on no file gets a second name, as on a file system without hard links.
  void refuse_links() { refuses_links_ = true; }
  int failure_of(const FileCall& call) override {
    return refuses_links_ && call.kind == FileCall::Kind::link ? EPERM : 0;
  }

  void done(const FileCall& call, std::span<const std::byte> data) override;
  bool syncs() const override { return false; }

  size_t calls() const { return log_.size(); }
  std::string text(size_t call) const;
  bool is_sync(size_t call) const {
    return log_[call].kind == FileCall::Kind::sync || log_[call].kind == FileCall::Kind::sync_all;
  }

  bool is_sync_of_all(size_t call) const { return log_[call].kind == FileCall::Kind::sync_all; }
  bool is_write(size_t call) const { return log_[call].kind == FileCall::Kind::write; }

  /// Of the first `calls`: those that a cut may undo.
  std::vector<size_t> unsynced(size_t calls) const;

  /// A cut after `calls`: what is left where `lost` did not survive, and of the writes `torn` only a half.
  /// Put into `target`, of the root's entries those named.
  void leave(size_t calls, const std::set<size_t>& lost, const std::set<size_t>& torn,
             const std::vector<std::string>& names, const std::filesystem::path& target) const;

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
  };
  struct Tree {
    std::map<Node, std::map<std::string, Node>> folders;
    std::map<Node, std::vector<std::byte>> files;
  };

  bool inside(const std::string& path) const;
  Node find(const std::string& path) const;
  std::pair<Node, std::string> place(const std::string& path) const;
  void open(const FileCall& call);
  void rename(const FileCall& call);
  void add_name(const FileCall& call, const std::string& path, Node node);
  void apply(Tree& tree, const Event& event, bool half) const;
  void write_out(const Tree& tree, Node folder, const std::filesystem::path& target) const;

  const std::string root_;
  bool refuses_links_ = false;
  std::mutex mutex_;
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
