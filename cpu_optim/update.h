// The update over memory: one fused pass that unscales, clips, decays, updates states and weight, and writes
// the weight in its format. Each byte is read once and written once.
//
// Results are bit-equal on every instruction set and for every way of cutting the work: explicit fused
// multiply-adds, correctly rounded division and square root, the same order everywhere, denormals kept (a
// NaN's payload aside). docs/update.md has the formulas and the bits. Pointers need the alignment of their
// element only. Arrays must not overlap. Memory belongs to the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu_optim/format.h"
#include "cpu_optim/optimizer.h"

namespace overspill::optim {

class Executor;  // executor.h
class Nodes;     // numa.h

/// A contiguous piece of a unit (or of a tensor) in memory.
struct Piece {
  std::span<std::byte* const> components;  // in the order of components(); each has bytes(elements)
  int64_t elements = 0;
  int64_t index = 0;  // of the first element in its unit; a multiple of kScaleBlock in Format::eight_bit
  uint64_t seed = 0;  // of the unit's stochastic rounding
};

/// Which elements of a piece: begin <= i < end.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
};

struct Gradient {
  const void* data = nullptr;  // of the piece's first element
  Element element = Element::fp32;
};

/// Updates the range. Nothing outside it is written, except in Format::eight_bit the codes of states whose
/// block the range shares: they are coded again if the block's scale has changed. Throws
/// std::invalid_argument before anything is written. Threads: one caller a piece at a time.
void update(Format format, const Piece& piece, Gradient gradient, Range range, const Factors& factors);

/// The same for a whole piece of any size, on the executor's workers, each of them first with what lies on
/// its NUMA node; returns when it is done. Must not be called from a worker.
void parallel_update(Executor& executor, Format format, const Piece& piece, Gradient gradient,
                     const Factors& factors, const Nodes& nodes);
/// The same on the NUMA nodes of this machine.
void parallel_update(Executor& executor, Format format, const Piece& piece, Gradient gradient,
                     const Factors& factors);

/// Between the piece's range and fp32 values, for start, checkpoints and a change of format. Weights are
/// stored exactly in fp32, exact, fp16 and compact, to 24 bits (nearest, half up) in 8 bits. `values` has as
/// many elements as the range. States are rounded to nearest even (bf16) or to the nearest code (8 bits,
/// whose ranges must start at a multiple of kScaleBlock and end at one or at the piece's end); what
/// load_state gave is stored exactly. `state` counts the optimizer's states from 0. Throw
/// std::invalid_argument.
void load_weights(Optimizer optimizer, Format format, const Piece& piece, Range range,
                  std::span<float> values);
void store_weights(Optimizer optimizer, Format format, const Piece& piece, Range range,
                   std::span<const float> values);
void load_state(Optimizer optimizer, Format format, const Piece& piece, Range range, int state,
                std::span<float> values);
void store_state(Optimizer optimizer, Format format, const Piece& piece, Range range, int state,
                 std::span<const float> values);

/// States before the first update: what the optimizer starts with, zero for most. Memory that is all zero
/// holds states of zero in every format.
void initialize_states(const Hyper& hyper, Format format, const Piece& piece);

}  // namespace overspill::optim
