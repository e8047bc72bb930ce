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

constexpr int64_t kPrompt = 512, kPassesATurn = 8, kRowsMax = 128;

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

/// A model, and one text that it decodes.
struct Decoder {
  Decoder(const char* path, int threads, int64_t positions)
      : folder(path),
        spec(describe(folder)),
        team(std::max(1, threads)),
        weights(load_weights(folder, spec, team)),
        forward(spec, weights, team, kernels(), kRowsMax),
        pool(spec, weights.has_fp32 ? Element::fp32 : Element::bf16, Pool::kUnlimited),
        share(pool, Pool::pages(spec, positions)),
        cache(spec, share) {
    cache.make_room(positions);
  }

  /// Computes the tokens, of which the first is at position `first`; `token` becomes the likeliest one
  /// behind.
  void pass(const std::vector<int32_t>& tokens, int64_t first) {
    rows.clear();
    for (const int32_t id : tokens) rows.push_back({id, first++, &cache});
    const int32_t last[] = {static_cast<int32_t>(rows.size() - 1)};
    token = likeliest(forward.run(rows, last), spec.vocabulary);
  }

  /// What a pass of one token reads. A tied embedding is read once, as the head; one row of another is next
  /// to nothing.
  std::span<const std::byte> read() const {
    const int64_t idle = spec.head ? weights.embedding.bytes() : 0;
    return weights.memory.span().subspan(static_cast<size_t>(idle));
  }

  const ModelFolder folder;
  const ModelSpec spec;
  Team team;
  const Weights weights;
  Forward forward;
  Pool pool;
  Share share;
  Cache cache;
  std::vector<Row> rows;
  int32_t token = 0;
};

double prefill_seconds(Decoder& decoder) {
  const auto begin = Clock::now();
  for (int64_t first = 0; first < kPrompt; first += kRowsMax) {
    std::vector<int32_t> tokens(kRowsMax);
    std::iota(tokens.begin(), tokens.end(), static_cast<int32_t>(first) % 256);
    decoder.pass(tokens, first);
  }
  return seconds_since(begin);
}

/// Seconds a pass, and seconds in which the loop reads the same.
struct Times {
  std::vector<double> decode, reading, ratio;
};

Times in_turn(Decoder& decoder, int turns) {
  Times times;
  const std::span<const std::byte> read = decoder.read();
  int64_t position = kPrompt;
  for (int turn = 0; turn < turns; ++turn) {
    const auto begin = Clock::now();
    for (int64_t i = 0; i < kPassesATurn; ++i) decoder.pass({decoder.token}, position++);
    times.decode.push_back(seconds_since(begin) / kPassesATurn);
    double total = 0;
    for (int64_t i = 0; i < kPassesATurn; ++i)
      total += static_cast<double>(std::ssize(read)) / read_bytes_per_second(decoder.team, read);
    times.reading.push_back(total / kPassesATurn);
    times.ratio.push_back(times.reading.back() / times.decode.back());
  }
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "usage: bench_inference_decode FOLDER [THREADS] [TURNS]\n");
    return 2;
  }
  const int threads = argc > 2 ? std::atoi(argv[2]) : static_cast<int>(std::thread::hardware_concurrency());
  const int turns = argc > 3 ? std::atoi(argv[3]) : 40;
  Decoder decoder(argv[1], threads, kPrompt + int64_t{turns} * kPassesATurn + 1);
  std::vector<double> prefills;
  for (int turn = 0; turn < 3; ++turn) prefills.push_back(prefill_seconds(decoder));
  const Times times = in_turn(decoder, turns);
  const auto bytes = std::ssize(decoder.read());
  const double decode_least = *std::ranges::min_element(times.decode);
  const double reading_least = *std::ranges::min_element(times.reading);
  const nlohmann::json result = {
      {"kernels", kernels().name},
      {"threads", decoder.team.size()},
      {"bytes", bytes},
      {"decode_seconds", median(times.decode)},
      {"decode_seconds_least", decode_least},
      {"read_seconds", median(times.reading)},
      {"read_seconds_least", reading_least},
      {"decode_vs_read_loop", median(times.ratio)},
      {"decode_vs_read_loop_of_least", reading_least / decode_least},
      {"read_gb_per_s", static_cast<double>(bytes) / median(times.reading) / 1e9},
      {"tokens_per_s", 1 / median(times.decode)},
      {"prefill_tokens_per_s", static_cast<double>(kPrompt) / *std::ranges::min_element(prefills)},
  };
  fmt::print("RESULT {}\n", result.dump());
  return 0;
}
