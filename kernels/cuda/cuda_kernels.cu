#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <tuple>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/current.h"
#include "kernels/math.h"

namespace overspill::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;  // lanes of the tree, too
constexpr int64_t kBlocksMost = 4096;

/// Threads take every n-th element, so any count fits any grid.
__device__ int64_t first_element() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ int64_t stride() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x;
}

__global__ void narrow_kernel(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = first_element(); i < count; i += stride()) to[i] = overspill::kernels::narrow(from[i]);
}

__global__ void scale_kernel(float* to, float factor, int64_t count) {
  for (int64_t i = first_element(); i < count; i += stride()) to[i] = to[i] * factor;
}

/// A warp for each block of the tree.
template <class T>
__global__ void squares_kernel(const T* from, int64_t count, Squares* blocks) {
  const int lane = threadIdx.x % kWarp;
  const int64_t warps = stride() / kWarp;
  for (int64_t block = first_element() / kWarp; block * kSquaresBlock < count; block += warps) {
    const int64_t begin = block * kSquaresBlock;
    const int64_t end = begin + kSquaresBlock < count ? begin + kSquaresBlock : count;
    SquaresLane own;
    for (int64_t i = begin + lane; i < end; i += kWarp) own.add(widen(from[i]));
    for (int width = kWarp / 2; width > 0; width /= 2) own.sum += __shfl_down_sync(~0u, own.sum, width);
    const bool finite = __all_sync(~0u, own.finite) != 0;
    if (lane == 0) blocks[block] = Squares{own.sum, finite ? 0 : 1};
  }
}

template <class From, class To>
__global__ void take_in_kernel(const From* from, To* to, int64_t count, bool first) {
  for (int64_t i = first_element(); i < count; i += stride()) take_in(from[i], first, to[i]);
}

template <class T>
__global__ void adam_kernel(AdamArrays arrays, const T* gradient, int64_t count, AdamFactors factors) {
  auto* const weight = static_cast<float*>(arrays.weight);
  for (int64_t i = first_element(); i < count; i += stride())
    update_adam(factors, widen(gradient[i]), weight[i], arrays.m[i], arrays.v[i]);
}

template <class T>
__global__ void split_adam_kernel(AdamArrays arrays, const T* gradient, int64_t count, AdamFactors factors) {
  auto* const hi = static_cast<uint16_t*>(arrays.weight);
  for (int64_t i = first_element(); i < count; i += stride())
    update_adam(factors, widen(gradient[i]), hi[i], arrays.lo[i], arrays.m[i], arrays.v[i]);
}

unsigned grid_of(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kBlocksMost ? blocks : kBlocksMost);
}

cudaStream_t native(const char* name, Stream& stream) {
  if (stream.native() == nullptr) throw DeviceError(std::string(name) + ": not a CUDA stream");
  return static_cast<cudaStream_t>(stream.native());
}

void check(const char* name, cudaError_t error) {
  if (error != cudaSuccess)
    throw DeviceError(std::string("cuda: the kernel ") + name + ": " + cudaGetErrorString(error));
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), unsigned grid, unsigned threads, Stream& stream,
            Arguments... arguments) {
  std::tuple<Parameters...> values(arguments...);
  std::apply(
      [&](auto&... each) {
        void* pointers[] = {&each...};
        // Its own answer: cudaGetLastError() would give that of any earlier call.
        check(name, cudaLaunchKernel(kernel, dim3(grid), dim3(threads), pointers, 0, native(name, stream)));
      },
      values);
}

/// Calls `use` with the memory as what its elements are.
template <class Use>
void with_type(Float type, const void* data, Use use) {
  if (type == Float::bf16) return use(static_cast<const uint16_t*>(data));
  use(static_cast<const float*>(data));
}

class CudaKernels final : public DeviceKernels {
 public:
  explicit CudaKernels(int ordinal) : ordinal_(ordinal) {}

  void clear(Stream& stream, void* to, int64_t bytes) override {
    const Current device(ordinal_);
    if (bytes > 0)
      check("clear", cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), native("clear", stream)));
  }

  void take_in(Stream& stream, Float from_type, const void* from, Float to_type, void* to, int64_t count,
               bool first) override {
    if (from_type == Float::fp32 && to_type == Float::bf16)
      throw DeviceError("take_in: an fp32 gradient does not go into a bf16 one");
    if (count == 0) return;
    const Current device(ordinal_);
    with_type(from_type, from, [&]<class From>(const From* source) {
      if (to_type == Float::fp32) {
        launch("take_in", take_in_kernel<From, float>, grid_of(count), kThreads, stream, source,
               static_cast<float*>(to), count, first);
      } else if constexpr (sizeof(From) == 2) {
        launch("take_in", take_in_kernel<From, uint16_t>, grid_of(count), kThreads, stream, source,
               static_cast<uint16_t*>(to), count, first);
      }
    });
  }

  void squares(Stream& stream, Float type, const void* from, int64_t count, Squares* blocks) override {
    if (count == 0) return;
    const Current device(ordinal_);
    const unsigned grid = grid_of(squares_blocks(count) * kWarp);
    with_type(type, from, [&]<class T>(const T* source) {
      launch("squares", squares_kernel<T>, grid, kThreads, stream, source, count, blocks);
    });
  }

  void update_adam(Stream& stream, const AdamArrays& arrays, Float gradient_type, const void* gradient,
                   int64_t count, const AdamFactors& factors) override {
    if (count == 0) return;
    const Current device(ordinal_);
    with_type(gradient_type, gradient, [&]<class T>(const T* given) {
      const auto kernel = arrays.lo != nullptr ? split_adam_kernel<T> : adam_kernel<T>;
      launch("update_adam", kernel, grid_of(count), kThreads, stream, arrays, given, count, factors);
    });
  }

 private:
  const int ordinal_;
};

}  // namespace

std::unique_ptr<DeviceKernels> make_kernels(int ordinal) {
  return std::make_unique<CudaKernels>(ordinal);
}

void narrow(Stream& stream, const float* from, uint16_t* to, int64_t count) {
  if (count > 0) launch("narrow", narrow_kernel, grid_of(count), kThreads, stream, from, to, count);
}

void scale(Stream& stream, float* to, float factor, int64_t count) {
  if (count > 0) launch("scale", scale_kernel, grid_of(count), kThreads, stream, to, factor, count);
}

}  // namespace overspill::kernels::cuda
