// How near the update is to the memory's limit: the time of a loop that only reads and writes the same
// streams over the update's time, both in turn in one process, so what else the machine does falls on both.
// Usage: bench_adam [million elements, default 16 and 64]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cpu_optim/dispatch.h"
#include "cpu_optim/executor.h"

// The limit: every stream is read, and written where the update writes it; hardly any arithmetic. Compiled
// for the widest vectors too.
#if defined(__x86_64__)
#define WIDEST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDEST
#endif

typedef float Floats __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// Sixteen elements.
template <class Vector, class T>
inline __attribute__((always_inline)) void change(T* to, const Vector& by) {
  Vector x;
  std::memcpy(&x, to, sizeof(x));
  if constexpr (sizeof(T) == 4) {
    x += by;
  } else {
    x ^= by;
  }
  std::memcpy(to, &x, sizeof(x));
}

WIDEST void limit_fp32(float* p, float* m, float* v, const float* grad, int64_t n) {
  for (int64_t i = 0; i + 16 <= n; i += 16) {
    Floats g;
    std::memcpy(&g, grad + i, sizeof(g));
    change(p + i, g);
    change(m + i, g);
    change(v + i, g);
  }
}

WIDEST void limit_split(uint16_t* hi, int16_t* lo, float* m, float* v, const uint16_t* grad, int64_t n) {
  const Floats little = Floats{} + 1e-9f;
  for (int64_t i = 0; i + 16 <= n; i += 16) {
    Halves g;
    std::memcpy(&g, grad + i, sizeof(g));
    change(hi + i, g);
    change(lo + i, g);
    change(m + i, little);
    change(v + i, little);
  }
}

namespace overspill::optim {
namespace {

constexpr int kRounds = 15;
constexpr double kBytesFp32 = 7 * 4;           // p, m, v read and written, grad read
constexpr double kBytesSplit = 5 * 2 + 4 * 4;  // hi, lo, m, v read and written, grad read

struct Arrays {
  std::vector<float> p, m, v, grad;
  std::vector<uint16_t> hi, grad16;
  std::vector<int16_t> lo;

  explicit Arrays(int64_t n)
      : p(size(n), 0.02f),
        m(size(n), 1e-3f),
        v(size(n), 1e-6f),
        grad(size(n), 1e-2f),
        hi(size(n), 0x3CA4),
        grad16(size(n), 0x3C24),
        lo(size(n), 100) {}
  static size_t size(int64_t n) { return static_cast<size_t>(n); }
};

using Slice = std::function<void(int64_t begin, int64_t count)>;

double seconds(Executor& executor, int64_t n, const Slice& slice) {
  const int64_t threads = executor.threads();
  const auto start = std::chrono::steady_clock::now();
  executor.parallel_for(threads,
                        [&](int64_t i) { slice(n * i / threads, n * (i + 1) / threads - n * i / threads); });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Row {
  const char* format;
  const char* form;
  double gbytes_per_s, limit_gbytes_per_s, vs_limit;
};

// Round by round the limit, then each form. The ratio is the median of the rounds' own ratios.
std::vector<Row> compare(Executor& executor, int64_t n, const char* format, double bytes, const Slice& limit,
                         const std::vector<std::pair<const char*, Slice>>& forms) {
  std::vector<double> limit_s;
  std::vector<std::vector<double>> form_s(forms.size()), ratios(forms.size());
  for (int round = 0; round < kRounds + 1; ++round) {
    const double base = seconds(executor, n, limit);
    for (size_t f = 0; f < forms.size(); ++f) {
      const double own = seconds(executor, n, forms[f].second);
      if (round == 0) continue;  // warms up
      form_s[f].push_back(own);
      ratios[f].push_back(base / own);
    }
    if (round > 0) limit_s.push_back(base);
  }
  const double gbytes = bytes * static_cast<double>(n) * 1e-9;
  std::vector<Row> rows;
  for (size_t f = 0; f < forms.size(); ++f) {
    rows.push_back(
        {format, forms[f].first, gbytes / median(form_s[f]), gbytes / median(limit_s), median(ratios[f])});
  }
  return rows;
}

std::vector<Row> measure(int64_t n, int threads) {
  const auto executor = make_executor(threads);
  Arrays a(n);
  const AdamFactors f = adam_factors({.lr = 1e-6, .weight_decay = 0.01}, 1000, 1.0);
  const Slice limit32 = [&](int64_t at, int64_t count) {
    limit_fp32(a.p.data() + at, a.m.data() + at, a.v.data() + at, a.grad.data() + at, count);
  };
  const Slice limit16 = [&](int64_t at, int64_t count) {
    limit_split(a.hi.data() + at, a.lo.data() + at, a.m.data() + at, a.v.data() + at, a.grad16.data() + at,
                count);
  };
  std::vector<std::pair<const char*, Slice>> fp32, split;
  for (const Kernels* form : available_kernels()) {
    if (form == available_kernels().front() && n > 20'000'000)
      continue;  // slow; its ratio does not depend on n
    fp32.emplace_back(form->name, [&a, &f, form](int64_t at, int64_t count) {
      form->adam_fp32(a.p.data() + at, a.m.data() + at, a.v.data() + at, a.grad.data() + at, count, f);
    });
    split.emplace_back(form->name, [&a, &f, form](int64_t at, int64_t count) {
      form->adam_split_bf16(a.hi.data() + at, a.lo.data() + at, a.m.data() + at, a.v.data() + at,
                            a.grad16.data() + at, count, f);
    });
  }
  std::vector<Row> rows = compare(*executor, n, "fp32", kBytesFp32, limit32, fp32);
  const std::vector<Row> more = compare(*executor, n, "exact", kBytesSplit, limit16, split);
  rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

}  // namespace
}  // namespace overspill::optim

int main(int argc, char** argv) {
  using namespace overspill::optim;
  std::vector<int64_t> millions{16, 64};
  if (argc > 1) millions = {std::max(1L, std::atol(argv[1]))};
  nlohmann::json result{{"bench", "adam"}, {"isa", instruction_set()}, {"rounds", kRounds}};
  std::printf("%9s %7s %6s %9s %8s %8s %9s\n", "elements", "threads", "format", "isa", "GB/s", "limit",
              "vs limit");
  for (const int64_t million : millions) {
    for (const int threads : {1, 2}) {
      for (const Row& row : measure(million << 20, threads)) {
        std::printf("%7ldMi %7d %6s %9s %8.2f %8.2f %9.3f\n", static_cast<long>(million), threads, row.format,
                    row.form, row.gbytes_per_s, row.limit_gbytes_per_s, row.vs_limit);
        std::fflush(stdout);
        result["rows"].push_back({{"elements", million << 20},
                                  {"threads", threads},
                                  {"format", row.format},
                                  {"isa", row.form},
                                  {"gbytes_per_s", row.gbytes_per_s},
                                  {"limit_gbytes_per_s", row.limit_gbytes_per_s},
                                  {"vs_limit", row.vs_limit}});
        // The headline: the form in use, in the last measurement, of most elements and threads.
        if (row.form == instruction_set()) result[std::string(row.format) + "_vs_limit"] = row.vs_limit;
      }
    }
  }
  std::printf("RESULT %s\n", result.dump().c_str());
  return 0;
}
