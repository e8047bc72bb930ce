#include "io/checksum.h"

#include <array>

namespace overspill::io {

uint64_t xxh3_portable(const void* data, size_t bytes);
uint64_t xxh3_avx2(const void* data, size_t bytes);
uint64_t xxh3_avx512(const void* data, size_t bytes);

std::span<const ChecksumForm> checksum_forms() {
#if defined(__x86_64__)
  static constexpr std::array<ChecksumForm, 3> kForms{
      {{"portable", xxh3_portable}, {"avx2", xxh3_avx2}, {"avx512", xxh3_avx512}}};
  static const size_t usable = __builtin_cpu_supports("avx512f") ? 3 : __builtin_cpu_supports("avx2") ? 2 : 1;
  return std::span(kForms).first(usable);
#else
  static constexpr std::array<ChecksumForm, 1> kForms{{{"portable", xxh3_portable}}};
  return kForms;
#endif
}

uint64_t checksum_block(std::span<const std::byte> block) {
  static const auto widest = checksum_forms().back().hash;
  return widest(block.data(), block.size());
}

}  // namespace overspill::io
