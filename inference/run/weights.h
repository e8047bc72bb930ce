// The weights of a model in memory: matrices in panels (kernels/panel.h), vectors in fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "inference/format/model_folder.h"
#include "inference/kernels/panel.h"
#include "inference/model/spec.h"
#include "inference/run/team.h"
#include "kernels/host_pages.h"

namespace overspill::inference {

/// A view; `panels_of(rows)` panels lie one behind the other.
struct Matrix {
  Element element = Element::bf16;
  int64_t rows = 0;
  int64_t columns = 0;
  std::byte* data = nullptr;

  int64_t panels() const { return panels_of(rows); }
  int64_t bytes() const { return panels() * panel_bytes(element, columns); }
  const std::byte* panel(int64_t i) const { return data + i * panel_bytes(element, columns); }
  /// Row `row`, as fp32. `to` has `columns` elements.
  void copy_row(int64_t row, float* to) const;
};

struct NormWeights {
  std::vector<float> weight;
  std::vector<float> bias;  // empty: there is none
};

struct DenseWeights {
  std::optional<Matrix> gate;
  Matrix up;
  std::vector<float> up_bias;
  Matrix down;
  std::vector<float> down_bias;
};

struct MixtureWeights {
  Matrix router;
  std::vector<DenseWeights> experts;
};

struct LayerWeights {
  NormWeights attention_norm;
  Matrix qkv;
  std::vector<float> qkv_bias;
  NormWeights query_norm, key_norm;
  Matrix out;
  std::vector<float> out_bias;
  NormWeights after_attention;
  NormWeights feed_forward_norm;
  std::variant<DenseWeights, MixtureWeights> feed_forward;
  NormWeights after_feed_forward;
};

struct Weights {
  Matrix embedding;
  Matrix head;  // of a tied model: the same bytes as `embedding`
  std::optional<Matrix> positions;
  std::vector<LayerWeights> layers;
  NormWeights final_norm;

  kernels::HostPages memory;  // of the matrices
  bool has_fp32 = false;      // a matrix that is not bf16
};

/// Reads a model's weights. A bf16 tensor stays bf16; fp16 and fp32 become fp32, as does a matrix whose parts
/// differ. Each thread packs, and so touches first, the panels that it multiplies by later (own_panels).
/// Throws ModelError for a tensor that is missing, of another shape or of a dtype that is no float of two or
/// four bytes, and for one that the spec does not use; std::bad_alloc.
Weights load_weights(const ModelFolder& folder, const ModelSpec& spec, Team& team);

/// The panels that are one thread's: [first, last).
struct PanelRange {
  int64_t first, last;
};
inline PanelRange own_panels(int64_t panels, int thread, int threads) {
  return {panels * thread / threads, panels * (thread + 1) / threads};
}

}  // namespace overspill::inference
