// Keys and values of one text's positions, for every layer.
#pragma once

#include <cstdint>

#include "inference/kernels/forms.h"
#include "inference/kernels/panel.h"
#include "inference/model/spec.h"
#include "kernels/host_pages.h"

namespace overspill::inference {

/// Each key and value head of a layer has its own run of memory: keys in blocks (kKeyBlock), values a row a
/// position. What was never written takes no memory.
class Cache {
 public:
  /// Room for `capacity` positions. Throws std::bad_alloc.
  Cache(const ModelSpec& spec, int64_t capacity, Element element);

  /// What one of so many positions takes, once all were written.
  static int64_t bytes(const ModelSpec& spec, int64_t capacity, Element element);

  int64_t capacity() const { return capacity_; }
  Element element() const { return element_; }
  /// Positions that hold something. Set by who has written them.
  int64_t length() const { return length_; }
  void set_length(int64_t length) { length_ = length; }

  /// Elements from one position's value to the next.
  static int64_t value_stride(const Attention& attention) { return round_up(attention.head_size, kKeyBlock); }
  std::byte* keys(size_t layer, int64_t head) const { return at(layer, head); }
  std::byte* values(size_t layer, int64_t head) const { return at(layer, head) + layers_[layer].key_bytes; }

 private:
  struct Place {
    int64_t offset, head_bytes, key_bytes;
  };
  std::byte* at(size_t layer, int64_t head) const {
    return memory_.data() + layers_[layer].offset + head * layers_[layer].head_bytes;
  }

  int64_t capacity_;
  Element element_;
  int64_t length_ = 0;
  std::vector<Place> layers_;
  kernels::HostPages memory_;
};

}  // namespace overspill::inference
