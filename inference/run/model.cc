#include "inference/run/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "inference/error.h"

namespace overspill::inference {
namespace {

// Far beyond what any model was trained for; above it a position is no exact float.
constexpr int64_t kCapacityMax = int64_t{1} << 24;

int64_t checked_capacity(const ModelSpec& spec, int64_t capacity) {
  const int64_t most = spec.positions ? spec.context : kCapacityMax;
  if (capacity < 1 || capacity > most) {
    throw std::invalid_argument(fmt::format(
        "a text of {} tokens is asked for, and this {} takes from 1 to {}", capacity, spec.family, most));
  }
  return capacity;
}

}  // namespace

Model::Model(const std::filesystem::path& folder, const ModelOptions& options, const Kernels& kernels)
    : folder_(folder),
      spec_(describe(folder_)),
      kernels_(kernels),
      team_(options.threads),
      weights_(load_weights(folder_, spec_, team_, options.weights, weight_bytes_max(options))),
      forward_(spec_, weights_, team_, kernels, options.rows_max) {}

/// What the budget leaves for weights beside caches and buffers.
int64_t Model::weight_bytes_max(const ModelOptions& options) {
  if (!options.budget_bytes) return std::numeric_limits<int64_t>::max();
  const bool narrow = std::ranges::all_of(folder_.tensors(), [](const StoredTensor& tensor) {
    return tensor.shape.size() < 2 || tensor.dtype == "BF16";
  });
  const int64_t caches = Cache::bytes(spec_, options.positions, narrow ? Element::bf16 : Element::fp32);
  const int64_t buffers = Forward::bytes(spec_, options.threads, options.rows_max);
  cache_bytes_left_.emplace(caches);
  const int64_t left = *options.budget_bytes - caches - buffers;
  if (left >= 0) return left;
  throw NoRoom(
      fmt::format("{}: a budget of {} bytes does not hold {} for the cache of {} positions and {} for "
                  "buffers; give a larger "
                  "one, or fewer positions",
                  folder_.path().string(), *options.budget_bytes, caches, options.positions, buffers));
}

Session::Charge::Charge(Model& model, int64_t bytes) : model_(model), bytes_(bytes) {
  if (!model_.cache_bytes_left_) return;
  if (const int64_t left = model_.cache_bytes_left_->fetch_sub(bytes_); left < bytes_) {
    *model_.cache_bytes_left_ += bytes_;
    throw NoRoom(
        fmt::format("a text's cache takes {} bytes, and the budget has {} left for caches; load the model "
                    "with more positions",
                    bytes_, left));
  }
}

Session::Charge::~Charge() {
  if (model_.cache_bytes_left_) *model_.cache_bytes_left_ += bytes_;
}

Session::Session(std::shared_ptr<Model> model, int64_t capacity)
    : model_(std::move(model)),
      capacity_(checked_capacity(model_->spec(), capacity)),
      charge_(*model_, Cache::bytes(model_->spec(), capacity_, model_->cache_element())),
      cache_(model_->spec(), capacity_, model_->cache_element()) {}

void Session::rewind(int64_t length) {
  if (length < 0 || length > cache_.length())
    throw std::invalid_argument(fmt::format("rewind to {} of a text of {} tokens", length, cache_.length()));
  cache_.set_length(length);
  tokens_.resize(static_cast<size_t>(length));
}

template <class Take>
void Session::read(std::span<const int32_t> tokens, bool all, Take take) {
  const int64_t vocabulary = model_->spec().vocabulary, count = static_cast<int64_t>(tokens.size());
  if (count == 0) throw std::invalid_argument("no tokens to read");
  if (count > capacity() - length()) {
    throw std::invalid_argument(
        fmt::format("{} tokens after {}, and there is room for {}", count, length(), capacity()));
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= vocabulary)
      throw std::invalid_argument(
          fmt::format("token {} is not one of the vocabulary's {}", token, vocabulary));
  }
  Forward& forward = model_->forward_;
  std::vector<Row> rows;
  std::vector<int32_t> wanted;
  for (int64_t first = 0; first < count; first += forward.rows_max()) {
    const int64_t n = std::min(forward.rows_max(), count - first);
    rows.clear();
    for (int64_t i = 0; i < n; ++i)
      rows.push_back({tokens[static_cast<size_t>(first + i)], length() + i, &cache_});
    wanted.assign(all ? static_cast<size_t>(n) : first + n == count ? 1 : 0, static_cast<int32_t>(n - 1));
    if (all) std::iota(wanted.begin(), wanted.end(), 0);
    const std::lock_guard lock(model_->mutex_);
    const float* const logits = forward.run(rows, wanted);
    cache_.set_length(length() + n);
    tokens_.insert(tokens_.end(), tokens.begin() + first, tokens.begin() + first + n);
    for (size_t i = 0; i < wanted.size(); ++i)
      take(first + wanted[i], logits + static_cast<int64_t>(i) * forward.logits_stride());
  }
}

void Session::extend(std::span<const int32_t> tokens, std::span<float> logits) {
  const int64_t vocabulary = model_->spec().vocabulary;
  if (static_cast<int64_t>(logits.size()) != vocabulary)
    throw std::invalid_argument(fmt::format("{} logits of a vocabulary of {}", logits.size(), vocabulary));
  read(tokens, false, [&](int64_t, const float* found) { std::copy_n(found, vocabulary, logits.data()); });
}

void Session::extend_all(std::span<const int32_t> tokens, std::span<float> logits) {
  const int64_t vocabulary = model_->spec().vocabulary;
  if (logits.size() / static_cast<size_t>(vocabulary) != tokens.size() ||
      logits.size() % static_cast<size_t>(vocabulary) != 0)
    throw std::invalid_argument(fmt::format("{} logits for {} tokens", logits.size(), tokens.size()));
  read(tokens, true, [&](int64_t i, const float* found) {
    std::copy_n(found, vocabulary, logits.data() + i * vocabulary);
  });
}

std::vector<float> Session::score(std::span<const int32_t> tokens) {
  std::vector<float> scores;
  const int64_t vocabulary = model_->spec().vocabulary, count = static_cast<int64_t>(tokens.size());
  read(tokens, true, [&](int64_t i, const float* logits) {
    if (i + 1 == count) return;
    scores.push_back(logits[tokens[static_cast<size_t>(i + 1)]] -
                     model_->kernels().log_sum_exp(logits, vocabulary));
  });
  return scores;
}

}  // namespace overspill::inference
