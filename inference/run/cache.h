// Keys and values of texts' positions: pages of one pool, which all texts of a model share.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "inference/kernels/forms.h"
#include "inference/kernels/panel.h"
#include "inference/model/spec.h"
#include "io/own_process.h"
#include "kernels/host_pages.h"

namespace overspill::inference {

/// Positions that lie together. A text of n positions has n / kBlockPositions blocks, rounded up.
inline constexpr int64_t kBlockPositions = 64;
static_assert(kBlockPositions % kKeyBlock == 0);

/// What one layer keeps of a block's positions: each key and value head has its keys (kKeyBlock), then its
/// values, a row a position. Of int8, the block's scales in fp32, one a position, follow the keys, and others
/// the values. The last of several holders gives it back to the pool. A page that several hold
/// is only read.
using Page = std::shared_ptr<std::byte>;

/// The memory of pages. Threads: any. In a forked child nothing is taken, which throws WrongProcess, and
/// nothing is given back.
class Pool {
 public:
  static constexpr int64_t kUnlimited = int64_t{1} << 40;

  Pool(const ModelSpec& spec, Element element, int64_t pages_max);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  /// Pages that so many positions of one text take, where no block is given back.
  static int64_t pages(const ModelSpec& spec, int64_t positions);
  /// All pages are as large as that of the layer that keeps the most.
  static int64_t page_bytes(const ModelSpec& spec, Element element);

  Element element() const { return element_; }
  int64_t page_bytes() const { return page_bytes_; }

 private:
  friend class Share;

  /// Pages whose memory is mapped together, while one of them is held.
  struct Slab {
    kernels::HostPages memory;
    int64_t held = 0;
  };
  struct Taken {
    int64_t index;
    std::byte* data;
  };
  Taken take() EXCLUDES(mutex_);  // throws std::bad_alloc
  void give_back(int64_t index) EXCLUDES(mutex_);

  const io::OwnProcess process_;
  const Element element_;
  const int64_t page_bytes_, pages_a_slab_;
  Mutex mutex_;
  int64_t unpromised_ GUARDED_BY(mutex_);  // pages that no share has
  std::vector<Slab> slabs_ GUARDED_BY(mutex_);
  std::vector<int64_t> free_ GUARDED_BY(mutex_);  // a heap, the lowest index first, so that slabs become free
};

/// The right to so many of a pool's pages, given back at its end, which its pages do not outlive. Threads:
/// one at a time.
class Share {
 public:
  /// Throws NoRoom where other shares have the pool's pages; WrongProcess.
  Share(Pool& pool, int64_t pages);
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;
  ~Share();

  const Pool& pool() const { return pool_; }
  int64_t pages() const { return pages_; }
  int64_t left() const { return pages_ - held_; }
  /// Null where none is left. Throws std::bad_alloc, WrongProcess.
  Page take();

 private:
  Pool& pool_;
  const int64_t pages_;
  int64_t held_ = 0;
};

/// One text's pages. Threads: one at a time.
class Cache {
 public:
  /// Both outlive this.
  Cache(const ModelSpec& spec, Share& share);

  /// The most pages that a text of so many positions holds, where at most `rows` are computed together.
  static int64_t pages(const ModelSpec& spec, int64_t positions, int64_t rows);

  Element element() const { return share_->pool().element(); }
  /// Positions that hold something. Set by who has written them.
  int64_t length() const { return length_; }
  void set_length(int64_t length) { length_ = length; }

  /// Gives back the blocks that no window sees from `length` on; then takes what positions up to `end` lack.
  /// False where the share has too few pages left; what was taken stays.
  bool make_room(int64_t end);
  /// Whether the position can be written.
  bool holds(int64_t position) const;
  /// Whether all that a position at `length` sees is here.
  bool can_go_on_at(int64_t length) const;
  /// Forgets what lies behind `length` positions, and gives back the blocks behind them.
  void rewind(int64_t length);
  int64_t held_pages() const;

  /// A block's pages, one a layer; none where a layer has given its own back.
  std::vector<Page> block(int64_t block) const;
  void set_block(int64_t block, std::span<const Page> pages);
  /// Writes a copy of the pages into pages of its own. False where the share has too few left.
  bool copy_block(int64_t block, std::span<const Page> pages);

  /// Elements from one position's value to the next.
  static int64_t value_stride(const Attention& attention) { return round_up(attention.head_size, kKeyBlock); }
  std::byte* keys(size_t layer, int64_t head, int64_t block) const {
    return layers_[layer].pages[static_cast<size_t>(block)].get() + head * layers_[layer].head_bytes;
  }
  std::byte* values(size_t layer, int64_t head, int64_t block) const {
    return keys(layer, head, block) + layers_[layer].key_bytes;
  }
  /// Of int8: what the integers are multiplied by, a number a position of the block.
  float* key_scales(size_t layer, int64_t head, int64_t block) const {
    return scales_before(values(layer, head, block));
  }
  float* value_scales(size_t layer, int64_t head, int64_t block) const {
    return scales_before(keys(layer, head, block) + layers_[layer].head_bytes);
  }

 private:
  struct LayerPages {
    int64_t head_bytes, key_bytes;
    int64_t window;  // positions that one sees
    std::vector<Page> pages;

    /// The first block that a position sees.
    int64_t first_seen(int64_t position) const {
      return position < window ? 0 : (position - window + 1) / kBlockPositions;
    }
  };

  static float* scales_before(std::byte* end) { return reinterpret_cast<float*>(end) - kBlockPositions; }

  Share* share_;
  int64_t length_ = 0;
  std::vector<LayerPages> layers_;
};

}  // namespace overspill::inference
