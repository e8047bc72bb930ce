#include "engine/checkpoint/rank_part.h"

#include <algorithm>
#include <utility>

#include "engine/checkpoint/manifest_unit.h"

namespace overspill::engine {

RankPart::RankPart(const Setup& setup, Core& core, ModelStates& model, Access& access, SaveMeter& meter,
                   const std::filesystem::path& folder)
    : setup_(setup),
      core_(core),
      model_(model),
      access_(access),
      meter_(meter),
      folder_(folder),
      resident_(folder, core.store.watch()),
      pieces_(setup.layout.chunks.size()) {
  int64_t bytes = 0;
  for (int32_t c = 0; has_pieces() && std::cmp_less(c, pieces_.size()); ++c) {
    for (const Component component : kAllComponents) bytes += setup.component_bytes(c, component);
  }
  meter.bytes = bytes;
  meter.written = 0;
  meter.pace.copied_bytes = 0;
  const MutexLock lock(core.mutex());
  for (const UnitState& unit : model.units) steps_.push_back(unit.steps);
}

void RankPart::pin(int32_t chunk) {
  // Without train_after_save the states' only room is held until the checkpoint is deleted, on every rank.
  if (!has_pieces() && setup_.config.train_after_save) return;
  const auto& extents = model_.chunks[chunk].extents;
  for (const Component component : kAllComponents) {
    const io::Extent& extent = extents[static_cast<size_t>(component)];
    if (extent.empty()) continue;
    core_.store->pin(extent);
    piece(chunk, component).extent = extent;
  }
}

void RankPart::write(int32_t chunk) {
  for (const Component component : kAllComponents) {
    const int64_t wanted = setup_.component_bytes(chunk, component);
    Piece& taken = piece(chunk, component);
    if (wanted == 0 || !has_pieces() || !taken.extent.empty()) continue;
    if (const std::byte* home = model_.chunks[chunk].home[static_cast<size_t>(component)]) {
      taken.range = resident_.append({home, static_cast<size_t>(wanted)});
    } else if (setup_.in_store(chunk, component)) {
      taken.range = zeros(wanted);  // never written
    } else {
      taken.range = resident_.append(access_.whole(chunk, component));  // on the device
    }
    meter_.written += wanted;
  }
}

FileRange RankPart::zeros(int64_t bytes) {
  const std::vector<std::byte> zero(static_cast<size_t>(bytes));
  return resident_.append(zero);
}

void RankPart::export_extents() {
  std::vector<Piece*> exported;
  for (Pieces& chunk : pieces_) {
    for (Piece& taken : chunk) {
      if (!taken.extent.empty()) exported.push_back(&taken);
    }
  }
  if (exported.empty()) return;
  std::vector<io::Extent> extents;
  for (const Piece* taken : exported) extents.push_back(taken->extent);
  io::Export result = core_.store->export_extents(extents, folder_, meter_.pace);
  pinned_.share = result.share;
  pinned_.part_shares = std::move(result.part_shares);
  for (size_t i = 0; i < exported.size(); ++i) {
    io::ExportedExtent& to = result.extents[i];
    exported[i]->range = {to.file, to.offset, to.bytes, std::move(to.block_checksums)};
    if (to.linked) {
      pinned_.extents.push_back(exported[i]->extent);
      meter_.written += to.bytes;
    } else {
      core_.store->unpin(exported[i]->extent);  // the copy is the folder's own
    }
    exported[i]->extent = {};
  }
}

std::vector<ManifestUnit> RankPart::finish() {
  export_extents();
  resident_.finish();
  std::vector<ManifestUnit> units;
  for (size_t u = 0; u < setup_.layout.units.size(); ++u) {
    const Unit& unit = setup_.layout.units[u];
    ManifestUnit described = describe(unit, steps_[u]);
    for (int32_t c = unit.first_chunk; has_pieces() && c < unit.first_chunk + unit.chunk_count; ++c) {
      const Chunk& chunk = setup_.layout.chunks[c];
      for (const Component component : kAllComponents) {
        if (setup_.component_bytes(c, component) == 0) continue;
        described.pieces.push_back({std::string(unit.component_name(component)),
                                    setup_.layout.global_begin(chunk), chunk.elements,
                                    std::move(piece(c, component).range)});
      }
    }
    units.push_back(std::move(described));
  }
  return units;
}

RankPart::Pinned RankPart::give_pins() {
  for (Pieces& chunk : pieces_) {
    for (Piece& taken : chunk) {
      if (!taken.extent.empty()) pinned_.extents.push_back(std::exchange(taken.extent, {}));
    }
  }
  return std::exchange(pinned_, {});
}

}  // namespace overspill::engine
