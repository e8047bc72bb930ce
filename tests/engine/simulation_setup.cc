#include "tests/engine/simulation_setup.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "engine/memory/budget.h"
#include "tests/engine/toy_model.h"

namespace overspill::testing {
namespace {

using engine::Placement;
using optim::Format;

constexpr int kErrnos[] = {EIO,   ENOSPC, EDQUOT, EFBIG,  EROFS, EACCES,     EPERM,  ENODEV,
                           ENXIO, ESTALE, ENOENT, EINVAL, EBADF, EOPNOTSUPP, ENOSYS, ENOMEM};
constexpr int kFileErrnos[] = {EIO, ENOSPC, EDQUOT, EFBIG, EROFS, EACCES};

std::vector<engine::UnitSpec> draw_model(Draw& draw) {
  std::vector<engine::UnitSpec> units;
  const int64_t count = 2 + draw.below(5);
  const bool wide = draw.chance(0.03);
  for (int64_t u = 0; u < count; ++u) {
    engine::UnitSpec unit;
    unit.name = fmt::format("unit{}", u);
    const int64_t kind = draw.below(10);
    unit.format = kind < 6 ? Format::exact : Format::fp32;
    if (kind == 9 && u > 0) unit.format = engine::kFrozen;
    unit.dtype = unit.format == Format::exact ? "BF16" : "F32";
    const int64_t segments = 1 + draw.below(3);
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t elements = draw.chance(0.3) ? 1 + draw.below(9) : 1 + draw.below(1800);
      std::vector<int64_t> shape = {elements};
      if (draw.chance(0.5)) shape.insert(shape.begin(), 1 + draw.below(2));
      if (wide && u == 0 && s == 0) shape = {3, 20000};  // several pieces a transfer
      std::vector<std::string> tied;
      if (draw.chance(0.1)) tied.push_back(fmt::format("tied{}.{}", u, s));
      unit.segments.push_back({fmt::format("unit{}.{}", u, s), shape, draw.below(kToyGroups), tied});
    }
    units.push_back(unit);
  }
  return units;
}

/// How the units are kept: half of the models by Adam in exact and fp32, the others by any optimizer, each
/// unit in any format. From a copy of `draw`, so that what comes after is drawn as it was.
void draw_kinds(const Draw& draw, SimulationSetup& setup) {
  Draw copy = draw;
  Draw kinds(copy.seed() ^ 0x6b696e64);
  if (kinds.chance(0.5)) return;
  const optim::Optimizer optimizer{static_cast<uint8_t>(kinds.below(optim::kOptimizerCount))};
  setup.config.rounding_seed = kinds.seed();
  for (engine::UnitSpec& unit : setup.units) {
    unit.optimizer = optimizer;
    if (!unit.format) continue;
    unit.format = Format{static_cast<uint8_t>(kinds.below(optim::kFormatCount))};
    unit.dtype = engine::weights_dtype(unit.format);
  }
}

void draw_budget(Draw& draw, SimulationSetup& setup) {
  engine::Config& config = setup.config;
  const auto plan = [&] {
    return engine::make_plan(engine::make_layout(setup.units, config.chunk_elements, 0, 1), config, {true});
  };
  config.host_budget_bytes = int64_t{1} << 40;
  const engine::Plan roomy = plan();
  if (config.placement == Placement::automatic) {
    config.host_budget_bytes = roomy.host_bytes() * (60 + draw.below(41)) / 100;
  } else {
    // Fewer slots in the ring, and with the fewest a smaller arena.
    config.host_budget_bytes = roomy.host_bytes() - draw.below(roomy.ring_slots + 1) * roomy.ring_slot_bytes;
  }
  try {
    setup.store_bytes = 8 * std::max<int64_t>(plan().nvme_reserve_bytes, 1 << 16);
  } catch (const engine::BudgetError&) {
    config.host_budget_bytes = roomy.host_bytes();
    config.placement = config.placement == Placement::automatic ? Placement::host : config.placement;
    setup.store_bytes = 8 * std::max<int64_t>(plan().nvme_reserve_bytes, 1 << 16);
  }
}

void draw_harmless_faults(Draw& draw, io::Faults& faults) {
  if (draw.chance(0.8)) faults.delay_max = std::chrono::microseconds(1 + draw.below(2000));
  if (draw.chance(0.2)) faults.delay_min = faults.delay_max / 2;
  faults.reorder = draw.chance(0.5);
  if (draw.chance(0.5)) faults.short_transfer = 0.2;
  if (draw.chance(0.5)) faults.interrupted = 0.1;
  if (faults.short_transfer > 0) faults.passing_error = 0.02;
}

void draw_trouble(Draw& draw, SimulationSetup& setup) {
  io::Faults& faults = setup.faults;
  const double probability = 1.0 / static_cast<double>(20 + draw.below(600));  // a piece
  switch (setup.trouble) {
    case Trouble::none:
      return;
    case Trouble::errors:
      faults.read_errno = draw.one_of(kErrnos);
      faults.write_errno = draw.one_of(kErrnos);
      if (draw.chance(0.6)) faults.read_error = probability;
      if (draw.chance(0.6)) faults.write_error = probability;
      return;
    case Trouble::spoilt: {
      double io::Faults::*const kinds[] = {&io::Faults::bit_flip_on_read, &io::Faults::bit_flip_at_rest,
                                           &io::Faults::lost_write, &io::Faults::misdirected_write,
                                           &io::Faults::misdirected_read};
      faults.*draw.one_of(kinds) = probability;
      if (draw.chance(0.3)) faults.*draw.one_of(kinds) = probability;
      return;
    }
    case Trouble::files:
      setup.file_errno = draw.one_of(kFileErrnos);
      faults.export_error = draw.chance(0.3) ? 0.5 : 0;
      setup.saves = 0.5;
      return;
    case Trouble::cut:
      faults.dropped_at_cut = 0.01 + 0.1 * static_cast<double>(draw.below(3));
      faults.torn_at_cut = 0.1;
      return;
  }
}

}  // namespace

SimulationSetup draw_setup(Draw& draw, bool quiet, const std::string& nvme_folder) {
  SimulationSetup setup;
  setup.units = draw_model(draw);
  engine::Config& config = setup.config;
  config.nvme = {nvme_folder};
  config.job = "simulation";
  constexpr Placement kPlacements[] = {Placement::nvme,      Placement::nvme, Placement::nvme,
                                       Placement::nvme,      Placement::half, Placement::half,
                                       Placement::automatic, Placement::host};
  config.placement = draw.one_of(kPlacements);
  config.prefetch_units = draw.below(5);
  config.gradient_accumulation = draw.chance(0.7) ? 1 : 2 + draw.below(2);
  config.max_grad_norm = draw.chance(0.7) ? 1.0 : 0.0;
  constexpr int64_t kChunks[] = {1024, 1024, 2048, 4096, 32768};
  config.chunk_elements = draw.one_of(kChunks);
  config.poison = draw.chance(0.9);
  config.checkpoints_kept = draw.below(3);
  setup.threads = static_cast<int>(1 + draw.below(3));
  setup.task_us_max = draw.chance(0.3) ? 0 : draw.below(3000);
  setup.steps_least = static_cast<int>(3 + draw.below(3));
  setup.evaluates = draw.chance(0.5) ? 0.3 : 0;
  setup.reorders = draw.chance(0.5) ? 0.3 : 0;
  setup.saves = draw.chance(0.5) ? 0.25 : 0;
  setup.looks = draw.chance(0.5) ? 0.3 : 0;
  draw_kinds(draw, setup);
  draw_budget(draw, setup);
  setup.faults.seed = draw.seed();
  draw_harmless_faults(draw, setup.faults);
  constexpr Trouble kTroubles[] = {Trouble::none,   Trouble::none,   Trouble::none,   Trouble::errors,
                                   Trouble::errors, Trouble::spoilt, Trouble::spoilt, Trouble::spoilt,
                                   Trouble::files,  Trouble::cut};
  const Trouble trouble = draw.one_of(kTroubles);
  setup.trouble = quiet ? Trouble::none : trouble;
  draw_trouble(draw, setup);
  config.speculate = draw.chance(0.4);  // last, so that what came before is drawn as it was
  if (config.speculate) {               // forced placements keep gradients on the host then
    engine::Config plain = config;
    plain.speculate = false;
    const auto layout = engine::make_layout(setup.units, config.chunk_elements, 0, 1);
    config.host_budget_bytes += engine::make_plan(layout, plain, {true}).gradients_nvme_bytes;
  }
  if (config.speculate && draw.chance(0.7)) config.max_grad_norm = 0;  // guesses are right
  return setup;
}

std::string SimulationSetup::text(uint64_t seed) const {
  static constexpr const char* kTroubles[] = {"none", "errors", "spoilt", "files", "cut"};
  const engine::Layout layout = engine::make_layout(units, config.chunk_elements, 0, 1);
  const engine::Plan plan = engine::make_plan(layout, config, {true});
  return fmt::format(
      "seed {}: {} units by {}, {} chunks of {} elements, placement {}, {} slots, prefetch {}, accumulation "
      "{}, {} "
      "workers, delay {} to {} us, {}{}, trouble: {}",
      seed, units.size(), optim::name(units[0].optimizer), layout.chunks.size(), config.chunk_elements,
      placement_name(config.placement), plan.ring_slots, config.prefetch_units, config.gradient_accumulation,
      threads, faults.delay_min.count(), faults.delay_max.count(),
      faults.reorder ? "any order" : "in order of time", config.speculate ? ", speculation" : "",
      kTroubles[static_cast<int>(trouble)]);
}

}  // namespace overspill::testing
