#include "inference/run/cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>

#include "inference/error.h"
#include "inference/run/team.h"

namespace overspill::inference {
namespace {

constexpr int64_t kSlabBytes = 4 << 20;

int64_t blocks_of(int64_t positions) {
  return (positions + kBlockPositions - 1) / kBlockPositions;
}

int64_t scale_bytes_of(Element element) {
  return element == Element::int8 ? kBlockPositions * static_cast<int64_t>(sizeof(float)) : 0;
}

int64_t key_bytes_of(const Attention& attention, Element element) {
  return kBlockPositions * attention.head_size * bytes_of(element) + scale_bytes_of(element);
}

int64_t head_bytes_of(const Attention& attention, Element element) {
  return key_bytes_of(attention, element) +
         kBlockPositions * Cache::value_stride(attention) * bytes_of(element) + scale_bytes_of(element);
}

}  // namespace

// Pool.

Pool::Pool(const ModelSpec& spec, Element element, int64_t pages_max)
    : element_(element),
      page_bytes_(page_bytes(spec, element)),
      pages_a_slab_(std::clamp<int64_t>(kSlabBytes / page_bytes_, 1, std::max<int64_t>(1, pages_max))),
      unpromised_(pages_max) {}

int64_t Pool::pages(const ModelSpec& spec, int64_t positions) {
  return static_cast<int64_t>(spec.layers.size()) * blocks_of(positions);
}

int64_t Pool::page_bytes(const ModelSpec& spec, Element element) {
  int64_t most = 0;
  for (const Layer& layer : spec.layers)
    most = std::max(most, layer.attention.kv_heads * head_bytes_of(layer.attention, element));
  return round_up(most, 64);
}

Pool::Taken Pool::take() {
  check_process(process_);
  const MutexLock lock(mutex_);
  if (free_.empty()) {
    const auto first = static_cast<int64_t>(slabs_.size()) * pages_a_slab_;
    free_.reserve(static_cast<size_t>(first + pages_a_slab_));  // give_back then needs no memory
    slabs_.emplace_back();
    for (int64_t i = first; i < first + pages_a_slab_; ++i) free_.push_back(i);  // in order: a heap
  }
  Slab& slab = slabs_[static_cast<size_t>(free_.front() / pages_a_slab_)];
  // Huge pages: a token reads all of a text's pages, and its time is measurably less. A slab is small, and
  // the lowest index is taken first, so little of them is idle.
  if (slab.held == 0) slab.memory = kernels::HostPages(pages_a_slab_ * page_bytes_, kernels::PageSize::huge);
  std::ranges::pop_heap(free_, std::greater<>());
  const int64_t index = free_.back();
  free_.pop_back();
  ++slab.held;
  return {index, slab.memory.data() + index % pages_a_slab_ * page_bytes_};
}

void Pool::give_back(int64_t index) {
  if (!process_.here()) return;
  const MutexLock lock(mutex_);
  Slab& slab = slabs_[static_cast<size_t>(index / pages_a_slab_)];
  if (--slab.held == 0) slab.memory = kernels::HostPages();
  free_.push_back(index);
  std::ranges::push_heap(free_, std::greater<>());
}

// Share.

Share::Share(Pool& pool, int64_t pages) : pool_(pool), pages_(pages) {
  check_process(pool_.process_);
  const MutexLock lock(pool_.mutex_);
  if (pool_.unpromised_ < pages_) {
    throw NoRoom(
        fmt::format("a cache takes {} bytes, and the budget has {} left for caches; load the model with more "
                    "positions",
                    pages_ * pool_.page_bytes_, pool_.unpromised_ * pool_.page_bytes_));
  }
  pool_.unpromised_ -= pages_;
}

Share::~Share() {
  if (!pool_.process_.here()) return;
  const MutexLock lock(pool_.mutex_);
  pool_.unpromised_ += pages_;
}

Page Share::take() {
  if (held_ == pages_) return nullptr;
  const Pool::Taken taken = pool_.take();
  ++held_;
  // If there is no memory for the count of holders, the page is given back too.
  return Page(taken.data, [this, index = taken.index](std::byte*) {
    pool_.give_back(index);
    --held_;
  });
}

// Cache.

Cache::Cache(const ModelSpec& spec, Share& share) : share_(&share) {
  for (const Layer& layer : spec.layers) {
    const Attention& attention = layer.attention;
    layers_.push_back({head_bytes_of(attention, element()),
                       key_bytes_of(attention, element()),
                       attention.window.value_or(std::numeric_limits<int64_t>::max()),
                       {}});
  }
}

int64_t Cache::pages(const ModelSpec& spec, int64_t positions, int64_t rows) {
  int64_t pages = 0;
  for (const Layer& layer : spec.layers) {
    const int64_t all = blocks_of(positions);
    const auto& window = layer.attention.window;
    // What the first row sees and the rows; they may begin and end within a block.
    pages += window ? std::min(all, blocks_of(std::min(*window, positions) + rows) + 1) : all;
  }
  return pages;
}

bool Cache::make_room(int64_t end) {
  for (LayerPages& layer : layers_) {
    const int64_t first = layer.first_seen(length_);
    auto& pages = layer.pages;
    for (int64_t i = std::min<int64_t>(first, static_cast<int64_t>(pages.size())); i-- > 0;) {
      if (pages[static_cast<size_t>(i)] == nullptr) break;
      pages[static_cast<size_t>(i)].reset();
    }
  }
  for (LayerPages& layer : layers_) {
    if (const auto blocks = static_cast<size_t>(blocks_of(end)); layer.pages.size() < blocks)
      layer.pages.resize(blocks);
    for (int64_t i = layer.first_seen(length_); i < blocks_of(end); ++i) {
      Page& page = layer.pages[static_cast<size_t>(i)];
      if (page == nullptr && (page = share_->take()) == nullptr) return false;
    }
  }
  return true;
}

bool Cache::holds(int64_t position) const {
  const auto block = static_cast<size_t>(position / kBlockPositions);
  return std::ranges::all_of(layers_, [&](const LayerPages& layer) {
    return block < layer.pages.size() && layer.pages[block] != nullptr;
  });
}

bool Cache::can_go_on_at(int64_t length) const {
  return std::ranges::all_of(layers_, [&](const LayerPages& layer) {
    for (int64_t i = layer.first_seen(length); i < blocks_of(length); ++i) {
      if (i >= static_cast<int64_t>(layer.pages.size()) || layer.pages[static_cast<size_t>(i)] == nullptr)
        return false;
    }
    return true;
  });
}

void Cache::rewind(int64_t length) {
  for (LayerPages& layer : layers_)
    layer.pages.resize(std::min(layer.pages.size(), static_cast<size_t>(blocks_of(length))));
  length_ = length;
}

int64_t Cache::held_pages() const {
  int64_t held = 0;
  for (const LayerPages& layer : layers_)
    held += std::ranges::count_if(layer.pages, [](const Page& page) { return page != nullptr; });
  return held;
}

std::vector<Page> Cache::block(int64_t block) const {
  std::vector<Page> found;
  for (const LayerPages& layer : layers_) {
    if (block >= static_cast<int64_t>(layer.pages.size()) ||
        layer.pages[static_cast<size_t>(block)] == nullptr)
      return {};
    found.push_back(layer.pages[static_cast<size_t>(block)]);
  }
  return found;
}

void Cache::set_block(int64_t block, std::span<const Page> pages) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    auto& mine = layers_[i].pages;
    if (mine.size() <= static_cast<size_t>(block)) mine.resize(static_cast<size_t>(block) + 1);
    mine[static_cast<size_t>(block)] = pages[i];
  }
}

bool Cache::copy_block(int64_t block, std::span<const Page> pages) {
  std::vector<Page> copies;
  for (const Page& page : pages) {
    copies.push_back(share_->take());
    if (copies.back() == nullptr) return false;
    std::memcpy(copies.back().get(), page.get(), static_cast<size_t>(share_->pool().page_bytes()));
  }
  set_block(block, copies);
  return true;
}

}  // namespace overspill::inference
