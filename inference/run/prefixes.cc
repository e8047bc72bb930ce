#include "inference/run/prefixes.h"

#include <algorithm>
#include <iterator>

namespace overspill::inference {
namespace {

std::vector<int32_t> block_of(std::span<const int32_t> tokens, int64_t block) {
  const auto rest = tokens.subspan(static_cast<size_t>(block * kBlockPositions));
  const auto own = rest.first(std::min(rest.size(), static_cast<size_t>(kBlockPositions)));
  return {own.begin(), own.end()};
}

}  // namespace

/// A node goes when its children have been taken from it.
Prefixes::Node::~Node() {
  std::vector<std::unique_ptr<Node>> rest;
  const auto take_children = [&](Node& node) {
    for (auto& [tokens, child] : node.children) rest.push_back(std::move(child));
    node.children.clear();
  };
  take_children(*this);
  while (!rest.empty()) {
    const std::unique_ptr<Node> last = std::move(rest.back());
    rest.pop_back();
    take_children(*last);
  }
}

void Prefixes::add(std::span<const int32_t> tokens, Cache& cache) {
  ++clock_;
  Node* node = &root_;
  const auto count = static_cast<int64_t>(tokens.size());
  for (int64_t block = 0; block * kBlockPositions < count; ++block) {
    const std::vector<int32_t> own = block_of(tokens, block);
    const std::vector<Page> pages = cache.block(block);
    auto found = node->children.find(own);
    if (found == node->children.end()) {
      // A layer has given its page back, and the one who kept this block has dropped it.
      if (pages.empty()) return;
      found = node->children.emplace(own, std::make_unique<Node>()).first;
      found->second->pages = pages;
    } else if (!pages.empty() && static_cast<int64_t>(own.size()) == kBlockPositions) {
      cache.set_block(block, found->second->pages);
    }
    node = found->second.get();
    node->used = clock_;
  }
}

void Prefixes::find(std::span<const int32_t> tokens, Cache& cache) {
  ++clock_;
  Node* node = &root_;
  // The last token is always read: its logits are wanted.
  const auto most = static_cast<int64_t>(tokens.size()) - 1;
  for (int64_t block = 0;; ++block) {
    const int64_t first = block * kBlockPositions;
    if (first >= most) return;
    const Likest found = likest(*node, tokens.subspan(static_cast<size_t>(first)));
    const int64_t alike = std::min(found.alike, most - first);
    if (alike == 0) return;
    found.node->used = clock_;
    if (alike < kBlockPositions) {
      const std::vector<Page> pages = found.node->pages;  // held, though their node may be dropped
      while (!cache.copy_block(block, pages)) {
        if (idle_pages() == 0 || !drop_one()) return;
      }
      cache.set_length(first + alike);
      return;
    }
    cache.set_block(block, found.node->pages);
    cache.set_length(first + alike);
    node = found.node;
  }
}

Prefixes::Likest Prefixes::likest(const Node& node, std::span<const int32_t> tokens) {
  const auto block = tokens.first(std::min(tokens.size(), static_cast<size_t>(kBlockPositions)));
  Likest best;
  // In the order of the map, the ones that begin most like the block stand on either side of it.
  const auto after = node.children.lower_bound({block.begin(), block.end()});
  const auto look = [&](auto child) {
    const auto [end, _] = std::ranges::mismatch(child->first, block);
    const auto alike = static_cast<int64_t>(end - child->first.begin());
    if (alike > best.alike) best = {child->second.get(), alike};
  };
  if (after != node.children.end()) look(after);
  if (after != node.children.begin()) look(std::prev(after));
  return best;
}

bool Prefixes::drop_one() {
  Node* parent = nullptr;
  decltype(root_.children)::iterator oldest;
  std::vector<Node*> rest{&root_};
  while (!rest.empty()) {
    Node& node = *rest.back();
    rest.pop_back();
    for (auto child = node.children.begin(); child != node.children.end(); ++child) {
      if (!child->second->children.empty()) {
        rest.push_back(child->second.get());
      } else if (parent == nullptr || child->second->used < oldest->second->used) {
        parent = &node;
        oldest = child;
      }
    }
  }
  if (parent == nullptr) return false;
  parent->children.erase(oldest);
  return true;
}

int64_t Prefixes::idle_pages() const {
  int64_t idle = 0;
  std::vector<const Node*> rest{&root_};
  while (!rest.empty()) {
    const Node& node = *rest.back();
    rest.pop_back();
    idle += std::ranges::count_if(node.pages, [](const Page& page) { return page.use_count() == 1; });
    for (const auto& [tokens, child] : node.children) rest.push_back(child.get());
  }
  return idle;
}

}  // namespace overspill::inference
