// The header of a safetensors file: eight bytes of length, then a JSON object that names each tensor's dtype,
// shape and place (https://github.com/huggingface/safetensors, "Format"). The header is not trusted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace overspill::inference {

struct StoredTensor {
  std::string name;
  std::string dtype;           // as the file calls it: "BF16", "F32", …
  std::vector<int64_t> shape;  // row-major
  int64_t offset = 0;          // of its first byte, in the file
  int64_t bytes = 0;
  int32_t file = 0;  // set by who knows several

  int64_t elements() const;
};

/// The longest header that is read: that of the format's own library.
inline constexpr int64_t kHeaderBytesMax = 100'000'000;
inline constexpr int64_t kHeaderLengthBytes = 8;

/// The length that the file's first eight bytes give. Throws ModelError where the file, of `file_bytes`, is
/// too short for it, or it is above kHeaderBytesMax.
int64_t header_bytes(std::string_view first_eight, int64_t file_bytes, const std::string& file);

/// The tensors in the order of their bytes. Checked: every field is there once and of its type; shape times
/// dtype is the size, without overflow; the tensors tile the file from the header's end to its own, without
/// overlap, hole or rest; no name is given twice. `text` is the header, as long as header_bytes said. Throws
/// ModelError, which begins with `file`. Time and memory are linear in the text.
std::vector<StoredTensor> parse_header(std::string_view text, int64_t file_bytes, const std::string& file);

}  // namespace overspill::inference
