// Trains the toy model from its newest checkpoint, saves after every second step, keeps three, until it is
// killed.   fault_child NVME CHECKPOINTS JOB LIFE_FD [no-io_uring]
#include <fmt/format.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <charconv>
#include <map>
#include <string_view>
#include <system_error>

#include "tests/faults/life.h"
#include "tests/faults/scene.h"

namespace overspill::testing {
namespace {

bool refuse_io_uring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(EPERM)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/// Complete ones, by step.
std::map<int64_t, fs::path> checkpoints_in(const fs::path& folder) {
  std::map<int64_t, fs::path> found;
  for (const std::string& name : names_in(folder)) {
    int64_t step = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
    if (error == std::errc() && end == name.data() + name.size()) found[step] = folder / name;
  }
  return found;
}

int train(const fs::path& nvme, const fs::path& checkpoints, const std::string& job, Life& life) {
  const auto engine = make_engine({.nvme = nvme, .placement = engine::Placement::half, .job = job});
  life.started = 1;
  std::map<int64_t, fs::path> kept = checkpoints_in(checkpoints);
  if (kept.empty()) {
    toy_load(*engine);
  } else {
    engine->load(kept.rbegin()->second);
  }
  while (true) {
    toy_step(*engine, static_cast<int>(engine->stats().step), 1, 0);
    ++life.steps;
    const int64_t step = engine->stats().step;
    if (step % 2 != 0) continue;
    ++life.saves_begun;
    engine->save(checkpoints / std::to_string(step), "{}");
    ++life.saves_done;
    kept[step] = checkpoints / std::to_string(step);
    while (kept.size() > 3) {
      // The manifest first: what a kill leaves of the rest is no checkpoint.
      fs::remove(kept.begin()->second / engine::kManifestFile);
      fs::remove_all(kept.begin()->second);
      kept.erase(kept.begin());
    }
  }
}

}  // namespace
}  // namespace overspill::testing

int main(int argc, char** argv) {
  using namespace overspill::testing;
  if (argc < 5) return 2;
  try {
    if (argc > 5 && std::string_view(argv[5]) == "no-io_uring" && !refuse_io_uring()) return 3;
    return train(argv[1], argv[2], argv[3], *map_life(std::stoi(argv[4])));
  } catch (const std::exception& error) {
    fmt::print(stderr, "fault_child: {}\n", error.what());
    return 1;
  }
}
