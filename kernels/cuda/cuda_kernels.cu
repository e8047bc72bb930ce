#include <cuda_runtime.h>

#include <string>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/math.h"

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
  for (int64_t i = first_element(); i < count; i += stride()) to[i] = narrow(from[i]);
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

/// In order, so by one thread: a chunk has a few hundred blocks.
__global__ void total_kernel(const Squares* blocks, int64_t count, Squares* total) {
  Squares all;
  for (int64_t i = 0; i < count; ++i) {
    all.sum += blocks[i].sum;
    all.not_finite |= blocks[i].not_finite;
  }
  *total = all;
}

template <class T>
__global__ void adam_kernel(AdamArrays arrays, const T* gradient, int64_t count, AdamFactors factors) {
  for (int64_t i = first_element(); i < count; i += stride())
    update_adam(factors, widen(gradient[i]), arrays.hi[i], arrays.lo[i], arrays.m[i], arrays.v[i]);
}

unsigned grid_of(int64_t threads) {
  const int64_t blocks = (threads + kThreads - 1) / kThreads;
  return static_cast<unsigned>(blocks < kBlocksMost ? blocks : kBlocksMost);
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), unsigned grid, unsigned threads, Stream& stream,
            Arguments... arguments) {
  if (stream.native() == nullptr) throw DeviceError(std::string(name) + ": not a CUDA stream");
  kernel<<<grid, threads, 0, static_cast<cudaStream_t>(stream.native())>>>(arguments...);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
    throw DeviceError(std::string("cuda: the kernel ") + name + ": " + cudaGetErrorString(error));
}

template <class T>
void squares_of(Stream& stream, const T* from, int64_t count, Squares* blocks, Squares* total) {
  const int64_t n = squares_blocks(count);
  if (n > 0) launch("squares", squares_kernel<T>, grid_of(n * kWarp), kThreads, stream, from, count, blocks);
  launch("squares", total_kernel, 1, 1, stream, blocks, n, total);
}

template <class T>
void adam_of(Stream& stream, const AdamArrays& arrays, const T* gradient, int64_t count,
             const AdamFactors& factors) {
  if (count > 0)
    launch("update_adam", adam_kernel<T>, grid_of(count), kThreads, stream, arrays, gradient, count, factors);
}

}  // namespace

void narrow(Stream& stream, const float* from, uint16_t* to, int64_t count) {
  if (count > 0) launch("narrow", narrow_kernel, grid_of(count), kThreads, stream, from, to, count);
}

void scale(Stream& stream, float* to, float factor, int64_t count) {
  if (count > 0) launch("scale", scale_kernel, grid_of(count), kThreads, stream, to, factor, count);
}

void squares(Stream& stream, const float* from, int64_t count, Squares* blocks, Squares* total) {
  squares_of(stream, from, count, blocks, total);
}
void squares(Stream& stream, const uint16_t* bf16, int64_t count, Squares* blocks, Squares* total) {
  squares_of(stream, bf16, count, blocks, total);
}

void update_adam(Stream& stream, const AdamArrays& arrays, const float* gradient, int64_t count,
                 const AdamFactors& factors) {
  adam_of(stream, arrays, gradient, count, factors);
}
void update_adam(Stream& stream, const AdamArrays& arrays, const uint16_t* gradient, int64_t count,
                 const AdamFactors& factors) {
  adam_of(stream, arrays, gradient, count, factors);
}

}  // namespace overspill::kernels::cuda
