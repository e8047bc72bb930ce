// Our contender of bench/adam/run.py: AdamW in one format over one piece, and the loops that only read and
// write the same streams.
//
//   bench_adam FORMAT MILLIONS     prints a line of JSON when it is ready, and answers each line it reads:
//       go THREADS TIMES             seconds of one update
//       limit FORM THREADS TIMES     seconds of one such loop (limits.h)
//       compute 1 TIMES              seconds of an update of elements that stay in a core's cache, one thread
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/adam/limits.h"
#include "cpu_optim/dispatch.h"
#include "cpu_optim/executor.h"
#include "cpu_optim/update.h"

namespace overspill::bench {
namespace {

using namespace optim;

constexpr int64_t kGrain = 256 << 10;
// Streams that run at one rate and start at the same place in a page get in one another's way in the
// first-level cache: components start so many bytes apart from that (docs/update.md).
constexpr int64_t kStagger = 832;
constexpr int64_t kInCache = 32 << 10;  // elements; half a MB of streams at most

/// Zeroed memory in huge pages, where the system gives them to those who ask.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : bytes_(static_cast<size_t>(bytes)),
        at_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (at_ == MAP_FAILED) throw std::bad_alloc();
    madvise(at_, bytes_, MADV_HUGEPAGE);  // refused, it stays as it is
  }
  ~Memory() {
    if (at_ != nullptr) munmap(at_, bytes_);
  }
  Memory(Memory&& other) noexcept : bytes_(other.bytes_), at_(std::exchange(other.at_, nullptr)) {}
  Memory& operator=(Memory&&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(at_); }

 private:
  size_t bytes_;
  void* at_;
};

Element gradient_of(Format format) {
  if (format == Format::fp32) return Element::fp32;
  return format == Format::fp16 ? Element::fp16 : Element::bf16;
}

const Hyper kHyper = AdamConfig{.lr = 1e-6, .weight_decay = 0.01};

/// Weights, states and gradients of one format, of ordinary values.
struct Arrays {
  Format format;
  Element element;
  int64_t elements;
  std::vector<Memory> memory;
  std::vector<std::byte*> pointers;
  std::byte* gradient;

  Arrays(Format format_, int64_t n, Executor& executor)
      : format(format_), element(gradient_of(format_)), elements(n) {
    for (const ComponentSpec& spec : components(optimizer_of(kHyper), format))
      pointers.push_back(staggered(spec.bytes(n)));
    gradient = staggered(n * bytes(element));
    const Values values;
    executor.parallel_for(n / Values::kCount, [&](int64_t i) { fill(i * Values::kCount, values); });
  }
  Piece piece() const { return {.components = pointers, .elements = elements, .seed = 1}; }

 private:
  struct Values {
    static constexpr int64_t kCount = 1 << 16;
    std::vector<float> w, m, v, g;
    Values() : w(kCount), m(kCount), v(kCount), g(kCount) {
      for (int64_t i = 0; i < kCount; ++i) {
        const auto k = static_cast<size_t>(i);
        w[k] = 0.001f * static_cast<float>(i % 97 - 48), m[k] = 1e-5f * static_cast<float>(i % 89 - 44);
        v[k] = 1e-9f * static_cast<float>(i % 83 + 1), g[k] = 1e-3f * static_cast<float>(i % 79 - 39);
      }
    }
  };
  std::byte* staggered(int64_t bytes) {
    const int64_t apart = kStagger * static_cast<int64_t>(memory.size() + 1);
    return memory.emplace_back(bytes + apart).data() + apart;
  }
  void fill(int64_t at, const Values& values) const {
    const Optimizer adam = optimizer_of(kHyper);
    const Range range{at, at + Values::kCount};
    store_weights(adam, format, piece(), range, values.w);
    store_state(adam, format, piece(), range, 0, values.m);
    store_state(adam, format, piece(), range, 1, values.v);
    std::byte* to = gradient + at * bytes(element);
    const std::vector<float>& g = values.g;
    if (element == Element::fp32) std::memcpy(to, g.data(), g.size() * 4);
    if (element == Element::bf16) narrow(g, std::span(reinterpret_cast<uint16_t*>(to), g.size()));
    if (element == Element::fp16) narrow(g, std::span(reinterpret_cast<Fp16*>(to), g.size()));
  }
};

class Contender {
 public:
  Contender(Format format, int64_t elements) : cores_(make_executor(2)), arrays_(format, elements, *cores_) {}

  nlohmann::json hello() const {
    nlohmann::json forms = nlohmann::json::array();
    for (const LimitForm& form : limit_forms()) forms.push_back(form.name);
    return {{"isa", instruction_set()}, {"limits", forms}};
  }

  /// Seconds that one of what the line asks for took.
  double answer(const std::string& line) {
    std::istringstream words(line);
    std::string what, form;
    int threads = 0, times = 0;
    words >> what;
    if (what == "limit") words >> form;
    words >> threads >> times;
    if (!words || threads < 1 || times < 1) throw std::invalid_argument("not understood: '" + line + "'");
    if (executor_ == nullptr || executor_->threads() != threads) executor_ = make_executor(threads);
    if (what == "go") return seconds(times, [&] { update_all(); });
    if (what == "compute") return seconds(times, [&] { update_cached(); });
    if (what == "limit") return seconds(times, [&, loop = limit_named(form)] { run_limit(loop); });
    throw std::invalid_argument("not understood: '" + line + "'");
  }

 private:
  Limit limit_named(const std::string& name) const {
    for (const LimitForm& form : limit_forms()) {
      if (form.name == name) return form.of[static_cast<int>(arrays_.format)];
    }
    throw std::invalid_argument("no limit is called '" + name + "'");
  }
  template <class Work>
  double seconds(int times, Work work) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / times;
  }
  Gradient gradient() const { return {arrays_.gradient, arrays_.element}; }
  void update_all() {
    parallel_update(*executor_, arrays_.format, arrays_.piece(), gradient(),
                    make_factors(kHyper, step_++, 1.0));
  }
  void update_cached() {
    update(arrays_.format, arrays_.piece(), gradient(), {0, kInCache}, make_factors(kHyper, step_++, 1.0));
  }
  void run_limit(Limit loop) {
    const int64_t n = arrays_.elements;
    executor_->parallel_for((n + kGrain - 1) / kGrain, [&](int64_t i) {
      loop(arrays_.pointers.data(), arrays_.gradient, i * kGrain, std::min(n, (i + 1) * kGrain));
    });
  }

  std::unique_ptr<Executor> cores_;
  Arrays arrays_;
  std::unique_ptr<Executor> executor_;
  int64_t step_ = 1000;
};

}  // namespace
}  // namespace overspill::bench

int main(int argc, char** argv) {
  using namespace overspill;
  constexpr const char* kUsage = "usage: bench_adam FORMAT MILLIONS";
  if (argc == 2 && std::string_view(argv[1]) == "--help") {
    std::cout << kUsage << "\n";
    return 0;
  }
  try {
    if (argc != 3 || std::atol(argv[2]) < 1) throw std::invalid_argument(kUsage);
    bench::Contender contender(optim::format_named(argv[1]), int64_t{std::atol(argv[2])} << 20);
    std::cout << contender.hello().dump() << std::endl;
    for (std::string line; std::getline(std::cin, line);)
      std::cout << nlohmann::json{{"seconds", contender.answer(line)}}.dump() << std::endl;
  } catch (const std::exception& error) {
    std::cerr << "bench_adam: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
