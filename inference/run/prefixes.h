// Beginnings of texts whose keys and values are kept, so that a text that begins alike need not read them
// anew.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "inference/run/cache.h"

namespace overspill::inference {

/// A tree of blocks: a node has a block's tokens and pages, its children are the blocks that followed it in
/// texts. Tokens are compared, not only their hash: a text never gets what another one's tokens made.
/// What two texts share is the same pages. A text of millions of tokens is a chain as deep, so nothing here
/// recurses. Threads: one at a time.
class Prefixes {
 public:
  /// Keeps the blocks of a text's tokens, all of which its cache holds; the last block may be a part of one.
  /// Where a block is known already, the cache takes its pages instead of its own.
  void add(std::span<const int32_t> tokens, Cache& cache);
  /// Puts the longest known beginning of the tokens, but never all of them, into a new cache, and sets its
  /// length. A last block of which only a part fits is copied; other blocks are dropped where that needs
  /// room.
  void find(std::span<const int32_t> tokens, Cache& cache);
  /// Drops the block that was used longest ago, of those that no other follows. False where there is none.
  bool drop_one();
  /// Pages that nobody else holds.
  int64_t idle_pages() const;

 private:
  struct Node {
    Node() = default;
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;
    ~Node();

    std::vector<Page> pages;
    int64_t used = 0;
    std::map<std::vector<int32_t>, std::unique_ptr<Node>> children;
  };

  /// The child whose tokens begin most like these, and how many are alike; null where none does.
  struct Likest {
    Node* node = nullptr;
    int64_t alike = 0;
  };
  static Likest likest(const Node& node, std::span<const int32_t> tokens);

  Node root_;
  int64_t clock_ = 0;
};

}  // namespace overspill::inference
