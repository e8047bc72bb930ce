// Gradients from outside, and what is asked of them (engine.h).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cpu_optim/elements.h"
#include "cpu_optim/optimizer.h"
#include "engine/calls/calls.h"
#include "engine/calls/machine.h"
#include "engine/engine.h"

namespace overspill::engine {
namespace {

/// A segment that has gradients.
const Segment& trained(const Machine& m, int32_t unit, int32_t segment) {
  const Segment& s = m.segment_at(unit, segment);
  if (!m.unit_at(unit).trainable())
    throw std::invalid_argument(fmt::format("{} is frozen: it has no gradient", s.name));
  return s;
}

/// Throws gradients away, or makes them zeros, and with them what clip_grad_norm() meant for them.
void change_gradients(Machine& m, GroupRange range, void (Gradients::*change)()) {
  require_whole_or_one(m, range);
  m.forget_guesses();
  if (!range.all()) m.settle_clip();
  const Gradients::Only only(m.gradients, range);
  if (m.gradients.any()) {
    m.rounds.meet(Meeting::clear, m.looks, [&] { (m.gradients.*change)(); });
  } else {
    (m.gradients.*change)();
  }
  m.forget_clip();
}

}  // namespace

void Engine::add_gradient(int32_t unit, int32_t segment, std::span<const std::byte> data,
                          std::string_view dtype) {
  Machine& m = machine();
  settle_clip(m, m.segment_at(unit, segment));
  const InCall call(m.core);
  m.intake.add(unit, segment, data, dtype);
}

void Engine::add_gradient(int32_t unit, int32_t segment, DeviceArray gradient, Queue queue) {
  Machine& m = machine();
  settle_clip(m, m.segment_at(unit, segment));
  const InCall call(m.core);
  m.intake.add(unit, segment, std::move(gradient), queue);
}

void Engine::clear_gradients(GroupRange range) {
  change_gradients(machine(), range, &Gradients::throw_away);
}

void Engine::zero_gradients(GroupRange range) {
  change_gradients(machine(), range, &Gradients::become_zero);
}

void Engine::clipped_by_caller() {
  machine().caller_clipped = true;
}

void Engine::set_loss_scale(double scale) {
  if (!(scale > 0) || std::isinf(scale) || std::isinf(1.0 / scale)) {
    throw std::invalid_argument(fmt::format("a loss scale of {}: it must be positive and finite", scale));
  }
  Machine& m = machine();
  m.unscale = 1.0 / scale;
  const MutexLock guard(m.core.mutex());
  m.updater.speculation().expect_unscaled(m.unscale);
}

void Engine::read_gradient(int32_t unit, int32_t segment, std::span<std::byte> out, std::string_view dtype) {
  Machine& m = machine();
  const Segment& s = m.segment_at(unit, segment);
  require_world_one(m.setup.layout, "reading a gradient");
  const optim::Element element = m.gradients.check(unit, segment, std::ssize(out), dtype);
  const InCall call(m.core);
  settle_clip(m, s);
  m.intake.finish();
  std::vector<float> values(static_cast<size_t>(std::min(kPieceElements, s.elements)));
  for (int64_t begin = 0; begin < s.elements;) {
    const int64_t count = std::min(kPieceElements, s.elements - begin);
    const auto piece = std::span(values).first(static_cast<size_t>(count));
    m.gradients.read(unit, segment, begin, piece);
    optim::narrow(element, piece, out.data() + begin * optim::bytes(element));
    begin += count;
  }
}

bool Engine::read_whole_gradient(int32_t unit, int32_t segment, std::span<float> out) {
  Machine& m = machine();
  const Segment& s = trained(m, unit, segment);
  check_size(s, out.size_bytes(), 4);
  if (m.setup.layout.slices > 1) return m.read_whole_gradient(unit, segment, out);
  if (!has_gradient(unit, segment)) return false;
  read_state(unit, segment, "grad", out);
  return true;
}

bool Engine::replace_whole_gradient(int32_t unit, int32_t segment, std::span<const float> values) {
  Machine& m = machine();
  const Segment& s = trained(m, unit, segment);
  check_size(s, values.size_bytes(), 4);
  if (m.setup.layout.slices > 1) return m.replace_whole_gradient(unit, segment, values);
  if (!has_gradient(unit, segment)) return false;
  const optim::Element type = m.setup.gradient_type(unit);
  std::vector<std::byte> narrowed(values.size() * static_cast<size_t>(optim::bytes(type)));
  optim::narrow(type, values, narrowed.data());
  replace_gradient(unit, segment, narrowed, type == optim::Element::fp32 ? "F32" : m.unit_at(unit).dtype);
  return true;
}

bool Engine::read_own_gradient(int32_t unit, int32_t segment, std::span<float> out) {
  Machine& m = machine();
  const Segment& s = trained(m, unit, segment);
  if (m.setup.layout.slices == 1) return read_whole_gradient(unit, segment, out);
  check_size(s, out.size_bytes(), 4);
  return m.read_own_gradient(unit, segment, out);
}

void Engine::reuse_gradients() {
  Machine& m = machine();
  require_world_one(m.setup.layout, "using a step's gradients again");
  m.intake.finish();
  m.gradients.reuse();
}

bool Engine::has_gradient(int32_t unit, int32_t segment) {
  Machine& m = machine();
  m.segment_at(unit, segment);
  m.intake.finish();
  const MutexLock guard(m.core.mutex());
  return m.gradients.present(unit, segment);
}

void Engine::use_gradients(GroupRange range) {
  Machine& m = machine();
  require_world_one(m.setup.layout, "an update of one's own");
  m.intake.finish();
  m.settle_clip();
  m.forget_clip();
  const Gradients::Only only(m.gradients, range);
  m.intake.write_zeros();
  const MutexLock guard(m.core.mutex());
  m.gradients.handed_over();
}

StepResult Engine::step(std::span<const optim::Hyper> groups, GroupRange range) {
  Machine& m = machine();
  require_whole_or_one(m, range);
  if (!range.all() && m.setup.config.max_grad_norm > 0) {
    throw std::invalid_argument(fmt::format(
        "max_grad_norm = {} is a limit for the norm of all gradients, and this step has those of some groups",
        m.setup.config.max_grad_norm));
  }
  const InCall call(m.core);
  return m.step(groups, range);
}

double Engine::grad_norm(GroupRange range) {
  Machine& m = machine();
  require_whole_or_one(m, range);
  m.intake.finish();
  const Gradients::Only only(m.gradients, range);
  m.intake.write_zeros();
  GradientSummary summary;
  m.rounds.meet(Meeting::norm, m.looks, [&] {
    m.rounds.sum_gradients();
    m.gradients.reduce_presence();
    summary = m.gradients.summarize();
  });
  return m.norm_of(summary) * m.unscale * m.clipped.value_or(1.0);
}

double Engine::clip_grad_norm(double max_norm) {
  if (!(max_norm > 0)) throw std::invalid_argument("max_norm must be positive");
  Machine& m = machine();
  const double norm = grad_norm();
  if (!std::isinf(max_norm) && m.gradients.any()) {
    m.clipped = m.clipped.value_or(1.0) * clip_factor(norm, max_norm);
    m.caller_clipped = true;
  }
  return norm;
}

}  // namespace overspill::engine
