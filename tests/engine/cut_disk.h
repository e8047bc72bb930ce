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
#include <vector>

#include "tests/engine/file_calls.h"

namespace overspill::testing {

class Disk : public FileWatcher {
 public:
  /// `root` is an empty folder. Syncs are noted, not made.
  explicit Disk(const std::filesystem::path& root);
  Disk(const Disk& other) : root_(other.root_), nodes_(other.nodes_), log_(other.log_) {}

  void done(const FileCall& call, std::span<const std::byte> data) override;
  bool syncs() const override { return false; }

  size_t calls() const { return log_.size(); }
  std::string text(size_t call) const;
  bool is_sync(size_t call) const {
    return log_[call].kind == FileCall::Kind::sync || log_[call].kind == FileCall::Kind::sync_all;
  }

  /// Of the first `calls`: those that a cut may undo.
  std::vector<size_t> unsynced(size_t calls) const;

  /// A cut after `calls`: what is left where `lost` did not survive, and of the last write only a half if
  /// `torn`. Put into `target`, of the root's entries those named.
  void leave(size_t calls, const std::set<size_t>& lost, bool torn, const std::vector<std::string>& names,
             const std::filesystem::path& target) const;

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
