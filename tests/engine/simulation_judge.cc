#include "tests/engine/simulation_judge.h"

#include <fmt/format.h>

#include <cstring>
#include <vector>

#include "engine/base/engine_failed.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {

namespace {

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

void check_weights(const engine::Engine& engine, const engine::Lease& lease, int unit,
                   const ToyReference& reference, int step) {
  const auto& segments = engine.layout().units[unit].segments;
  for (int s = 0; s < static_cast<int>(segments.size()); ++s) {
    require(same_bits(toy_leased(engine, lease, unit, s), reference.seen(unit, s)),
            fmt::format("forward sees wrong weights: {} in step {}", segments[s].name, step));
  }
}

void check_gradients(engine::Engine& engine, const ToyReference& reference, int step, int micro_batches,
                     const ToyReference::Absent& absent) {
  for (int u = 0; u < static_cast<int>(engine.layout().units.size()); ++u) {
    const engine::Unit& unit = engine.layout().units[u];
    for (int s = 0; unit.trainable() && s < static_cast<int>(unit.segments.size()); ++s) {
      require(engine.has_gradient(u, s) != absent(u, s, 0), "a gradient is there, or is not");
      if (absent(u, s, 0)) continue;
      std::vector<float> got(static_cast<size_t>(unit.segments[s].elements));
      engine.read_state(u, s, "grad", got);
      const auto expected =
          reference.gradient(u, s, step, micro_batches, [](int, int, int) { return false; });
      require(same_bits(got, expected), fmt::format("a gradient differs: {}", unit.segments[s].name));
    }
  }
}

void check_contents(engine::Engine& engine, const ToyReference& reference, const char* when) {
  require(same_bits(toy_contents(engine), reference.contents()),
          fmt::format("weights or moments differ from the reference {}", when));
}

int64_t serious(const io::FaultCounts& f) {
  return f.read_errors + f.write_errors + f.bit_flips + f.bit_flips_at_rest + f.lost_writes +
         f.misdirected_writes + f.misdirected_reads + f.dropped + f.torn;
}

void check_place_and_kind(const io::Error& error, const SimulationSetup& setup) {
  require(error.path == "memory" && error.length_bytes > 0,
          fmt::format("an error names no place: {}", error.message()));
  const bool expected = setup.trouble == Trouble::errors
                            ? error.kind == io::kind_of_errno(setup.faults.read_errno) ||
                                  error.kind == io::kind_of_errno(setup.faults.write_errno)
                            : error.kind == io::ErrorKind::corrupt;
  require(expected, fmt::format("an error of another kind than its fault: {}", error.message()));
}

void check_told(const std::string& what, const std::filesystem::path& last_saved) {
  for (const char* part : {"store: ", " failed: ", "memory at offset ", " bytes"}) {
    require(what.find(part) != std::string::npos, fmt::format("'{}' is missing in: {}", part, what));
  }
  const std::string last = last_saved.empty() ? "No checkpoint was saved in this run"
                                              : "The last complete checkpoint is " + last_saved.string();
  require(what.find(last) != std::string::npos, fmt::format("'{}' is missing in: {}", last, what));
}

void check_refuses(engine::Engine& engine, const SimulationSetup& setup,
                   const std::filesystem::path& folder) {
  const auto refuses = [](const char* what, auto try_it) {
    try {
      try_it();
    } catch (const engine::EngineFailed&) {
      return;
    }
    throw Violation(fmt::format("a failed engine still does {}", what));
  };
  refuses("acquire", [&] { engine.acquire(0); });
  refuses("begin_pass", [&] { engine.begin_pass({true, true}); });
  refuses("step", [&] { engine.step(toy_groups(0, setup.units[0].optimizer)); });
  refuses("save", [&] { engine.save(folder, "{}"); });
  refuses("read", [&] { toy_contents(engine); });
}

}  // namespace overspill::testing
