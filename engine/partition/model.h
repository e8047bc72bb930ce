// What the caller tells the engine about a model: units, and the parameters in them. Depends on the model
// alone, never on budgets.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace overspill::engine {

/// How a unit's parameters are kept (DESIGN 3).
enum class Format : uint8_t {
  bf16_split,  // hi 2, lo 2, m 4, v 4 bytes a parameter
  fp32,        // hi 4 (the fp32 weight itself), m 4, v 4
  frozen,      // hi only, bytes of any dtype
};

std::string_view format_name(Format format);
Format format_from_name(std::string_view name);  // throws std::invalid_argument

/// Bytes of one element of a safetensors dtype ("BF16", "F32", "I8", ...); 0 for a name that is none.
int64_t dtype_bytes(std::string_view dtype);

struct SegmentSpec {
  std::string name;
  std::vector<int64_t> shape;
  int64_t group = 0;                 // index of its hyper-parameters in step()
  std::vector<std::string> aliases;  // further names of the same (tied) parameter
  /// In elements, one a dimension; empty: row-major. Bytes come, lie and go in the order of memory that they
  /// give.
  std::vector<int64_t> strides = {};
};

struct UnitSpec {
  std::string name;
  Format format = Format::bf16_split;
  std::string dtype = "BF16";
  std::vector<SegmentSpec> segments;
};

}  // namespace overspill::engine
