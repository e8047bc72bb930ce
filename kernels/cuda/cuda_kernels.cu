#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <tuple>

#include "cpu_optim/passes.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/current.h"
#include "kernels/launch.h"
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
  for (int64_t i = first_element(); i < count; i += stride()) overspill::kernels::narrow(from[i], to[i]);
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

template <class To>
__global__ void take_mean_kernel(const float* sum, float factor, To* to, int64_t count, bool first) {
  for (int64_t i = first_element(); i < count; i += stride()) take_in(sum[i] * factor, first, to[i]);
}

template <class Update>
__global__ void update_kernel(Update update, int64_t begin, int64_t end) {
  for (int64_t i = begin + first_element(); i < end; i += stride()) update(i);
}

/// A warp for each block that shares scales; each of its lanes has two elements.
template <class Update>
__global__ void update_blocks_kernel(Update update, int64_t begin, int64_t end) {
  static_assert(optim::kScaleBlock == 2 * kWarp);
  const int lane = threadIdx.x % kWarp;
  for (int64_t block = begin + first_element() / kWarp; block < end; block += stride() / kWarp) {
    const int64_t i = block * optim::kScaleBlock + lane;
    const typename Update::Element one = update.update(i), other = update.update(i + kWarp);
    typename Update::Scales largest;
    Update::raise(largest, one);
    Update::raise(largest, other);
    // Beyond this point every lane has read the scales that it decoded by.
    for (int k = 0; k < Update::kStates; ++k) {
      for (int width = kWarp / 2; width > 0; width /= 2) {
        const uint32_t theirs = __shfl_xor_sync(~0u, largest.of[k], width);
        if (theirs > largest.of[k]) largest.of[k] = theirs;
      }
    }
    const typename Update::Scales scales = Update::scales_of(largest);
    update.store(i, one, scales);
    update.store(i + kWarp, other, scales);
    if (lane == 0) update.store_scales(block, scales);
  }
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

class CudaKernels final : public DeviceKernels {
 public:
  explicit CudaKernels(int ordinal) : ordinal_(ordinal) {}

  Formats formats() const override { return all_formats(); }

  void clear(Stream& stream, void* to, int64_t bytes) override {
    const Current device(ordinal_);
    if (bytes > 0)
      check("clear", cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), native("clear", stream)));
  }

  void copy(Stream& stream, void* to, const void* from, int64_t bytes) override {
    const Current device(ordinal_);
    if (bytes > 0) {
      check("copy", cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice,
                                    native("copy", stream)));
    }
  }

  void take_in(Stream& stream, optim::Element from_type, const void* from, optim::Element to_type, void* to,
               int64_t count, bool first) override {
    check_taken_in(from_type, to_type);
    if (count == 0) return;
    const Current device(ordinal_);
    with_taken_in(from_type, from, to_type, to, [&]<class From, class To>(const From* source, To* target) {
      launch("take_in", take_in_kernel<From, To>, grid_of(count), kThreads, stream, source, target, count,
             first);
    });
  }

  void take_mean(Stream& stream, const float* sum, float factor, optim::Element to_type, void* to,
                 int64_t count, bool first) override {
    if (count == 0) return;
    const Current device(ordinal_);
    optim::with_type(to_type, [&]<class To>(To) {
      launch("take_mean", take_mean_kernel<To>, grid_of(count), kThreads, stream, sum, factor,
             static_cast<To*>(to), count, first);
    });
  }

  void squares(Stream& stream, optim::Element type, const void* from, int64_t count,
               Squares* blocks) override {
    if (count == 0) return;
    const Current device(ordinal_);
    const unsigned grid = grid_of(squares_blocks(count) * kWarp);
    optim::with_type(type, [&]<class T>(T) {
      launch("squares", squares_kernel<T>, grid, kThreads, stream, static_cast<const T*>(from), count,
             blocks);
    });
  }

  void update(Stream& stream, optim::Format format, const optim::Piece& piece, optim::Gradient gradient,
              optim::Range range, const optim::Factors& factors) override {
    const Current device(ordinal_);
    const optim::Optimizer optimizer = optim::optimizer_of(factors);
    optim::for_each_pass("update", format, piece, gradient, range, factors, [&](const optim::Pass& pass) {
      with_update(
          optimizer, format, gradient.element, pass,
          [&]<class Update>(const Update& each) {
            launch("update", update_kernel<Update>, grid_of(pass.end - pass.begin), kThreads, stream, each,
                   pass.begin, pass.end);
          },
          [&]<class Update>(const Update& each) {
            const auto [begin, end] = blocks_of(pass);
            launch("update", update_blocks_kernel<Update>, grid_of((end - begin) * kWarp), kThreads, stream,
                   each, begin, end);
          });
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
