#include "inference/run/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
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

std::span<int32_t> Drafts::tokens(int64_t vocabulary) {
  tokens_.resize(static_cast<size_t>(vocabulary));
  std::iota(tokens_.begin(), tokens_.end(), 0);
  return tokens_;
}

int32_t Sampler::draw(std::span<const float> given, std::span<const int32_t> history, Drafts& drafts) {
  auto& logits = drafts.logits_;
  logits.assign(given.begin(), given.end());
  adjust(history, drafts);
  const auto best = std::ranges::max_element(logits);
  if (best == logits.end() || std::ranges::any_of(logits, [](float x) { return std::isnan(x); }) ||
      !std::isfinite(*best)) {
    throw std::invalid_argument(
        "the logits are no numbers to draw from: the weights are damaged, or every token "
        "was excluded");
  }
  if (sampling_.temperature == 0) return static_cast<int32_t>(best - logits.begin());
  keep_likely(drafts, *best);
  const auto& candidates = drafts.candidates_;
  // Weights of the candidates, of which the first is the likeliest.
  double total = 0;
  const double top = candidates[0].logit;
  for (const Candidate& candidate : candidates) total += std::exp(candidate.logit - top);
  // 53 bits of the generator, in [0, 1): std::uniform_real_distribution may differ between libraries.
  double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
  for (const Candidate& candidate : candidates) {
    left -= std::exp(candidate.logit - top);
    if (left < 0) return candidate.token;
  }
  return candidates.back().token;
}

void Sampler::adjust(std::span<const int32_t> history, Drafts& drafts) const {
  auto& logits = drafts.logits_;
  auto& seen = drafts.seen_;
  const auto in_vocabulary = [&](int32_t token) {
    if (token < 0 || static_cast<size_t>(token) >= logits.size())
      throw std::invalid_argument(
          fmt::format("token {} is not one of the vocabulary's {}", token, logits.size()));
    return static_cast<size_t>(token);
  };
  if (sampling_.repetition != 1) {
    seen.assign(logits.size(), false);
    for (const int32_t token : history) {
      const size_t i = in_vocabulary(token);
      if (seen[i]) continue;
      seen[i] = true;
      logits[i] = logits[i] > 0 ? logits[i] / sampling_.repetition : logits[i] * sampling_.repetition;
    }
  }
  for (const auto& [token, bias] : sampling_.bias) logits[in_vocabulary(token)] += bias;
  if (sampling_.constraint) sampling_.constraint(history, logits);
}

void Sampler::keep_likely(Drafts& drafts, float best) const {
  const auto& logits = drafts.logits_;
  auto& candidates = drafts.candidates_;
  candidates.clear();
  candidates.reserve(logits.size());
  // At a tiny temperature quotients are infinite, and the differences of such are no numbers: there the
  // likeliest has 0, and what is far below it minus infinity.
  const float zero = std::isfinite(best / sampling_.temperature) ? 0 : best;
  for (size_t i = 0; i < logits.size(); ++i)
    candidates.push_back({static_cast<int32_t>(i), (logits[i] - zero) / sampling_.temperature});
  const auto compare = [](const Candidate& a, const Candidate& b) { return likelier(a, b); };
  if (sampling_.top_k > 0 && static_cast<size_t>(sampling_.top_k) < candidates.size()) {
    const auto end = candidates.begin() + sampling_.top_k;
    std::partial_sort(candidates.begin(), end, candidates.end(), compare);
    candidates.erase(end, candidates.end());
  } else {
    std::iter_swap(candidates.begin(), std::ranges::min_element(candidates, compare));
  }
  const double top = candidates[0].logit;
  if (sampling_.top_p < 1) {
    double total = 0;
    for (const Candidate& candidate : candidates) total += std::exp(candidate.logit - top);
    // Few of a vocabulary are kept, as a rule, so only a beginning is sorted; it grows until it is enough.
    for (size_t sorted = 64;; sorted *= 8) {
      sorted = std::min(sorted, candidates.size());
      std::partial_sort(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(sorted),
                        candidates.end(), compare);
      double kept = 0;
      size_t count = 0;
      while (count < sorted && kept < sampling_.top_p * total)
        kept += std::exp(candidates[count++].logit - top);
      if (count == sorted && sorted < candidates.size()) continue;
      candidates.resize(std::max<size_t>(1, count));
      break;
    }
  }
  if (sampling_.min_p > 0) {
    const double least = top + std::log(sampling_.min_p);
    std::erase_if(candidates, [&](const Candidate& candidate) { return candidate.logit < least; });
  }
}

}  // namespace overspill::inference
