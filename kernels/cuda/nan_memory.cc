#include "kernels/cuda/nan_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <limits>
#include <memory>

namespace overspill::kernels {
namespace {

constexpr unsigned kSince = 12000;  // the driver API's version that is asked for

/// The driver's functions, asked for at run time: the program does not link the driver.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) unreserve = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) allow = nullptr;
  bool whole = false;
};

template <class Function>
bool find(const char* name, Function& function) {
#if CUDART_VERSION >= 12050
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion(name, &found, kSince, cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  function = reinterpret_cast<Function>(found);
  return found != nullptr;
#else
  (void)name, (void)function;
  return false;
#endif
}

const Driver& driver() {
  static const Driver found = [] {
    Driver d;
    d.whole = find("cuMemGetAllocationGranularity", d.granularity) &&
              find("cuMemAddressReserve", d.reserve) && find("cuMemAddressFree", d.unreserve) &&
              find("cuMemCreate", d.create) && find("cuMemRelease", d.release) && find("cuMemMap", d.map) &&
              find("cuMemUnmap", d.unmap) && find("cuMemSetAccess", d.allow);
    return d;
  }();
  return found;
}

/// Addresses, and what of them is mapped.
class Mapping {
 public:
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping() = default;
  ~Mapping() {
    const Driver& d = driver();
    if (mapped_ > 0) d.unmap(begin_, mapped_);
    if (reserved_ > 0) d.unreserve(begin_, reserved_);
    if (has_piece_) d.release(piece_);
  }

  bool make(int ordinal, int64_t bytes) {
    const Driver& d = driver();
    if (!d.whole || cudaFree(nullptr) != cudaSuccess)
      return false;  // the latter binds the thread to its device
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = ordinal;
    size_t step = 0;
    if (d.granularity(&step, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM) != CUDA_SUCCESS || step == 0)
      return false;
    const auto size = (static_cast<size_t>(bytes) + step - 1) / step * step;
    if (d.reserve(&begin_, size, 0, 0, 0) != CUDA_SUCCESS) return false;
    reserved_ = size;
    if (d.create(&piece_, step, &properties, 0) != CUDA_SUCCESS) return false;
    has_piece_ = true;
    for (; mapped_ < size; mapped_ += step) {
      if (d.map(begin_ + mapped_, step, 0, piece_, 0) != CUDA_SUCCESS) return false;
    }
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (d.allow(begin_, size, &access, 1) != CUDA_SUCCESS) return false;
    const bool filled =
        cudaMemset(data(), 0xFF, step) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
    if (!filled) (void)cudaGetLastError();
    return filled;
  }
  void* data() const { return reinterpret_cast<void*>(begin_); }

 private:
  CUdeviceptr begin_ = 0;
  size_t reserved_ = 0;
  size_t mapped_ = 0;
  CUmemGenericAllocationHandle piece_{};
  bool has_piece_ = false;
};

}  // namespace

DeviceMemory map_nan(int ordinal, int64_t bytes) {
  if (bytes > std::numeric_limits<int64_t>::max() / 2) return {};
  auto mapping = std::make_unique<Mapping>();
  if (!mapping->make(ordinal, bytes)) return {};
  const auto release = [](void* context, void*, int64_t) noexcept { delete static_cast<Mapping*>(context); };
  void* const data = mapping->data();
  return {data, bytes, release, mapping.release()};
}

}  // namespace overspill::kernels
