// Products of coded panels (kernels/coded.h). A few columns at a time are decoded to bf16 in a buffer that the
// first cache holds, patched there, and multiplied from there: what is multiplied, and in which order, is that of
// a panel of bf16, and so are the bits of the result.

// For few vectors the part in the buffer is small, so that there is not much work between the prefetches of two
// parts. For many it is large, since the sums of all of them are loaded and stored for each part.
constexpr int64_t kDecodedColumns = 32, kDecodedColumnsMany = 256;
constexpr int64_t kCodedPrefetchBytes = 8192;

inline void decode_half_pair(Bytes low, Bytes codes, Bytes table, uint16_t* to) {
  const Bytes high = lookup(table, codes);
  store_bytes(to, zip_lower(low, high));
  store_bytes(to + 32, zip_upper(low, high));
}

inline void decode_pair(const uint8_t* unit, Bytes table, uint16_t* to) {
  for (int64_t i = 0; i < 64; i += static_cast<int64_t>(sizeof(Bytes))) {
    const Bytes codes = load_bytes(unit + 128 + i);
    decode_half_pair(load_bytes(unit + i), codes & 15, table, to + i / 2);
    decode_half_pair(load_bytes(unit + 64 + i), codes >> 4, table, to + 64 + i / 2);
  }
}

/// A panel that is decoded from its first column on.
class CodedPanel {
 public:
  CodedPanel(const std::byte* panel, int64_t columns)
      : table_(repeat_16(reinterpret_cast<const uint8_t*>(panel))),
        unit_(reinterpret_cast<const uint8_t*>(panel) + kCodedTableBytes),
        patches_(reinterpret_cast<const uint8_t*>(panel) + coded_patches_at(columns)) {}

  /// The next `columns` of them, as a panel of bf16.
  __attribute__((always_inline)) inline void decode(int64_t columns, uint16_t* to) {
    for (int64_t c = 0; c < columns; c += 2, unit_ += kCodedPairBytes) {
      for (int64_t line = 0; line < kCodedPairBytes; line += 64)
        __builtin_prefetch(unit_ + kCodedPrefetchBytes + line);
      decode_pair(unit_, table_, to + c * kPanelRows);
    }
    patch(columns * kPanelRows, to);
  }

 private:
  inline void patch(int64_t count, uint16_t* to) {
    for (;; patches_ += sizeof(uint32_t)) {
      uint32_t patch;
      __builtin_memcpy(&patch, patches_, sizeof(patch));
      const int64_t element = (patch >> 8) - decoded_;
      if (element >= count) break;
      to[element] = static_cast<uint16_t>((to[element] & 0xFFu) | (patch & 0xFFu) << 8);
    }
    decoded_ += count;
  }

  Bytes table_;
  const uint8_t* unit_;
  const uint8_t* patches_;
  int64_t decoded_ = 0;  // elements
};

/// The sums stay in registers, and the number of columns of a part is a constant, but for the last.
inline void multiply_coded_one(CodedPanel coded, const uint16_t* x, int64_t columns, float* out) {
  constexpr int kWidth = kPanelRows / kLanes;
  alignas(64) uint16_t decoded[kPanelRows * kDecodedColumns];
  F32 sums[1][kWidth] = {};
  int64_t c = 0;
  for (; c + kDecodedColumns <= columns; c += kDecodedColumns) {
    coded.decode(kDecodedColumns, decoded);
    accumulate<1, kWidth, Pairs, 0>(decoded, x + c, 0, kDecodedColumns, sums);
  }
  coded.decode(columns - c, decoded);
  accumulate<1, kWidth, Pairs, 0>(decoded, x + c, 0, columns - c, sums);
  for (int i = 0; i < kWidth; ++i) store(out + i * kLanes, sums[0][i], All{});
}

void multiply_coded(const std::byte* panel, const uint16_t* x, int64_t x_stride, int64_t columns, float* out,
                    int64_t out_stride, int64_t vectors) {
  CodedPanel coded(panel, columns);
  if (vectors == 1) return multiply_coded_one(coded, x, columns, out);
  alignas(64) uint16_t decoded[kPanelRows * kDecodedColumnsMany];
  set_to_zero(out, out_stride, vectors);
  const int64_t some = vectors > kTileVectors ? kDecodedColumnsMany : kDecodedColumns;
  for (int64_t c = 0; c < columns; c += some) {
    const int64_t n = columns - c < some ? columns - c : some;
    coded.decode(n, decoded);
    multiply<Pairs, Continued>(decoded, x + c, x_stride, n, out, out_stride, vectors);
  }
}
