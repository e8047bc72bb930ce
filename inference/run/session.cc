#include "inference/run/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "inference/kernels/forms.h"
#include "inference/run/cache.h"
#include "inference/run/lookup.h"
#include "inference/run/model.h"
#include "inference/run/sampler.h"

namespace overspill::inference {
namespace {

int64_t checked_capacity(const Model& model, int64_t capacity) {
  model.check_length(capacity);
  return capacity;
}

}  // namespace

Session::Session(std::shared_ptr<Model> model, int64_t capacity)
    : model_(std::move(model)),
      capacity_(checked_capacity(*model_, capacity)),
      share_(std::make_unique<Share>(model_->pool(),
                                     Cache::pages(model_->spec(), capacity_, model_->rows_max()))),
      cache_(std::make_unique<Cache>(model_->spec(), *share_)) {}

Session::~Session() = default;

int64_t Session::length() const {
  return cache_->length();
}

void Session::rewind(int64_t length) {
  if (length < 0 || length > cache_->length())
    throw std::invalid_argument(fmt::format("rewind to {} of a text of {} tokens", length, cache_->length()));
  if (cache_->can_go_on_at(length)) {
    cache_->rewind(length);
    tokens_.resize(static_cast<size_t>(length));
    return;
  }
  std::vector<int32_t> again(tokens_.begin(), tokens_.begin() + length);
  *cache_ = Cache(model_->spec(), *share_);
  tokens_.clear();
  read(again, 0, [](int64_t, const float*, Drafts&) {});
}

template <class Take>
void Session::read(std::span<const int32_t> tokens, int64_t wanted_of_last, Take take) {
  model_->check_tokens(tokens);
  const auto count = static_cast<int64_t>(tokens.size());
  if (count > capacity() - length()) {
    throw std::invalid_argument(
        fmt::format("{} tokens after {}, and there is room for {}", count, length(), capacity()));
  }
  std::vector<Row> rows;
  std::vector<int32_t> wanted;
  for (int64_t first = 0; first < count; first += model_->rows_max()) {
    const int64_t n = std::min(model_->rows_max(), count - first);
    // The share has as many pages as a text of this capacity needs.
    if (!cache_->make_room(length() + n)) throw std::logic_error("a session's cache is too small");
    rows.clear();
    for (int64_t i = 0; i < n; ++i)
      rows.push_back({tokens[static_cast<size_t>(first + i)], length() + i, cache_.get()});
    wanted.clear();
    for (int64_t i = 0; i < n; ++i) {
      if (first + i >= count - wanted_of_last) wanted.push_back(static_cast<int32_t>(i));
    }
    model_->compute_each(rows, wanted, [&](int64_t i, const float* logits, Drafts& drafts) {
      take(first + wanted[static_cast<size_t>(i)], logits, drafts);
    });
    cache_->set_length(length() + n);
    tokens_.insert(tokens_.end(), tokens.begin() + first, tokens.begin() + first + n);
  }
}

void Session::extend(std::span<const int32_t> tokens, std::span<float> logits) {
  const int64_t vocabulary = model_->spec().vocabulary;
  if (static_cast<int64_t>(logits.size()) != vocabulary)
    throw std::invalid_argument(fmt::format("{} logits of a vocabulary of {}", logits.size(), vocabulary));
  read(tokens, 1,
       [&](int64_t, const float* found, Drafts&) { std::copy_n(found, vocabulary, logits.data()); });
}

void Session::extend_all(std::span<const int32_t> tokens, std::span<float> logits) {
  const int64_t vocabulary = model_->spec().vocabulary;
  if (logits.size() / static_cast<size_t>(vocabulary) != tokens.size() ||
      logits.size() % static_cast<size_t>(vocabulary) != 0)
    throw std::invalid_argument(fmt::format("{} logits for {} tokens", logits.size(), tokens.size()));
  read(tokens, static_cast<int64_t>(tokens.size()), [&](int64_t i, const float* found, Drafts&) {
    std::copy_n(found, vocabulary, logits.data() + i * vocabulary);
  });
}

std::vector<int32_t> Session::draw(std::span<const int32_t> tokens, Sampler& sampler, int64_t lookup) {
  model_->check_tokens(tokens);
  std::vector<int32_t> history = tokens_;
  history.insert(history.end(), tokens.begin(), tokens.end());
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t room = std::min(capacity() - length() - count, model_->rows_max() - 1);
  const std::vector<int32_t> guesses = look_up(history, std::min(lookup, room));
  std::vector<int32_t> rows(tokens.begin(), tokens.end());
  rows.insert(rows.end(), guesses.begin(), guesses.end());
  const int64_t before = length();
  std::vector<int32_t> drawn;
  read(rows, 1 + static_cast<int64_t>(guesses.size()), [&](int64_t i, const float* logits, Drafts& drafts) {
    const auto guess = static_cast<size_t>(i - count);  // whose logits these are, if it is one
    // What follows a wrong guess is of another text.
    if (i >= count && (drawn.size() != guess + 1 || drawn[guess] != guesses[guess])) return;
    drawn.push_back(sampler.draw({logits, static_cast<size_t>(model_->spec().vocabulary)}, history, drafts));
    history.push_back(drawn.back());
  });
  rewind(before + count + static_cast<int64_t>(drawn.size()) - 1);
  return drawn;
}

std::vector<float> Session::score(std::span<const int32_t> tokens) {
  std::vector<float> scores;
  const int64_t vocabulary = model_->spec().vocabulary, count = static_cast<int64_t>(tokens.size());
  read(tokens, static_cast<int64_t>(tokens.size()), [&](int64_t i, const float* logits, Drafts&) {
    if (i + 1 == count) return;
    scores.push_back(logits[tokens[static_cast<size_t>(i + 1)]] -
                     model_->kernels().log_sum_exp(logits, vocabulary));
  });
  return scores;
}

}  // namespace overspill::inference
