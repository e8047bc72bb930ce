// CUDA calls mean the calling thread's device.
#pragma once

#include <cuda_runtime_api.h>

namespace overspill::kernels {

/// The calling thread's device while this lives; then the one before, which may be the framework's.
class Current {
 public:
  explicit Current(int ordinal) : ordinal_(ordinal) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = ordinal;
    if (before_ != ordinal_) cudaSetDevice(ordinal_);  // a fault shows in the call that follows
  }
  ~Current() {
    if (before_ != ordinal_) cudaSetDevice(before_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const int ordinal_;
  int before_ = 0;
};

}  // namespace overspill::kernels
