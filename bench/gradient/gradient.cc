// What happens to gradients before the update, by Google Benchmark: bytes per second of each pass, in cache
// and out of it, on the widest instruction set (OVERSPILL_ISA limits it).
#include "cpu_optim/gradient.h"

#include <benchmark/benchmark.h>

#include <cstdint>
#include <span>
#include <vector>

namespace {

using namespace overspill::optim;

constexpr int64_t kInCache = 64 << 10;
constexpr int64_t kInMemory = 32 << 20;

template <class T>
void squares_of(benchmark::State& state) {
  const std::vector<T> values(static_cast<size_t>(state.range(0)), T(1));
  for (auto _ : state) benchmark::DoNotOptimize(squares(std::span<const T>(values)));
  state.SetBytesProcessed(state.iterations() * state.range(0) * static_cast<int64_t>(sizeof(T)));
}

template <class From, class To>
void accumulate_into(benchmark::State& state) {
  const std::vector<From> from(static_cast<size_t>(state.range(0)));
  std::vector<To> to(from.size());
  for (auto _ : state) {
    accumulate(std::span<const From>(from), std::span<To>(to));
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) *
                          static_cast<int64_t>(sizeof(From) + 2 * sizeof(To)));
}

BENCHMARK(squares_of<uint16_t>)->Name("squares/bf16")->Arg(kInCache)->Arg(kInMemory);
BENCHMARK(squares_of<float>)->Name("squares/fp32")->Arg(kInCache)->Arg(kInMemory);
BENCHMARK(accumulate_into<uint16_t, uint16_t>)
    ->Name("accumulate/bf16_to_bf16")
    ->Arg(kInCache)
    ->Arg(kInMemory);
BENCHMARK(accumulate_into<uint16_t, float>)->Name("accumulate/bf16_to_fp32")->Arg(kInCache)->Arg(kInMemory);
BENCHMARK(accumulate_into<float, float>)->Name("accumulate/fp32_to_fp32")->Arg(kInCache)->Arg(kInMemory);

}  // namespace

BENCHMARK_MAIN();
