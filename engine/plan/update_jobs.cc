#include "engine/plan/update_jobs.h"

namespace overspill::engine {

std::vector<UpdateJob> jobs_of(const Layout& layout, const Plan& plan, const Config& config, int64_t grain) {
  std::vector<UpdateJob> jobs;
  int64_t room = plan.second_weights;
  int64_t taken = 0;
  for (size_t c = 0; c < layout.chunks.size(); ++c) {
    const Chunk& chunk = layout.chunks[c];
    const Unit& unit = layout.units[chunk.unit];
    if (!unit.trainable() || plan.on_device[chunk.unit]) continue;
    const bool weights_away = plan.weights_on_nvme[chunk.unit];
    UpdateJob job{.unit = chunk.unit, .elements = static_cast<double>(chunk.elements)};
    if (weights_away) job.read += static_cast<double>(chunk.elements * unit.element_bytes);
    if (plan.states_on_nvme[c]) job.read += static_cast<double>(unit.state_bytes(chunk.elements));
    job.written = job.read;
    if (plan.gradients_on_nvme[c])
      job.gradient = static_cast<double>(chunk.elements *
                                         gradient_element_bytes(unit.format, config.gradient_accumulation));
    job.in_ring = job.read > 0 || job.gradient > 0;
    // Where the weights are on NVMe too, the guess needs no second ones.
    job.may_guess = config.speculate && layout.slices == 1 && may_guess(plan, static_cast<int32_t>(c)) &&
                    (weights_away || plan.held_twice[c] || room-- > 0);
    const bool joins = !jobs.empty() && taken % grain != 0 && jobs.back().unit == job.unit &&
                       jobs.back().in_ring == job.in_ring && jobs.back().may_guess == job.may_guess;
    if (!joins) {
      taken = 1;
      jobs.push_back(job);
      continue;
    }
    ++taken;
    UpdateJob& last = jobs.back();
    last.elements += job.elements;
    last.read += job.read;
    last.written += job.written;
    last.gradient += job.gradient;
  }
  return jobs;
}

}  // namespace overspill::engine
