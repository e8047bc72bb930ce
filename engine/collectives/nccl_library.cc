#include "engine/collectives/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>

#include "engine/collectives/communicator.h"

namespace overspill::engine::nccl {
namespace {

constexpr int kOldest = 21400;  // the first with ncclCommInitRankConfig

std::string chosen(const std::filesystem::path& path) {
  if (!path.empty()) return path.string();
  const char* named = std::getenv("OVERSPILL_NCCL");
  return named != nullptr && *named != '\0' ? named : "libnccl.so.2";
}

std::string last_dl_error() {
  const char* error = ::dlerror();
  return error != nullptr ? error : "no reason given";
}

}  // namespace

Api load(const std::filesystem::path& path) {
  const std::string name = chosen(path);
  void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw CommunicatorError(
        fmt::format("NCCL was not found: {}; name libnccl.so.2 by OVERSPILL_NCCL (the PyPI package "
                    "nvidia-nccl-cu13 has it)",
                    last_dl_error()));
  }
  const auto take = [&]<class Function>(const char* symbol, Function*& call) {
    call = reinterpret_cast<Function*>(::dlsym(library, symbol));
    if (call == nullptr)
      throw CommunicatorError(fmt::format("{} has no {}: {}", name, symbol, last_dl_error()));
  };
  Api api;
  Result (*get_version)(int*) = nullptr;
  take("ncclGetVersion", get_version);
  get_version(&api.version);
  if (api.version < kOldest) {
    throw CommunicatorError(fmt::format("{} is NCCL {}; {} is the oldest that works", name,
                                        version_text(api.version), version_text(kOldest)));
  }
  take("ncclGetUniqueId", api.get_unique_id);
  take("ncclCommInitRankConfig", api.comm_init_rank_config);
  take("ncclCommGetAsyncError", api.comm_get_async_error);
  take("ncclCommFinalize", api.comm_finalize);
  take("ncclCommDestroy", api.comm_destroy);
  take("ncclCommAbort", api.comm_abort);
  take("ncclAllGather", api.all_gather);
  take("ncclReduceScatter", api.reduce_scatter);
  take("ncclSend", api.send);
  take("ncclRecv", api.recv);
  take("ncclGroupStart", api.group_start);
  take("ncclGroupEnd", api.group_end);
  take("ncclGetErrorString", api.get_error_string);
  take("ncclGetLastError", api.get_last_error);
  return api;
}

std::string version_text(int version) {
  // Up to 2.8 versions were counted otherwise (2.8.4 is 2804).
  const int major = version < 10'000 ? 1'000 : 10'000;
  return fmt::format("{}.{}.{}", version / major, version % major / 100, version % 100);
}

}  // namespace overspill::engine::nccl
