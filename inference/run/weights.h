// The weights of a model in memory: matrices in panels (kernels/panel.h), vectors in fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "inference/format/model_folder.h"
#include "inference/model/spec.h"
#include "inference/run/experts.h"
#include "inference/run/matrix.h"
#include "inference/run/model_options.h"
#include "inference/run/stream.h"
#include "inference/run/team.h"
#include "kernels/host_pages.h"

namespace overspill::inference {

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

  kernels::HostPages memory;             // of the matrices that stay
  std::unique_ptr<LayerStream> stream;   // of those that do not; null where all stay
  std::unique_ptr<ExpertStore> experts;  // of mixtures; null where all experts stay
  bool has_fp32 = false;                 // a matrix that is not bf16
};

/// Reads a model's weights. A bf16 tensor stays bf16; fp16 and fp32 become fp32, as does a matrix whose parts
/// differ. Each thread packs, and so touches first, the panels that it multiplies by later (own_panels).
/// coded: matrices stored as bf16, where they fit and stay; those that a stream reads are bf16. int8: all but
/// the routers of experts and the table of positions.
/// At most bytes_max(whether a matrix is fp32) of memory hold matrices; it is asked when the sizes in
/// config.json were found to be those of the tensors. Where they take more, a mixture's experts are
/// read as they are asked for, and as many are kept as fit beside all else. Where all else does not fit
/// either, as many parts of layers stay as fit beside two slots for the others, which are read for each pass.
/// Throws ModelError for a tensor that is missing, of another shape or of a dtype that is no float of two or
/// four bytes, for one that the spec does not use, and for one that int8 cannot hold; NoRoom where bytes_max
/// does not hold the least; std::bad_alloc. The folder outlives the weights.
Weights load_weights(const ModelFolder& folder, const ModelSpec& spec, Team& team,
                     WeightFormat format = WeightFormat::as_stored,
                     const std::function<int64_t(bool)>& bytes_max = nullptr);

}  // namespace overspill::inference
