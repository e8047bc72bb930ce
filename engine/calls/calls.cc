#include "engine/calls/calls.h"

namespace overspill::engine {

void require_world_one(const Layout& layout, const char* what) {
  if (layout.slices != 1)
    throw std::invalid_argument(
        fmt::format("{} needs a world of one rank; this one has {}", what, layout.slices));
}

void check_size(const Segment& segment, size_t bytes, int64_t element_bytes) {
  if (static_cast<int64_t>(bytes) != segment.elements * element_bytes) {
    throw std::invalid_argument(fmt::format("{}: {} bytes were given, {} elements of {} bytes are {}",
                                            segment.name, bytes, segment.elements, element_bytes,
                                            segment.elements * element_bytes));
  }
}

void require_whole_or_one(const Machine& m, GroupRange range) {
  if (!range.all()) require_world_one(m.setup.layout, "several optimizers over one model");
}

void settle_clip(Machine& m, const Segment& segment) {
  const MutexLock turn(m.settling);  // gradients come from several threads
  if (!m.clipped) return;
  if (m.setup.layout.slices > 1) {
    throw std::invalid_argument(fmt::format(
        "a gradient of {} came after clip_grad_norm(), which scaled the earlier gradients by {}, and "
        "those of several ranks are summed by then: take the step or clear the gradients first, and "
        "clip only after the last backward of a step",
        segment.name, *m.clipped));
  }
  m.intake.finish();
  m.settle_clip();
}

}  // namespace overspill::engine
