// Attention of a forward (forward.h).
#include <algorithm>

#include "inference/run/forward.h"

namespace overspill::inference {

/// False: a part could not be had.
bool Forward::attention(int thread, size_t layer) {
  const Layer& spec = spec_.layers[layer];
  const LayerWeights& weights = weights_.layers[layer];
  const Attention& attention = spec.attention;
  Own& mine = owns_[static_cast<size_t>(thread)];
  const int threads = team_.size();

  norm_rows(mine, spec.attention_norm, weights.attention_norm);
  if (!begin(thread, layer, Part::qkv)) return false;
  multiply_own(thread, weights.qkv, weights.qkv_bias, mine.input, count(), qkv_, 0);
  end(thread, layer, Part::qkv);
  team_.barrier();
  for (int64_t head = thread; head < attention.kv_heads; head += threads) append(mine, layer, head);
  // With one row a head is appended and looked at by the same thread.
  if (count() > 1) team_.barrier();
  int64_t item = 0;
  for (const Run& run : runs_) {
    for (int64_t head = 0; head < attention.kv_heads; ++head, ++item) {
      if (item % threads == thread) attend(mine, layer, head, run);
    }
  }
  team_.barrier();
  if (!begin(thread, layer, Part::out)) return false;
  if (spec.after_attention) {
    multiply_own(thread, weights.out, weights.out_bias, mixed_, count(), branch_, 0);
  } else {
    add_own(thread, weights.out, weights.out_bias, mixed_, x_);
  }
  end(thread, layer, Part::out);
  team_.barrier();
  if (spec.after_attention) {
    add_normed(thread, *spec.after_attention, weights.after_attention);
    team_.barrier();
  }
  return true;
}

/// Norms and rotates one key head and the query heads that look at it, and writes key and value to the cache.
void Forward::append(Own& own, size_t layer, int64_t head) {
  const Attention& spec = spec_.layers[layer].attention;
  const LayerWeights& weights = weights_.layers[layer];
  const int64_t group = spec.heads / spec.kv_heads, size = spec.head_size;
  for (int64_t r = 0; r < count(); ++r) {
    float* const queries = qkv_.at(r) + head * group * size;
    float* const key = qkv_.at(r) + (spec.heads + head) * size;
    float* const value = key + spec.kv_heads * size;
    for (int64_t g = 0; g < group; ++g) {
      if (spec.query_norm)
        normalise(*spec.query_norm, weights.query_norm, queries + g * size, queries + g * size, size);
      rotate(layer, r, queries + g * size);
    }
    if (spec.key_norm) normalise(*spec.key_norm, weights.key_norm, key, key, size);
    rotate(layer, r, key);
    write_to_cache(own, layer, head, rows_[static_cast<size_t>(r)], key, value);
  }
}

void Forward::write_to_cache(Own& own, size_t layer, int64_t head, const Row& row, const float* key,
                             const float* value) {
  const Attention& spec = spec_.layers[layer].attention;
  const int64_t size = spec.head_size, block = row.position / kBlockPositions;
  const int64_t position = row.position % kBlockPositions;
  const int64_t key_at = position / kKeyBlock * kKeyBlock * size + position % kKeyBlock;
  const int64_t value_at = position * Cache::value_stride(spec);
  std::byte* const keys_at = row.cache->keys(layer, head, block);
  std::byte* const values_at = row.cache->values(layer, head, block);
  // A position's numbers lie kKeyBlock apart.
  const auto scatter = [&](const auto* from, auto* to) {
    for (int64_t d = 0; d < size; ++d) to[key_at + d * kKeyBlock] = from[d];
  };
  switch (row.cache->element()) {
    case Element::fp32:
      scatter(key, reinterpret_cast<float*>(keys_at));
      std::copy_n(value, size, reinterpret_cast<float*>(values_at) + value_at);
      return;
    case Element::int8:
      row.cache->key_scales(layer, head, block)[position] = kernels_.quantise(key, own.integers.data(), size);
      scatter(own.integers.data(), reinterpret_cast<int8_t*>(keys_at));
      row.cache->value_scales(layer, head, block)[position] =
          kernels_.quantise(value, reinterpret_cast<int8_t*>(values_at) + value_at, size);
      return;
    case Element::bf16:
    case Element::coded:  // which no cache is
      kernels_.narrow(key, own.key.data(), size);
      scatter(own.key.data(), reinterpret_cast<uint16_t*>(keys_at));
      kernels_.narrow(value, reinterpret_cast<uint16_t*>(values_at) + value_at, size);
  }
}

/// The query heads of one key and value head, for the rows of a run.
void Forward::attend(Own& own, size_t layer, int64_t head, const Run& run) {
  const Attention& spec = spec_.layers[layer].attention;
  const int64_t group = spec.heads / spec.kv_heads, size = spec.head_size;
  const auto first_of = [&](int64_t position) {
    return spec.window ? std::max<int64_t>(0, position - *spec.window + 1) : 0;
  };
  const Row& row = rows_[static_cast<size_t>(run.first)];
  const int64_t rows = run.count * group, stride = Cache::value_stride(spec);
  const int64_t begin = first_of(row.position) / kKeyBlock * kKeyBlock, end = row.position + run.count;
  for (int64_t r = 0; r < run.count; ++r)
    std::copy_n(qkv_.at(run.first + r) + head * group * size, group * size,
                own.queries.data() + r * group * size);

  // Calls body(positions of the block, counted from its first; the block; its first position).
  const auto for_each_block = [&](auto body) {
    for (int64_t block = begin / kBlockPositions; block * kBlockPositions < end; ++block) {
      const int64_t first = block * kBlockPositions;
      body(AttentionRows{.rows = rows,
                         .begin = std::max(begin, first) - first,
                         .end = std::min(end, first + kBlockPositions) - first,
                         .head_size = size,
                         .value_stride = stride},
           block, first);
    }
  };
  for_each_block([&](const AttentionRows& at, int64_t block, int64_t first) {
    score(at, *row.cache, layer, head, block, own.queries.data(), own.weights.data() + first,
          own.weight_stride);
  });
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t position = row.position + i / group;
    // Every row's sums begin at a block of its own window, so that they do not depend on the run's other
    // rows.
    kernels_.softmax(own.weights.data() + i * own.weight_stride, begin, first_of(position), position + 1,
                     round_up(end, kKeyBlock), spec.scale, spec.softcap.value_or(0));
  }
  std::fill_n(own.mixed.data(), rows * stride, 0.0f);
  for_each_block([&](const AttentionRows& at, int64_t block, int64_t first) {
    mix(at, *row.cache, layer, head, block, own.weights.data() + first, own.weight_stride, own.mixed.data());
  });
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t r = run.first + i / group, offset = (head * group + i % group) * size;
    std::copy_n(own.mixed.data() + i * stride, size, mixed_.values(r) + offset);
    kernels_.narrow(mixed_.values(r) + offset, mixed_.narrow(r) + offset, size);
  }
}

/// Scores of a block's positions.
void Forward::score(const AttentionRows& at, const Cache& cache, size_t layer, int64_t head, int64_t block,
                    const float* queries, float* scores, int64_t stride) const {
  const std::byte* const keys = cache.keys(layer, head, block);
  switch (cache.element()) {
    case Element::fp32:
      return kernels_.score_fp32(at, queries, reinterpret_cast<const float*>(keys), scores, stride);
    case Element::int8:
      return kernels_.score_int8(at, queries, reinterpret_cast<const int8_t*>(keys),
                                 cache.key_scales(layer, head, block), scores, stride);
    case Element::bf16:
    case Element::coded:
      return kernels_.score_bf16(at, queries, reinterpret_cast<const uint16_t*>(keys), scores, stride);
  }
}

/// Adds a block's values, by their weights, to out.
void Forward::mix(const AttentionRows& at, const Cache& cache, size_t layer, int64_t head, int64_t block,
                  const float* weights, int64_t stride, float* out) const {
  const std::byte* const values = cache.values(layer, head, block);
  switch (cache.element()) {
    case Element::fp32:
      return kernels_.mix_fp32(at, weights, stride, reinterpret_cast<const float*>(values), out,
                               at.value_stride);
    case Element::int8:
      return kernels_.mix_int8(at, weights, stride, reinterpret_cast<const int8_t*>(values),
                               cache.value_scales(layer, head, block), out, at.value_stride);
    case Element::bf16:
    case Element::coded:
      return kernels_.mix_bf16(at, weights, stride, reinterpret_cast<const uint16_t*>(values), out,
                               at.value_stride);
  }
}

void Forward::rotate(size_t layer, int64_t row, float* head) const {
  if (!spec_.layers[layer].attention.rope) return;
  const Angles& angles = angles_[angles_of_layer_[layer]];
  const auto n = static_cast<int64_t>(angles.rope->frequencies.size());
  const float* const cosines = angles.cosines.data() + row * n;
  const float* const sines = angles.sines.data() + row * n;
  for (int64_t i = 0; i < n; ++i) {
    const float a = head[i], b = head[i + n];
    head[i] = a * cosines[i] - b * sines[i];
    head[i + n] = b * cosines[i] + a * sines[i];
  }
}

}  // namespace overspill::inference
