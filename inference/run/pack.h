// From stored rows to panels.
#pragma once

#include "inference/format/tensor_reader.h"
#include "inference/run/weights.h"

namespace overspill::inference {

/// What a stored dtype is in memory. Throws ModelError for one that is no float of two or four bytes.
Element element_of(const StoredTensor& tensor);

/// What a matrix is in memory as it is stored: fp32 where one of its parts is.
Element element_of(const ModelFolder& folder, const MatrixSpec& spec);

/// Fills the panels in `range` of `to`, whose size and element are set, from the folder. The tensors were
/// checked against the spec. False, with panels in no defined state, where `to` is coded and they do not fit
/// (kernels/coded.h). Throws ModelError where it is int8 and a weight is not finite. Threads: any, with
/// different ranges and readers.
[[nodiscard]] bool pack_panels(TensorReader& reader, const MatrixSpec& spec, const Matrix& to,
                               PanelRange range);

/// As fp32, one part behind the other.
std::vector<float> read_vector(const ModelFolder& folder, const VectorSpec& spec);

}  // namespace overspill::inference
