// What a device computes by itself for units that live on it (docs/architecture.md): their gradients are
// added up, their squares are summed and their states are updated there. Bit-equal to cpu_optim/, a NaN's
// payload aside: what an optimizer does to one element is written once, in cpu_optim/optimizers/, and how
// formats hold it for a device in kernels/update_element.h and update_block.h.
//
// Each call is put on a stream of the device and returns at once. Memory is the device's, aligned to its
// elements; it stays, and what is read stays unchanged, until an event recorded later is done. Counts are
// elements; arrays do not overlap. Threads: as the stream. Errors: DeviceError for another device's stream
// and for what cannot be started.
#pragma once

#include <bitset>
#include <cstdint>

#include "cpu_optim/format.h"
#include "cpu_optim/update.h"
#include "kernels/device.h"

namespace overspill::kernels {

/// A set of formats, by their numbers.
using Formats = std::bitset<optim::kFormatCount>;
inline Formats all_formats() {
  return Formats().set();
}

/// A block of the tree of squares (optim::Squares); whoever wants the total adds them in order.
struct Squares {
  double sum = 0;
  int64_t not_finite = 0;  // 0: every element is finite
};
constexpr int64_t kSquaresBlock = 4096;
constexpr int64_t squares_blocks(int64_t count) {
  return (count + kSquaresBlock - 1) / kSquaresBlock;
}

class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;
  /// What update() takes, of every optimizer: units in these formats may live on the device.
  virtual Formats formats() const = 0;

  /// To zero.
  virtual void clear(Stream& stream, void* to, int64_t bytes) = 0;
  /// From one place on the device to another.
  virtual void copy(Stream& stream, void* to, const void* from, int64_t bytes) = 0;
  /// A gradient comes in: to = from where it is the first of a step, else to += from. Of the same type, or
  /// from one of 2 bytes to fp32; sums of 2 bytes are rounded to nearest even.
  virtual void take_in(Stream& stream, optim::Element from_type, const void* from, optim::Element to_type,
                       void* to, int64_t count, bool first) = 0;
  /// A sum of several ranks' gradients becomes their mean: to = sum * factor where it is the first of a step,
  /// else to += that, rounded once, to nearest even.
  virtual void take_mean(Stream& stream, const float* sum, float factor, optim::Element to_type, void* to,
                         int64_t count, bool first) = 0;
  /// Fills squares_blocks(count) blocks.
  virtual void squares(Stream& stream, optim::Element type, const void* from, int64_t count,
                       Squares* blocks) = 0;
  /// As optim::update(), of memory of the device: the list of components is read before the call returns.
  /// Throws std::invalid_argument as that does.
  virtual void update(Stream& stream, optim::Format format, const optim::Piece& piece,
                      optim::Gradient gradient, optim::Range range, const optim::Factors& factors) = 0;
};

}  // namespace overspill::kernels
