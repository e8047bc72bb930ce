// What a seed of the simulation draws before it runs.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "engine/resources.h"
#include "io/memory_store.h"

namespace overspill::testing {

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  int64_t below(int64_t end) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(end)); }
  bool chance(double probability) { return static_cast<double>(random_() >> 11) * 0x1p-53 < probability; }
  uint64_t seed() { return random_(); }
  template <class T, size_t n>
  T one_of(const T (&choices)[n]) {
    return choices[below(n)];
  }

 private:
  std::mt19937_64 random_;
};

/// What goes wrong in this run, beyond delays, reordering, short and interrupted transfers, and errors that
/// pass, which must never be noticed.
enum class Trouble : uint8_t {
  none,
  errors,  // reads and writes fail with an errno
  spoilt,  // bits flip; writes and reads are lost or misdirected
  files,   // the files of checkpoints cannot be written
  cut,     // the store's disk forgets what was not synced
};

struct SimulationSetup {
  std::vector<engine::UnitSpec> units;
  engine::Config config;
  Trouble trouble = Trouble::none;
  io::Faults faults;
  int64_t store_bytes = 0;
  int threads = 1;
  int64_t task_us_max = 0;
  int steps_least = 3;
  double evaluates = 0, reorders = 0, saves = 0, looks = 0;  // per step
  int file_errno = 0;

  std::string text(uint64_t seed) const;
};

/// `quiet`: Trouble::none.
SimulationSetup draw_setup(Draw& draw, bool quiet, const std::string& nvme_folder);

}  // namespace overspill::testing
