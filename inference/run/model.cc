#include "inference/run/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "cpu_optim/floating_point.h"
#include "inference/error.h"
#include "inference/run/lookup.h"
#include "inference/run/speed.h"

namespace overspill::inference {
namespace {

// Of the weights, to see how fast memory is: more than any cache holds.
constexpr size_t kSampleBytes = size_t{1} << 29;
// Of reading, to see how fast the disk is: its first moments may be faster than what follows.
constexpr double kTrialSeconds = 0.5;

Element element_of(CacheFormat cache, bool has_fp32) {
  if (cache == CacheFormat::int8) return Element::int8;
  return has_fp32 ? Element::fp32 : Element::bf16;
}

thread_local const Model* inside = nullptr;  // whose computation calls back on this thread

/// While one lives, what is called here is called by a computation of the model.
class Inside {
 public:
  explicit Inside(const Model& model) : before_(std::exchange(inside, &model)) {}
  ~Inside() { inside = before_; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  const Model* before_;
};

int64_t checked_capacity(const Model& model, int64_t capacity) {
  model.check_length(capacity);
  return capacity;
}

}  // namespace

Model::Model(const std::filesystem::path& folder, const ModelOptions& options, const Kernels& kernels)
    : folder_(folder),
      spec_(describe(folder_)),
      kernels_(kernels),
      team_(options.threads),
      weights_(load_weights(folder_, spec_, team_, options.weights,
                            [&](bool has_fp32) { return weight_bytes_max(options, has_fp32); })),
      pool_(spec_, element_of(options.cache, weights_.has_fp32), cache_pages_),
      forward_(spec_, weights_, team_, kernels, options.rows_max),
      drafts_(static_cast<size_t>(options.threads)) {}

/// What the budget leaves for weights beside caches and buffers.
int64_t Model::weight_bytes_max(const ModelOptions& options, bool has_fp32) {
  if (!options.budget_bytes) return std::numeric_limits<int64_t>::max();
  cache_pages_ = Pool::pages(spec_, options.positions);
  const int64_t caches = cache_pages_ * Pool::page_bytes(spec_, element_of(options.cache, has_fp32));
  const int64_t buffers = Forward::bytes(spec_, options.threads, options.rows_max) +
                          options.threads * Drafts::bytes(spec_.vocabulary);
  const int64_t left = *options.budget_bytes - caches - buffers;
  if (left >= 0) return left;
  throw NoRoom(
      fmt::format("{}: a budget of {} bytes does not hold {} for the cache of {} positions and {} for "
                  "buffers; give a larger "
                  "one, or fewer positions",
                  folder_.path().string(), *options.budget_bytes, caches, options.positions, buffers));
}

bool Model::is_inside() const {
  return inside == this;
}

void Model::check_may_compute() const {
  check_process(team_.process());
  if (is_inside()) {
    throw std::logic_error(
        "a constraint computes with the model that calls it, which would wait for itself; open the folder "
        "once more for that");
  }
}

double Model::seconds_a_pass() {
  check_may_compute();
  const MutexLock turn(turns_);
  forward_.throw_if_unread();
  const std::span<const std::byte> stays = weights_.memory.span();
  const double memory = read_bytes_per_second(team_, stays.first(std::min(stays.size(), kSampleBytes)));
  double all = static_cast<double>(weights_.memory.bytes()), reading = 0;
  const auto take = [&](double in_memory, double of_disk, const Reading& trial) {
    all += in_memory;
    if (trial.bytes > 0) reading += of_disk * trial.seconds / trial.bytes;
  };
  if (LayerStream* const stream = weights_.stream.get()) {
    const auto bytes = static_cast<double>(stream->bytes());
    take(bytes, bytes, stream->try_reading(kTrialSeconds));
  }
  if (ExpertStore* const experts = weights_.experts.get()) {
    take(static_cast<double>(experts->bytes_a_token()), static_cast<double>(experts->read_bytes_a_token()),
         experts->try_reading(kTrialSeconds));
  }
  return std::max(memory > 0 ? all / memory : 0, reading);
}

int64_t Model::weight_bytes() const {
  return weights_.memory.bytes() + (weights_.experts ? weights_.experts->bytes() : 0);
}

int64_t Model::streamed_bytes() const {
  return (weights_.stream ? weights_.stream->bytes() : 0) +
         (weights_.experts ? weights_.experts->read_bytes_a_token() : 0);
}

int64_t Model::read_bytes() const {
  check_process(team_.process());
  const double bytes = (weights_.stream ? weights_.stream->reading().bytes : 0) +
                       (weights_.experts ? weights_.experts->reading().bytes : 0);
  return static_cast<int64_t>(bytes);
}

void Model::check_tokens(std::span<const int32_t> tokens) const {
  if (tokens.empty()) throw std::invalid_argument("no tokens to read");
  for (const int32_t token : tokens) {
    if (token < 0 || token >= spec_.vocabulary)
      throw std::invalid_argument(
          fmt::format("token {} is not one of the vocabulary's {}", token, spec_.vocabulary));
  }
}

void Model::check_length(int64_t tokens) const {
  const int64_t most = spec_.positions ? spec_.context : kPositionsMax;
  if (tokens < 1 || tokens > most) {
    throw std::invalid_argument(fmt::format(
        "a text of {} tokens is asked for, and this {} takes from 1 to {}", tokens, spec_.family, most));
  }
}

void Model::compute(std::span<const Row> rows, std::span<const int32_t> wanted, int64_t jobs,
                    const std::function<void(int64_t, const Logits&, Drafts&)>& work) {
  check_may_compute();
  const MutexLock turn(turns_);
  const Logits logits{forward_.run(rows, wanted), forward_.logits_stride()};
  const optim::FloatingPointMode mode;  // that of the other threads
  if (jobs < 1) return;
  if (jobs == 1) {
    const Inside calls(*this);
    return work(0, logits, drafts_[0]);
  }
  team_.run([&](int thread) REQUIRES(turns_) {
    const Inside calls(*this);
    for (int64_t job = thread; job < jobs; job += team_.size())
      work(job, logits, drafts_[static_cast<size_t>(thread)]);
  });
}

void Model::compute_each(std::span<const Row> rows, std::span<const int32_t> wanted,
                         const std::function<void(int64_t, const float*, Drafts&)>& take) {
  check_may_compute();
  const MutexLock turn(turns_);
  const auto some = [&](size_t from) {
    return wanted.subspan(from, std::min(wanted.size() - from, size_t{kLogitsMax}));
  };
  const float* logits = forward_.run(rows, some(0));
  const optim::FloatingPointMode mode;  // that of the other threads
  for (size_t i = 0; i < wanted.size(); ++i) {
    const size_t at = i % size_t{kLogitsMax};
    if (at == 0 && i > 0) logits = forward_.more_logits(some(i));
    const Inside calls(*this);
    take(static_cast<int64_t>(i), logits + static_cast<int64_t>(at) * forward_.logits_stride(), drafts_[0]);
  }
}

Session::Session(std::shared_ptr<Model> model, int64_t capacity)
    : model_(std::move(model)),
      capacity_(checked_capacity(*model_, capacity)),
      share_(model_->pool(), Cache::pages(model_->spec(), capacity_, model_->rows_max())),
      cache_(model_->spec(), share_) {}

void Session::rewind(int64_t length) {
  if (length < 0 || length > cache_.length())
    throw std::invalid_argument(fmt::format("rewind to {} of a text of {} tokens", length, cache_.length()));
  if (cache_.can_go_on_at(length)) {
    cache_.rewind(length);
    tokens_.resize(static_cast<size_t>(length));
    return;
  }
  std::vector<int32_t> again(tokens_.begin(), tokens_.begin() + length);
  cache_ = Cache(model_->spec(), share_);
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
    if (!cache_.make_room(length() + n)) throw std::logic_error("a session's cache is too small");
    rows.clear();
    for (int64_t i = 0; i < n; ++i)
      rows.push_back({tokens[static_cast<size_t>(first + i)], length() + i, &cache_});
    wanted.clear();
    for (int64_t i = 0; i < n; ++i) {
      if (first + i >= count - wanted_of_last) wanted.push_back(static_cast<int32_t>(i));
    }
    model_->compute_each(rows, wanted, [&](int64_t i, const float* logits, Drafts& drafts) {
      take(first + wanted[static_cast<size_t>(i)], logits, drafts);
    });
    cache_.set_length(length() + n);
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
