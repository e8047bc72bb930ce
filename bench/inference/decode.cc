// Decoding beside a loop that only reads: the same bytes, in the same pages, by the same threads, in turn.
// The loop is the limit that memory sets.   bench_inference_decode FOLDER [THREADS] [TURNS]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "inference/format/model_folder.h"
#include "inference/model/families.h"
#include "inference/run/forward.h"
#include "inference/run/speed.h"

namespace {

using namespace overspill::inference;
using Clock = std::chrono::steady_clock;

constexpr int64_t kPrompt = 512, kPassesATurn = 8;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

int32_t likeliest(const float* logits, int64_t vocabulary) {
  return static_cast<int32_t>(std::max_element(logits, logits + vocabulary) - logits);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: bench_inference_decode FOLDER [THREADS] [TURNS]\n");
    return 2;
  }
  const int threads = argc > 2 ? std::atoi(argv[2]) : static_cast<int>(std::thread::hardware_concurrency());
  const int turns = argc > 3 ? std::atoi(argv[3]) : 40;
  const ModelFolder folder(argv[1]);
  const ModelSpec spec = describe(folder);
  Team team(std::max(1, threads));
  const Weights weights = load_weights(folder, spec, team);
  Forward forward(spec, weights, team, kernels(), 128);
  Pool pool(spec, weights.has_fp32 ? Element::fp32 : Element::bf16, Pool::kUnlimited);
  const int64_t positions = kPrompt + int64_t{turns} * kPassesATurn + 1;
  Share share(pool, Pool::pages(spec, positions));
  Cache cache(spec, share);
  cache.make_room(positions);

  std::vector<Row> rows;
  int32_t token = 0;
  const auto pass = [&](const std::vector<int32_t>& tokens, int64_t first) {
    rows.clear();
    for (const int32_t id : tokens) rows.push_back({id, first++, &cache});
    const int32_t last[] = {static_cast<int32_t>(rows.size() - 1)};
    token = likeliest(forward.run(rows, last), spec.vocabulary);
  };
  std::vector<double> prefills;
  for (int turn = 0; turn < 3; ++turn) {
    const auto begin = Clock::now();
    for (int64_t first = 0; first < kPrompt; first += 128) {
      std::vector<int32_t> tokens(128);
      std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(first) % 256);
      pass(tokens, first);
    }
    prefills.push_back(seconds_since(begin));
  }

  // A tied embedding is read once, as the head; one row of another is next to nothing.
  const int64_t idle = spec.head ? weights.embedding.bytes() : 0;
  const std::span<const std::byte> read = weights.memory.span().subspan(static_cast<size_t>(idle));
  const auto bytes = std::ssize(read);
  std::vector<double> decode, reading, ratio;
  int64_t position = kPrompt;
  for (int turn = 0; turn < turns; ++turn) {
    const auto begin = Clock::now();
    for (int64_t i = 0; i < kPassesATurn; ++i) pass({token}, position++);
    decode.push_back(seconds_since(begin) / kPassesATurn);
    double total = 0;
    for (int64_t i = 0; i < kPassesATurn; ++i)
      total += static_cast<double>(bytes) / read_bytes_per_second(team, read);
    reading.push_back(total / kPassesATurn);
    ratio.push_back(reading.back() / decode.back());
  }
  const nlohmann::json result = {
      {"kernels", kernels().name},
      {"threads", team.size()},
      {"bytes", bytes},
      {"decode_seconds", median(decode)},
      {"decode_seconds_least", *std::ranges::min_element(decode)},
      {"read_seconds", median(reading)},
      {"read_seconds_least", *std::ranges::min_element(reading)},
      {"decode_vs_read_loop", median(ratio)},
      {"decode_vs_read_loop_of_least",
       *std::ranges::min_element(reading) / *std::ranges::min_element(decode)},
      {"read_gb_per_s", static_cast<double>(bytes) / median(reading) / 1e9},
      {"tokens_per_s", 1 / median(decode)},
      {"prefill_tokens_per_s", static_cast<double>(kPrompt) / *std::ranges::min_element(prefills)},
  };
  fmt::print("RESULT {}\n", result.dump());
  return 0;
}
