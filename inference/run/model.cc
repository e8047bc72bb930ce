#include "inference/run/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "cpu_optim/floating_point.h"
#include "inference/error.h"
#include "inference/format/model_folder.h"
#include "inference/model/families.h"
#include "inference/run/cache.h"
#include "inference/run/forward.h"
#include "inference/run/sampler.h"
#include "inference/run/speed.h"
#include "inference/run/team.h"
#include "inference/run/turns.h"
#include "inference/run/weights.h"

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

}  // namespace

/// All of a model. Each member is used by those behind it.
struct Model::Parts {
  Parts(const std::filesystem::path& path, const ModelOptions& options, const Kernels& kernels_given)
      : folder(path),
        spec(describe(folder)),
        kernels(kernels_given),
        team(options.threads),
        weights(load_weights(folder, spec, team, options.weights,
                             [&](bool has_fp32) { return weight_bytes_max(options, has_fp32); })),
        pool(spec, element_of(options.cache, weights.has_fp32), cache_pages),
        forward(spec, weights, team, kernels, options.rows_max),
        drafts(static_cast<size_t>(options.threads)) {}

  int64_t weight_bytes_max(const ModelOptions& options, bool has_fp32);
  /// Never changes, so it needs no turn.
  int64_t rows_max() const NO_THREAD_SAFETY_ANALYSIS { return forward.rows_max(); }

  const ModelFolder folder;
  const ModelSpec spec;
  const Kernels& kernels;
  Team team;
  int64_t cache_pages = Pool::kUnlimited;
  Weights weights;
  Pool pool;
  Turns turns;
  Forward forward GUARDED_BY(turns);
  std::vector<Drafts> drafts GUARDED_BY(turns);  // by thread
};

/// What the budget leaves for weights beside caches and buffers.
int64_t Model::Parts::weight_bytes_max(const ModelOptions& options, bool has_fp32) {
  if (!options.budget_bytes) return std::numeric_limits<int64_t>::max();
  cache_pages = Pool::pages(spec, options.positions);
  const int64_t caches = cache_pages * Pool::page_bytes(spec, element_of(options.cache, has_fp32));
  const int64_t buffers = Forward::bytes(spec, options.threads, options.rows_max) +
                          options.threads * Drafts::bytes(spec.vocabulary);
  const int64_t left = *options.budget_bytes - caches - buffers;
  if (left >= 0) return left;
  throw NoRoom(
      fmt::format("{}: a budget of {} bytes does not hold {} for the cache of {} positions and {} for "
                  "buffers; give a larger "
                  "one, or fewer positions",
                  folder.path().string(), *options.budget_bytes, caches, options.positions, buffers));
}

Model::Model(const std::filesystem::path& folder, const ModelOptions& options, const Kernels& kernels)
    : parts_(std::make_unique<Parts>(folder, options, kernels)) {}

Model::~Model() = default;

const ModelSpec& Model::spec() const {
  return parts_->spec;
}

const std::vector<int32_t>& Model::end_tokens() const {
  return parts_->folder.end_tokens();
}

const Kernels& Model::kernels() const {
  return parts_->kernels;
}

int Model::threads() const {
  return parts_->team.size();
}

Pool& Model::pool() {
  return parts_->pool;
}

int64_t Model::rows_max() const {
  return parts_->rows_max();
}

bool Model::is_inside() const {
  return inside == this;
}

void Model::check_may_compute() const {
  check_process(parts_->team.process());
  if (is_inside()) {
    throw std::logic_error(
        "a constraint computes with the model that calls it, which would wait for itself; open the folder "
        "once more for that");
  }
}

double Model::seconds_a_pass() {
  check_may_compute();
  const MutexLock turn(parts_->turns);
  parts_->forward.throw_if_unread();
  const std::span<const std::byte> stays = parts_->weights.memory.span();
  const double memory =
      read_bytes_per_second(parts_->team, stays.first(std::min(stays.size(), kSampleBytes)));
  double all = static_cast<double>(parts_->weights.memory.bytes()), reading = 0;
  const auto take = [&](double in_memory, double of_disk, const Reading& trial) {
    all += in_memory;
    if (trial.bytes > 0) reading += of_disk * trial.seconds / trial.bytes;
  };
  if (LayerStream* const stream = parts_->weights.stream.get()) {
    const auto bytes = static_cast<double>(stream->bytes());
    take(bytes, bytes, stream->try_reading(kTrialSeconds));
  }
  if (ExpertStore* const experts = parts_->weights.experts.get()) {
    take(static_cast<double>(experts->bytes_a_token()), static_cast<double>(experts->read_bytes_a_token()),
         experts->try_reading(kTrialSeconds));
  }
  return std::max(memory > 0 ? all / memory : 0, reading);
}

int64_t Model::weight_bytes() const {
  return parts_->weights.memory.bytes() + (parts_->weights.experts ? parts_->weights.experts->bytes() : 0);
}

int64_t Model::streamed_bytes() const {
  return (parts_->weights.stream ? parts_->weights.stream->bytes() : 0) +
         (parts_->weights.experts ? parts_->weights.experts->read_bytes_a_token() : 0);
}

int64_t Model::read_bytes() const {
  check_process(parts_->team.process());
  const double bytes = (parts_->weights.stream ? parts_->weights.stream->reading().bytes : 0) +
                       (parts_->weights.experts ? parts_->weights.experts->reading().bytes : 0);
  return static_cast<int64_t>(bytes);
}

void Model::check_tokens(std::span<const int32_t> tokens) const {
  if (tokens.empty()) throw std::invalid_argument("no tokens to read");
  for (const int32_t token : tokens) {
    if (token < 0 || token >= parts_->spec.vocabulary)
      throw std::invalid_argument(
          fmt::format("token {} is not one of the vocabulary's {}", token, parts_->spec.vocabulary));
  }
}

void Model::check_length(int64_t tokens) const {
  const int64_t most = parts_->spec.positions ? parts_->spec.context : kPositionsMax;
  if (tokens < 1 || tokens > most) {
    throw std::invalid_argument(
        fmt::format("a text of {} tokens is asked for, and this {} takes from 1 to {}", tokens,
                    parts_->spec.family, most));
  }
}

void Model::compute(std::span<const Row> rows, std::span<const int32_t> wanted, int64_t jobs,
                    const std::function<void(int64_t, const Logits&, Drafts&)>& work) {
  check_may_compute();
  const MutexLock turn(parts_->turns);
  const Logits logits{parts_->forward.run(rows, wanted), parts_->forward.logits_stride()};
  const optim::FloatingPointMode mode;  // that of the other threads
  if (jobs < 1) return;
  if (jobs == 1) {
    const Inside calls(*this);
    return work(0, logits, parts_->drafts[0]);
  }
  parts_->team.run([&](int thread) REQUIRES(parts_->turns) {
    const Inside calls(*this);
    for (int64_t job = thread; job < jobs; job += parts_->team.size())
      work(job, logits, parts_->drafts[static_cast<size_t>(thread)]);
  });
}

void Model::compute_each(std::span<const Row> rows, std::span<const int32_t> wanted,
                         const std::function<void(int64_t, const float*, Drafts&)>& take) {
  check_may_compute();
  const MutexLock turn(parts_->turns);
  const auto some = [&](size_t from) {
    return wanted.subspan(from, std::min(wanted.size() - from, size_t{kLogitsMax}));
  };
  const float* logits = parts_->forward.run(rows, some(0));
  const optim::FloatingPointMode mode;  // that of the other threads
  for (size_t i = 0; i < wanted.size(); ++i) {
    const size_t at = i % size_t{kLogitsMax};
    if (at == 0 && i > 0) logits = parts_->forward.more_logits(some(i));
    const Inside calls(*this);
    take(static_cast<int64_t>(i), logits + static_cast<int64_t>(at) * parts_->forward.logits_stride(),
         parts_->drafts[0]);
  }
}

}  // namespace overspill::inference
