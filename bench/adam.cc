// How near the update is to the memory's limit: the time of a loop that only reads and writes the same
// streams over the update's time, both in turn in one process, so what else the machine does falls on both.
//
//   bench_adam [millions of elements ...]    every format and instruction set, a JSON row each; default 1 and
//                                            64, 256 needs 9 GB
//   bench_adam --turns FORMAT MILLIONS THREADS
//       prints "ready", then answers each line read: "go" (one update) or "limit" with the seconds it took;
//       for measurements in turn with other programs
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cpu_optim/dispatch.h"
#include "cpu_optim/executor.h"
#include "cpu_optim/update.h"

// The limit: every stream is read, and written where the update writes it; hardly any arithmetic. Compiled
// for the widest vectors too.
#if defined(__x86_64__)
#define WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDEST
#endif

// 64 elements of kBytes each.
template <int kBytes>
inline __attribute__((always_inline)) void change(std::byte* to, int64_t i, uint64_t by) {
  uint64_t words[kBytes * 8];
  std::memcpy(words, to + i * kBytes, sizeof(words));
  for (uint64_t& word : words) word ^= by;
  std::memcpy(to + i * kBytes, words, sizeof(words));
}
template <int kBytes>
inline __attribute__((always_inline)) void write(std::byte* to, int64_t i, uint64_t what) {
  uint64_t words[kBytes * 8];
  for (uint64_t& word : words) word = what;
  std::memcpy(to + i * kBytes, words, sizeof(words));
}
template <int kBytes>
inline __attribute__((always_inline)) uint64_t read(const std::byte* from, int64_t i) {
  uint64_t words[kBytes * 8], all = 0;
  std::memcpy(words, from + i * kBytes, sizeof(words));
  for (const uint64_t word : words) all |= word;
  return all & 1;
}

using Streams = std::byte* const*;
WIDEST void limit_fp32(Streams s, const std::byte* grad, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) {
    const uint64_t g = read<4>(grad, i);
    change<4>(s[0], i, g), change<4>(s[1], i, g), change<4>(s[2], i, g);
  }
}
WIDEST void limit_exact(Streams s, const std::byte* grad, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) {
    const uint64_t g = read<2>(grad, i);
    change<2>(s[0], i, g), change<2>(s[1], i, g), change<4>(s[2], i, g), change<4>(s[3], i, g);
  }
}
WIDEST void limit_fp16(Streams s, const std::byte* grad, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) {
    const uint64_t g = read<2>(grad, i);
    write<2>(s[0], i, g), change<4>(s[1], i, g), change<4>(s[2], i, g), change<4>(s[3], i, g);
  }
}
WIDEST void limit_compact(Streams s, const std::byte* grad, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) {
    const uint64_t g = read<2>(grad, i);
    change<2>(s[0], i, g), change<2>(s[1], i, g), change<2>(s[2], i, g), change<2>(s[3], i, g);
  }
}
WIDEST void limit_eight_bit(Streams s, const std::byte* grad, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += 64) {  // the scales, 1.6 %, are left out
    const uint64_t g = read<2>(grad, i);
    change<2>(s[0], i, g), change<1>(s[1], i, g), change<1>(s[2], i, g), change<1>(s[3], i, g);
  }
}

namespace overspill::optim {
namespace {

constexpr int kRounds = 11;
constexpr int64_t kGrain = 256 << 10;
// Streams that run at one rate and start at the same place in a page get in one another's way in the
// first-level cache: components start so many bytes apart from that (docs/update.md).
constexpr size_t kStagger = 832;

struct Kind {
  Format format;
  Element element;
  double bytes;  // moved an element
  void (*limit)(Streams, const std::byte*, int64_t, int64_t);
};
constexpr Kind kKinds[] = {{Format::fp32, Element::fp32, 28, limit_fp32},
                           {Format::exact, Element::bf16, 26, limit_exact},
                           {Format::fp16, Element::fp16, 28, limit_fp16},
                           {Format::compact, Element::bf16, 18, limit_compact},
                           {Format::eight_bit, Element::bf16, 12, limit_eight_bit}};

/// Weights, states and gradients of one format, of ordinary values.
struct Arrays {
  const Kind& kind;
  int64_t elements;
  std::vector<std::vector<std::byte>> components;
  std::vector<std::byte*> pointers;
  std::vector<std::byte> gradient;

  Arrays(const Kind& kind_, int64_t n) : kind(kind_), elements(n) {
    const Optimizer adam = optimizer_of(AdamConfig{});
    for (const ComponentSpec& spec : optim::components(adam, kind.format)) {
      const size_t apart = kStagger * (components.size() + 1);
      components.emplace_back(static_cast<size_t>(spec.bytes(n)) + apart);
      pointers.push_back(components.back().data() + apart);
    }
    gradient.resize(static_cast<size_t>(n * bytes(kind.element)));
    constexpr int64_t kAtATime = 1 << 16;
    std::vector<float> w(kAtATime), m(kAtATime), v(kAtATime), g(kAtATime);
    for (int64_t i = 0; i < kAtATime; ++i) {
      const auto k = static_cast<size_t>(i);
      w[k] = 0.001f * static_cast<float>(i % 97 - 48), m[k] = 1e-5f * static_cast<float>(i % 89 - 44);
      v[k] = 1e-9f * static_cast<float>(i % 83 + 1), g[k] = 1e-3f * static_cast<float>(i % 79 - 39);
    }
    for (int64_t at = 0; at < n; at += kAtATime) {
      const Range range{at, at + kAtATime};
      store_weights(adam, kind.format, piece(), range, w);
      store_state(adam, kind.format, piece(), range, 0, m);
      store_state(adam, kind.format, piece(), range, 1, v);
      std::byte* to = gradient.data() + at * bytes(kind.element);
      if (kind.element == Element::fp32) std::memcpy(to, g.data(), g.size() * 4);
      if (kind.element == Element::bf16) narrow(g, std::span(reinterpret_cast<uint16_t*>(to), g.size()));
      if (kind.element == Element::fp16) narrow(g, std::span(reinterpret_cast<Fp16*>(to), g.size()));
    }
  }
  Piece piece() const { return {.components = pointers, .elements = elements, .seed = 1}; }
};

double seconds(Executor& executor, int64_t n, const std::function<void(int64_t, int64_t)>& slice) {
  const int64_t slices = (n + kGrain - 1) / kGrain;
  const auto start = std::chrono::steady_clock::now();
  executor.parallel_for(slices, [&](int64_t i) { slice(i * kGrain, std::min(n, (i + 1) * kGrain)); });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double limit_seconds(Executor& executor, const Arrays& arrays) {
  return seconds(executor, arrays.elements, [&](int64_t begin, int64_t end) {
    arrays.kind.limit(arrays.pointers.data(), arrays.gradient.data(), begin, end);
  });
}

const Hyper kHyper = AdamConfig{.lr = 1e-6, .weight_decay = 0.01};

double form_seconds(Executor& executor, const Arrays& arrays, const Kernels& form, int64_t step) {
  const Factors factors = make_factors(kHyper, step, 1.0);
  const UpdateKernel kernel = form.update_of(optimizer_of(kHyper), arrays.kind.format, arrays.kind.element);
  return seconds(executor, arrays.elements, [&](int64_t begin, int64_t end) {
    kernel({.components = arrays.pointers.data(),
            .gradient = arrays.gradient.data(),
            .elements = arrays.elements,
            .begin = begin,
            .end = end,
            .factors = &std::get<Adam::Factors>(factors.of),
            .grad_scale = factors.grad_scale,
            .noise = make_noise(1, 0, step)});
  });
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Round by round the limit of fp32, the format's own, then each form. Ratios are medians of the rounds' own.
void measure(const Kind& kind, const Arrays& fp32, int threads, nlohmann::json& result) {
  const auto executor = make_executor(threads);
  const int64_t n = fp32.elements;
  std::unique_ptr<Arrays> own;
  if (kind.format != Format::fp32) own = std::make_unique<Arrays>(kind, n);
  const Arrays& arrays = own ? *own : fp32;
  std::vector<const Kernels*> forms;
  for (const Kernels* form : available_kernels()) {
    // Slow; its ratio does not depend on n.
    if (form != available_kernels().front() || n < 10'000'000) forms.push_back(form);
  }
  std::vector<double> limits;
  std::vector<std::vector<double>> times(forms.size()), ratios(forms.size()), gains(forms.size());
  for (int round = -1; round < kRounds; ++round) {
    const double limit32 = limit_seconds(*executor, fp32), limit = limit_seconds(*executor, arrays);
    for (size_t f = 0; f < forms.size(); ++f) {
      const double time = form_seconds(*executor, arrays, *forms[f], 1000 + round);
      if (round < 0) continue;  // warms up
      times[f].push_back(time), ratios[f].push_back(limit / time), gains[f].push_back(limit32 / time);
    }
    if (round >= 0) limits.push_back(limit);
  }
  for (size_t f = 0; f < forms.size(); ++f) {
    const auto count = static_cast<double>(n);
    const double per_s = count / median(times[f]);
    const nlohmann::json row{{"elements", n},
                             {"threads", threads},
                             {"format", name(kind.format)},
                             {"isa", forms[f]->name},
                             {"elements_per_s", per_s},
                             {"gbytes_per_s", per_s * kind.bytes * 1e-9},
                             {"limit_gbytes_per_s", count / median(limits) * kind.bytes * 1e-9},
                             {"vs_limit", median(ratios[f])},
                             {"vs_fp32_limit", median(gains[f])}};
    std::printf("%s\n", row.dump().c_str());
    std::fflush(stdout);
    result["rows"].push_back(row);
    // The headline: the form in use, in the last measurement, of most elements and threads.
    if (forms[f]->name == instruction_set()) {
      result[std::string(name(kind.format)) + "_vs_limit"] = median(ratios[f]);
      result[std::string(name(kind.format)) + "_vs_fp32_limit"] = median(gains[f]);
    }
  }
}

int turns(std::string_view format, int64_t millions, int threads) {
  const Kind* kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                  [&](const Kind& k) { return k.format == format_named(format); });
  const auto executor = make_executor(threads);
  const Arrays arrays(*kind, millions << 20);
  std::printf("ready\n");
  std::fflush(stdout);
  int64_t step = 1000;
  for (std::string line; std::getline(std::cin, line);) {
    double time = 0;
    if (line == "go") {
      const auto start = std::chrono::steady_clock::now();
      parallel_update(*executor, kind->format, arrays.piece(), {arrays.gradient.data(), kind->element},
                      make_factors(kHyper, step++, 1.0));
      time = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    } else if (line == "limit") {
      time = limit_seconds(*executor, arrays);
    } else {
      std::fprintf(stderr, "bench_adam: '%s' is neither go nor limit\n", line.c_str());
      return 2;
    }
    std::printf("%.9f\n", time);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace overspill::optim

int main(int argc, char** argv) {
  using namespace overspill::optim;
  try {
    if (argc == 5 && std::string_view(argv[1]) == "--turns")
      return turns(argv[2], std::max(1L, std::atol(argv[3])), std::max(1, std::atoi(argv[4])));
    std::vector<int64_t> millions;
    for (int i = 1; i < argc; ++i) millions.push_back(std::max(1L, std::atol(argv[i])));
    if (millions.empty()) millions = {1, 64};
    nlohmann::json result{{"bench", "adam"}, {"isa", instruction_set()}, {"rounds", kRounds}};
    for (const int64_t million : millions) {
      const Arrays fp32(kKinds[0], million << 20);
      for (const int threads : {1, 2}) {
        for (const Kind& kind : kKinds) measure(kind, fp32, threads, result);
      }
    }
    std::printf("RESULT %s\n", result.dump().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_adam: %s\n", error.what());
    return 1;
  }
  return 0;
}
