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

/// How a unit's parameters are kept (docs/update.md): a format of the update, or frozen, which is hi only,
/// bytes of any dtype.
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
  /// In elements, one per dimension; empty: row-major. The engine takes, keeps and returns bytes in the
  /// memory order that these give.
  std::vector<int64_t> strides = {};
  /// false: another rank of RankGroups::model_ranks holds the same parameter and counts it in the norm of
  /// gradients.
  bool in_norm = true;
  /// How many numbers the elements stand for, where they are packed (UnitSpec::packing); 0: one each.
  int64_t parameters = 0;
};

struct UnitSpec {
  std::string name;
  UnitFormat format = optim::Format::exact;
  std::string dtype = "BF16";
  std::vector<SegmentSpec> segments;
  optim::Optimizer optimizer{};  // for all its groups; by default Adam
  /// Names, for the text of the plan, how the bytes of a frozen unit hold numbers of fewer bits. The caller
  /// packs and unpacks them.
  std::string packing = {};
  /// Units with one number are held at the same time: a call of a compiled block needs them all.
  /// kWithEachBlock: those of every number. -1: none.
  int32_t together = -1;
  /// Above 0: the caller reads the weights in parts of so many bytes at most (Engine::read_part), and no
  /// lease has them whole. One rank, on the host.
  int64_t part_bytes = 0;
};

inline constexpr int32_t kWithEachBlock = -2;

}  // namespace overspill::engine
