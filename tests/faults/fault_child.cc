// Trains the toy model from its newest checkpoint, saves every second step, keeps three, until it is killed.
//   fault_child NVME CHECKPOINTS JOB LIFE_FD blocking|NVME2 [no-io_uring]
//   NVME2  a second path: saves go on while training does, over both
#include <fmt/format.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "engine/checkpoint/save_folder.h"
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

/// Keeps the newest three. The manifest goes first: what a kill leaves of the rest is no checkpoint.
void remove_old(std::map<int64_t, fs::path>& kept) {
  while (kept.size() > 3) {
    engine::remove_save(kept.begin()->second);
    kept.erase(kept.begin());
  }
}

/// Two steps belong to each save: they come before it, or while it goes on.
class Run {
 public:
  Run(engine::Engine& engine, fs::path checkpoints, Life& life)
      : engine_(engine),
        checkpoints_(std::move(checkpoints)),
        kept_(checkpoints_in(checkpoints_)),
        life_(life) {
    if (kept_.empty()) {
      toy_load(engine_);
    } else {
      engine_.load(kept_.rbegin()->second);
    }
  }

  [[noreturn]] void train_and_save() {
    while (true) {
      take_steps();
      begin();
      engine_.save(folder(), "{}");
      end();
    }
  }

  [[noreturn]] void save_while_training() {
    take_steps();
    while (true) {
      begin();
      engine_.save_in_background(folder(), [](const fs::path&) { return std::string("{}"); });
      take_steps();
      engine_.wait_for_save();
      end();
    }
  }

 private:
  void take_steps() {
    for (int i = 0; i < 2; ++i) {
      toy_step(engine_, static_cast<int>(engine_.stats().step), 1, 0);
      ++life_.steps;
    }
  }

  fs::path folder() const { return checkpoints_ / std::to_string(life_.saving); }

  void begin() {
    life_.saving = engine_.stats().step;
    ++life_.saves_begun;
    begun_ = std::chrono::steady_clock::now();
  }

  void end() {
    const auto took = std::chrono::steady_clock::now() - begun_;
    life_.save_us = std::chrono::duration_cast<std::chrono::microseconds>(took).count();
    kept_[life_.saving] = folder();
    life_.saving = 0;
    ++life_.saves_done;
    remove_old(kept_);
  }

  engine::Engine& engine_;
  const fs::path checkpoints_;
  std::map<int64_t, fs::path> kept_;
  Life& life_;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace
}  // namespace overspill::testing

int main(int argc, char** argv) {
  using namespace overspill::testing;
  if (argc < 6) return 2;
  const std::string_view way = argv[5];
  try {
    if (argc > 6 && std::string_view(argv[6]) == "no-io_uring" && !refuse_io_uring()) return 3;
    Life& life = *map_life(std::stoi(argv[4]));
    Rig rig{.nvme = argv[1], .placement = overspill::engine::Placement::half, .job = argv[3]};
    if (way != "blocking") rig.second_nvme = way;
    const auto engine = make_engine(rig);
    life.started = 1;
    Run run(*engine, argv[2], life);
    way == "blocking" ? run.train_and_save() : run.save_while_training();
  } catch (const std::exception& error) {
    fmt::print(stderr, "fault_child: {}\n", error.what());
    return 1;
  }
}
