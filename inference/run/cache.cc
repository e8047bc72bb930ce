#include "inference/run/cache.h"

namespace overspill::inference {

Cache::Cache(const ModelSpec& spec, int64_t capacity, Element element)
    : capacity_(round_up(capacity, kKeyBlock)), element_(element) {
  int64_t bytes = 0;
  for (const Layer& layer : spec.layers) {
    const Attention& attention = layer.attention;
    const int64_t key_bytes = capacity_ * attention.head_size * bytes_of(element);
    const int64_t value_bytes = capacity_ * value_stride(attention) * bytes_of(element);
    layers_.push_back({bytes, key_bytes + value_bytes, key_bytes});
    bytes += attention.kv_heads * (key_bytes + value_bytes);
  }
  // Small pages: a short text uses a little of each head's run.
  memory_ = kernels::HostPages(bytes, kernels::PageSize::small);
}

int64_t Cache::bytes(const ModelSpec& spec, int64_t capacity, Element element) {
  int64_t elements = 0;
  for (const Layer& layer : spec.layers) {
    const Attention& attention = layer.attention;
    elements += attention.kv_heads * (attention.head_size + value_stride(attention));
  }
  return elements * round_up(capacity, kKeyBlock) * bytes_of(element);
}

}  // namespace overspill::inference
