// What Overspill uses of NCCL, found at run time: nothing needs its header or library to build, and a program
// runs without them. Names and values are those of nccl.h (github.com/NVIDIA/nccl).
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace overspill::engine::nccl {

struct OpaqueComm;
using Comm = OpaqueComm*;
using CudaStream = void*;  // a cudaStream_t

enum class Result : int { success = 0, system_error = 2, invalid_argument = 4, in_progress = 7 };
enum class DataType : int { int8 = 0, float16 = 6, float32 = 7, bfloat16 = 9 };
enum class Reduction : int { sum = 0 };

struct UniqueId {
  char internal[128];
};

/// ncclConfig_t of version 2.14, its first. Later ones read from it what it has, by `size` and `version`.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;  // calls return Result::in_progress and are then asked after, so that none hangs for good
};

/// The calls, all of one library.
struct Api {
  int version = 0;  // 22703 is 2.27.3

  Result (*get_unique_id)(UniqueId* id) = nullptr;
  Result (*comm_init_rank_config)(Comm* comm, int ranks, UniqueId id, int rank, Config* config) = nullptr;
  Result (*comm_get_async_error)(Comm comm, Result* state) = nullptr;
  Result (*comm_finalize)(Comm comm) = nullptr;
  Result (*comm_destroy)(Comm comm) = nullptr;
  Result (*comm_abort)(Comm comm) = nullptr;
  Result (*all_gather)(const void* send, void* receive, size_t send_count, DataType type, Comm comm,
                       CudaStream stream) = nullptr;
  Result (*reduce_scatter)(const void* send, void* receive, size_t receive_count, DataType type,
                           Reduction reduction, Comm comm, CudaStream stream) = nullptr;
  Result (*send)(const void* data, size_t count, DataType type, int peer, Comm comm,
                 CudaStream stream) = nullptr;
  Result (*recv)(void* data, size_t count, DataType type, int peer, Comm comm, CudaStream stream) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;
  const char* (*get_error_string)(Result result) = nullptr;
  const char* (*get_last_error)(Comm comm) = nullptr;
};

/// Opens `path`; where that is empty, what the environment variable OVERSPILL_NCCL names; where that is
/// empty, libnccl.so.2 as the loader finds it (the PyPI package nvidia-nccl-cu13 has it in nvidia/nccl/lib).
/// Throws CommunicatorError: not found, older than 2.14, or a call is missing. It stays loaded: NCCL has
/// threads.
Api load(const std::filesystem::path& path);

/// "2.27.3"
std::string version_text(int version);

}  // namespace overspill::engine::nccl
