#include "inference/run/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace overspill::inference {
namespace {

void check(bool right, const char* name, double value, const char* range) {
  if (!right) throw std::invalid_argument(fmt::format("{} is {}, and is to be {}", name, value, range));
}

/// Of equal logits the first token comes first, so that the result does not depend on the sort.
bool likelier(const auto& a, const auto& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

}  // namespace

Sampler::Sampler(Sampling sampling) : sampling_(std::move(sampling)), random_(sampling_.seed) {
  const auto finite = [](float x) { return std::isfinite(x); };
  check(finite(sampling_.temperature) && sampling_.temperature >= 0, "temperature", sampling_.temperature,
        "finite and at least 0");
  check(sampling_.top_k >= 0, "top_k", static_cast<double>(sampling_.top_k), "at least 0");
  check(sampling_.top_p > 0 && sampling_.top_p <= 1, "top_p", sampling_.top_p, "above 0 and at most 1");
  check(sampling_.min_p >= 0 && sampling_.min_p <= 1, "min_p", sampling_.min_p, "from 0 to 1");
  check(finite(sampling_.repetition) && sampling_.repetition > 0, "repetition", sampling_.repetition,
        "finite and above 0");
  for (const auto& [token, bias] : sampling_.bias) check(!std::isnan(bias), "a bias", bias, "a number");
}

int32_t Sampler::draw(std::span<const float> logits, std::span<const int32_t> history) {
  logits_.assign(logits.begin(), logits.end());
  adjust(history);
  const auto best = std::ranges::max_element(logits_);
  if (best == logits_.end() || std::ranges::any_of(logits_, [](float x) { return std::isnan(x); }) ||
      !std::isfinite(*best)) {
    throw std::invalid_argument(
        "the logits are no numbers to draw from: the weights are damaged, or every token "
        "was excluded");
  }
  if (sampling_.temperature == 0) return static_cast<int32_t>(best - logits_.begin());
  keep_likely();
  // Weights of the candidates, of which the first is the likeliest.
  double total = 0;
  const double top = candidates_[0].logit;
  for (const Candidate& candidate : candidates_) total += std::exp(candidate.logit - top);
  // 53 bits of the generator, in [0, 1): std::uniform_real_distribution may differ between libraries.
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
  for (const Candidate& candidate : candidates_) {
    left -= std::exp(candidate.logit - top);
    if (left < 0) return candidate.token;
  }
  return candidates_.back().token;
}

void Sampler::adjust(std::span<const int32_t> history) {
  const auto in_vocabulary = [&](int32_t token) {
    if (token < 0 || static_cast<size_t>(token) >= logits_.size())
      throw std::invalid_argument(
          fmt::format("token {} is not one of the vocabulary's {}", token, logits_.size()));
    return static_cast<size_t>(token);
  };
  if (sampling_.repetition != 1) {
    seen_.assign(logits_.size(), false);
    for (const int32_t token : history) {
      const size_t i = in_vocabulary(token);
      if (seen_[i]) continue;
      seen_[i] = true;
      logits_[i] = logits_[i] > 0 ? logits_[i] / sampling_.repetition : logits_[i] * sampling_.repetition;
    }
  }
  for (const auto& [token, bias] : sampling_.bias) logits_[in_vocabulary(token)] += bias;
  if (sampling_.constraint) sampling_.constraint(history, logits_);
}

void Sampler::keep_likely() {
  candidates_.clear();
  for (size_t i = 0; i < logits_.size(); ++i)
    candidates_.push_back({static_cast<int32_t>(i), logits_[i] / sampling_.temperature});
  const auto compare = [](const Candidate& a, const Candidate& b) { return likelier(a, b); };
  if (sampling_.top_k > 0 && static_cast<size_t>(sampling_.top_k) < candidates_.size()) {
    const auto end = candidates_.begin() + sampling_.top_k;
    std::partial_sort(candidates_.begin(), end, candidates_.end(), compare);
    candidates_.erase(end, candidates_.end());
  } else {
    std::iter_swap(candidates_.begin(), std::ranges::min_element(candidates_, compare));
  }
  const double top = candidates_[0].logit;
  if (sampling_.top_p < 1) {
    double total = 0;
    for (const Candidate& candidate : candidates_) total += std::exp(candidate.logit - top);
    // Few of a vocabulary are kept, as a rule, so only a beginning is sorted; it grows until it is enough.
    for (size_t sorted = 64;; sorted *= 8) {
      sorted = std::min(sorted, candidates_.size());
      std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(sorted),
                        candidates_.end(), compare);
      double kept = 0;
      size_t count = 0;
      while (count < sorted && kept < sampling_.top_p * total)
        kept += std::exp(candidates_[count++].logit - top);
      if (count == sorted && sorted < candidates_.size()) continue;
      candidates_.resize(std::max<size_t>(1, count));
      break;
    }
  }
  if (sampling_.min_p > 0) {
    const double least = top + std::log(sampling_.min_p);
    std::erase_if(candidates_, [&](const Candidate& candidate) { return candidate.logit < least; });
  }
}

}  // namespace overspill::inference
