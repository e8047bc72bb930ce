// What the caller tells the engine about a model: units, and the parameters in them. Depends on the model
// alone, never on budgets.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cpu_optim/format.h"

namespace overspill::engine {

/// How a unit's parameters are kept (DESIGN 3): a format of the update, or frozen, which is hi only, bytes of
/// any dtype.
using UnitFormat = std::optional<optim::Format>;
inline constexpr std::nullopt_t kFrozen = std::nullopt;

std::string_view format_name(UnitFormat format);
UnitFormat format_from_name(std::string_view name);  // throws std::invalid_argument

/// The safetensors dtype of the weights that forward uses; "" for frozen, which may have any.
std::string_view weights_dtype(UnitFormat format);

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
  /// false: a copy of what another of Resources::model_ranks holds and counts in the norm of gradients.
  bool in_norm = true;
  /// How many numbers the elements stand for, where they are packed (UnitSpec::packing); 0: one each.
  int64_t parameters = 0;
};

struct UnitSpec {
  std::string name;
  UnitFormat format = optim::Format::exact;
  std::string dtype = "BF16";
  std::vector<SegmentSpec> segments;
  optim::Optimizer optimizer{};  // of all its groups: Adam, unless said
  /// Of a frozen unit whose elements are bytes that hold numbers in fewer bits: how, for the plan. The caller
  /// packs and unpacks them.
  std::string packing = {};
};

}  // namespace overspill::engine
