#include "inference/run/pack.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "inference/error.h"

namespace overspill::inference {
namespace {

// Of a matrix that is stored transposed this much is read at a time.
constexpr int64_t kStagingBytes = int64_t{4} << 20;

float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  // 2^112 moves the exponent's bias from 15 to 127, and makes denormals right.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

/// Element `i` of stored bytes, as fp32.
float value_at(const StoredTensor& tensor, const std::byte* data, int64_t i) {
  if (tensor.dtype == "F32") {
    float value;
    std::memcpy(&value, data + 4 * i, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, data + 2 * i, sizeof bits);
  return tensor.dtype == "F16" ? widen_half(bits) : std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

int64_t stored_bytes(const StoredTensor& tensor) {
  return tensor.dtype == "F32" ? 4 : 2;
}

/// Where a row's elements go: row `row` of the panel at `panel`.
class PanelRow {
 public:
  PanelRow(const Matrix& matrix, int64_t row)
      : element_(matrix.element),
        panel_(matrix.data + row / kPanelRows * panel_bytes(matrix.element, matrix.columns)),
        lane_(row % kPanelRows) {}

  /// bf16 to bf16: the bits.
  void set_bits(int64_t column, uint16_t bits) const {
    std::memcpy(panel_ + 2 * (column / 2 * 2 * kPanelRows + 2 * lane_ + column % 2), &bits, sizeof bits);
  }
  /// The same for two columns that lie side by side, of which the first is even.
  void set_pair(int64_t column, const std::byte* pair) const {
    std::memcpy(panel_ + 2 * (column * kPanelRows + 2 * lane_), pair, 2 * sizeof(uint16_t));
  }
  void set(int64_t column, float value) const {
    std::memcpy(panel_ + 4 * (column * kPanelRows + lane_), &value, sizeof value);
  }
  void take(int64_t column, const StoredTensor& tensor, const std::byte* data, int64_t i) const {
    if (element_ == Element::fp32) return set(column, value_at(tensor, data, i));
    uint16_t bits;
    std::memcpy(&bits, data + 2 * i, sizeof bits);
    set_bits(column, bits);
  }

 private:
  Element element_;
  std::byte* panel_;
  int64_t lane_;
};

/// The zeros behind an odd last column: a slot's memory held other matrices before.
void pad_rows(const Matrix& to, int64_t first, int64_t last) {
  if (to.element != Element::bf16 || to.columns % 2 == 0) return;
  for (int64_t row = first; row < last; ++row) PanelRow(to, row).set_bits(to.columns, 0);
}

/// Rows [first, last) of the matrix that are rows [from, ...) of the tensor, a panel's worth at most.
void pack_rows(TensorReader& reader, const StoredTensor& tensor, int64_t from, const Matrix& to,
               int64_t first, int64_t last) {
  const int64_t row_bytes = to.columns * stored_bytes(tensor);
  const std::byte* const stored = reader.read(tensor, from * row_bytes, (last - first) * row_bytes).data();
  // Blocks of columns, so that a panel's cache lines are written whole while they are near.
  constexpr int64_t kBlock = 32;
  for (int64_t column = 0; column < to.columns; column += kBlock) {
    const int64_t end = std::min(to.columns, column + kBlock);
    for (int64_t row = first; row < last; ++row) {
      const PanelRow at(to, row);
      const std::byte* const data = stored + (row - first) * row_bytes;
      if (to.element == Element::bf16) {
        int64_t c = column;
        for (; c + 1 < end; c += 2) at.set_pair(c, data + 2 * c);
        for (; c < end; ++c) at.take(c, tensor, data, c);
      } else {
        for (int64_t c = column; c < end; ++c) at.set(c, value_at(tensor, data, c));
      }
    }
  }
  pad_rows(to, first, last);
}

/// The same where the tensor is [columns][rows]: a column after another, as many as fit in the staging.
void pack_columns(TensorReader& reader, const StoredTensor& tensor, int64_t from, const Matrix& to,
                  int64_t first, int64_t last) {
  const int64_t stored_rows = tensor.shape[1];
  const int64_t column_bytes = stored_rows * stored_bytes(tensor);
  const int64_t some = std::max<int64_t>(1, kStagingBytes / column_bytes);
  for (int64_t column = 0; column < to.columns; column += some) {
    const int64_t count = std::min(some, to.columns - column);
    const std::byte* const stored = reader.read(tensor, column * column_bytes, count * column_bytes).data();
    for (int64_t row = first; row < last; ++row) {
      const PanelRow at(to, row);
      for (int64_t c = 0; c < count; ++c)
        at.take(column + c, tensor, stored, c * stored_rows + from + row - first);
    }
  }
  pad_rows(to, first, last);
}

}  // namespace

Element element_of(const StoredTensor& tensor) {
  if (tensor.dtype == "BF16") return Element::bf16;
  if (tensor.dtype == "F32" || tensor.dtype == "F16") return Element::fp32;
  throw ModelError(fmt::format("'{:.80}' is {}, and weights are BF16, F16 or F32; convert it first",
                               tensor.name, tensor.dtype));
}

namespace {

/// The panels in `range`, in the element in which they are stored; `to` is a view of these alone.
void pack_as_stored(TensorReader& reader, const MatrixSpec& spec, const Matrix& to, PanelRange range) {
  const int64_t begin = range.first * kPanelRows, end = std::min(spec.rows(), range.last * kPanelRows);
  int64_t part_begin = 0;
  for (const Rows& part : spec.parts) {
    const StoredTensor& tensor = *reader.folder().find(part.tensor);
    const int64_t first = std::max(begin, part_begin), last = std::min(end, part_begin + part.count);
    if (spec.stored_transposed && first < last) {
      pack_columns(reader, tensor, part.first + first - part_begin, to, first - begin, last - begin);
    } else {
      for (int64_t row = first; row < last;) {
        const int64_t next = std::min(last, round_up(row + 1, kPanelRows));
        pack_rows(reader, tensor, part.first + row - part_begin, to, row - begin, next - begin);
        row = next;
      }
    }
    part_begin += part.count;
  }
}

/// A panel as it is stored, at `from`, into one of `to`.
bool convert_panel(const MatrixSpec& spec, Element stored, const std::byte* from, const Matrix& to,
                   std::byte* panel) {
  const auto* const narrow = reinterpret_cast<const uint16_t*>(from);
  if (to.element == Element::coded) return code_panel(narrow, to.columns, panel);
  const bool finite = stored == Element::bf16
                          ? quantise_panel(narrow, to.columns, panel)
                          : quantise_panel(reinterpret_cast<const float*>(from), to.columns, panel);
  if (finite) return true;
  throw ModelError(
      fmt::format("'{:.80}' has weights that are not finite, which eight bits do not hold; load "
                  "the model with weights as they are stored",
                  spec.parts.front().tensor));
}

}  // namespace

Element element_of(const ModelFolder& folder, const MatrixSpec& spec) {
  const bool narrow = std::ranges::all_of(
      spec.parts, [&](const Rows& part) { return element_of(*folder.find(part.tensor)) == Element::bf16; });
  return narrow ? Element::bf16 : Element::fp32;
}

bool pack_panels(TensorReader& reader, const MatrixSpec& spec, const Matrix& to, PanelRange range) {
  const Element stored = element_of(reader.folder(), spec);
  const int64_t bytes = panel_bytes(stored, to.columns), rows = (range.last - range.first) * kPanelRows;
  if (to.element == stored) {
    pack_as_stored(reader, spec, {stored, rows, to.columns, to.data + range.first * bytes}, range);
    return true;
  }
  // A panel after another; all at once where a tensor is stored transposed, and each would read it whole.
  const int64_t some = spec.stored_transposed ? std::max<int64_t>(1, range.last - range.first) : 1;
  std::vector<std::byte> panels;
  for (int64_t first = range.first; first < range.last; first += some) {
    const int64_t last = std::min(range.last, first + some);
    panels.assign(static_cast<size_t>((last - first) * bytes), std::byte{0});
    const Matrix view{stored, (last - first) * kPanelRows, to.columns, panels.data()};
    pack_as_stored(reader, spec, view, {first, last});
    for (int64_t i = first; i < last; ++i) {
      if (!convert_panel(spec, stored, view.panel(i - first), to,
                         to.data + i * panel_bytes(to.element, to.columns)))
        return false;
    }
  }
  return true;
}

std::vector<float> read_vector(const ModelFolder& folder, const VectorSpec& spec) {
  std::vector<float> values;
  values.reserve(static_cast<size_t>(spec.size()));
  for (const Rows& part : spec.parts) {
    const StoredTensor& tensor = *folder.find(part.tensor);
    std::vector<std::byte> stored(static_cast<size_t>(part.count * stored_bytes(tensor)));
    folder.read(tensor, part.first * stored_bytes(tensor), stored);
    for (int64_t i = 0; i < part.count; ++i) values.push_back(value_at(tensor, stored.data(), i));
  }
  return values;
}

}  // namespace overspill::inference
