// What reads matrices ahead of use: a few panels at a time, by threads that also pack them.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <vector>

#include "inference/format/tensor_reader.h"
#include "inference/model/spec.h"
#include "inference/run/matrix.h"

namespace overspill::inference {

/// A matrix that is wanted, and where its view is.
struct WantedMatrix {
  const MatrixSpec* spec;
  Matrix* to;
};

/// Of each stream. Two are enough for the disks that were measured; while some pack, the others' reads keep
/// the disk busy.
inline constexpr int kReaders = 4;

/// How many of the matrix's panels are read together: about a megabyte; all where its tensors are stored
/// transposed, since each panel would read them whole.
int64_t panels_at_once(const WantedMatrix& matrix);

/// Reads and packs panels of a matrix that is no coded one. What went wrong, if something did.
std::exception_ptr read_chunk(TensorReader& reader, const WantedMatrix& matrix, PanelRange range) noexcept;

/// What the matrices take where they lie behind each other, and what the folder has of them. Each element is
/// stored in a file that is there, so the sums overflow nothing.
int64_t memory_bytes(const std::vector<WantedMatrix>& matrices);
int64_t folder_bytes(const ModelFolder& folder, const std::vector<WantedMatrix>& matrices);

/// Gives the matrices their places, one behind the other from `data` on. Returns how many panels they have.
int64_t place_at(const std::vector<WantedMatrix>& matrices, std::byte* data);

/// Bytes that came from disk, and how long that took.
struct Reading {
  double bytes = 0;
  double seconds = 0;
};

/// Counts what is read, and the time in which something is. Threads: one at a time.
class Meter {
 public:
  void begin();
  void end(double bytes);
  int in_work() const { return in_work_; }
  Reading reading() const;

 private:
  using Clock = std::chrono::steady_clock;

  int in_work_ = 0;
  Clock::time_point busy_since_;
  Clock::duration busy_{};
  double bytes_ = 0;
};

}  // namespace overspill::inference
