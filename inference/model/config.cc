#include "inference/model/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <utility>

#include "inference/error.h"

namespace overspill::inference {
namespace {

using Json = nlohmann::json;

/// Keys of every family that say nothing of a forward without dropout.
constexpr auto kHarmless = std::to_array<std::string_view>(
    {"architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache",
     "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "attention_dropout",
     "_name_or_path", "_model_name_or_path", "unk_token_id", "auto_map", "cache_implementation",
     "transformers.js_config", "_attn_implementation_autoset"});

std::string shown(const Json& value) {
  return fmt::format("{:.80}", value.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

std::optional<Json> Config::take(std::string_view key) {
  const auto found = object_.find(key);
  if (found == object_.end()) return std::nullopt;
  Json value = std::move(*found);
  object_.erase(found);
  if (value.is_null()) return std::nullopt;
  return value;
}

std::optional<int64_t> Config::take_count_if(std::string_view key, int64_t most) {
  const std::optional<Json> value = take(key);
  if (!value) return std::nullopt;
  if (!value->is_number_unsigned() || value->get<uint64_t>() < 1 ||
      std::cmp_greater(value->get<uint64_t>(), most))
    refuse(key, fmt::format("is {}, and an integer from 1 to {} is possible", shown(*value), most));
  return value->get<int64_t>();
}

int64_t Config::take_count(std::string_view key, int64_t most) {
  const std::optional<int64_t> value = take_count_if(key, most);
  if (!value) refuse(key, "is missing");
  return *value;
}

std::optional<double> Config::take_real_if(std::string_view key) {
  const std::optional<Json> value = take(key);
  if (!value) return std::nullopt;
  if (!value->is_number() || !std::isfinite(value->get<double>()))
    refuse(key, fmt::format("is {}, and is to be a finite number", shown(*value)));
  return value->get<double>();
}

double Config::take_real(std::string_view key) {
  const std::optional<double> value = take_real_if(key);
  if (!value) refuse(key, "is missing");
  return *value;
}

bool Config::take_flag(std::string_view key, bool otherwise) {
  const std::optional<Json> value = take(key);
  if (!value) return otherwise;
  if (!value->is_boolean()) refuse(key, fmt::format("is {}, and is to be true or false", shown(*value)));
  return value->get<bool>();
}

std::optional<std::string> Config::take_text_if(std::string_view key) {
  const std::optional<Json> value = take(key);
  if (!value) return std::nullopt;
  if (!value->is_string()) refuse(key, fmt::format("is {}, and is to be a text", shown(*value)));
  return value->get<std::string>();
}

std::string Config::take_text(std::string_view key) {
  std::optional<std::string> value = take_text_if(key);
  if (!value) refuse(key, "is missing");
  return std::move(*value);
}

std::optional<std::vector<int64_t>> Config::take_counts_if(std::string_view key) {
  const std::optional<Json> value = take(key);
  if (!value) return std::nullopt;
  std::vector<int64_t> counts;
  for (const Json& element : value->is_array() ? *value : Json::array({*value})) {
    if (!value->is_array() || !element.is_number_unsigned() ||
        std::cmp_greater(element.get<uint64_t>(), kCountMax))
      refuse(key, fmt::format("is {}, and is to be a list of numbers from 0", shown(*value)));
    counts.push_back(element.get<int64_t>());
  }
  return counts;
}

std::optional<std::vector<std::string>> Config::take_texts_if(std::string_view key) {
  const std::optional<Json> value = take(key);
  if (!value) return std::nullopt;
  std::vector<std::string> texts;
  for (const Json& element : value->is_array() ? *value : Json::array({*value})) {
    if (!value->is_array() || !element.is_string())
      refuse(key, fmt::format("is {}, and is to be a list of texts", shown(*value)));
    texts.push_back(element.get<std::string>());
  }
  return texts;
}

std::optional<Config> Config::take_object_if(std::string_view key) {
  std::optional<Json> value = take(key);
  if (!value) return std::nullopt;
  if (!value->is_object()) refuse(key, fmt::format("is {}, and is to be an object", shown(*value)));
  return Config(std::move(*value), fmt::format("{}, {}", where_, key));
}

void Config::pass_over(std::initializer_list<std::string_view> keys) {
  for (const std::string_view key : keys) take(key);
}

void Config::expect(std::string_view key, const Json& value) {
  if (const std::optional<Json> found = take(key); found && *found != value)
    unknown(key, fmt::format("is {}, and only {} is computed here", shown(*found), shown(value)));
}

void Config::finish() {
  for (const std::string_view key : kHarmless) take(key);
  std::vector<std::string> left;
  for (const auto& [key, value] : object_.items()) {
    if (!value.is_null()) left.push_back(fmt::format("{:.40} = {}", key, shown(value)));
  }
  if (left.empty()) return;
  throw UnknownModel(
      fmt::format("{}: not known here, and it may change what the model computes: {}; run it with "
                  "transformers, or remove "
                  "the key if it changes nothing",
                  where_, fmt::join(left, "; ")));
}

void Config::refuse(std::string_view key, const std::string& why) const {
  throw ModelError(fmt::format("{}: {} {}; correct the file, or fetch the model again", where_, key, why));
}

void Config::unknown(std::string_view key, const std::string& why) const {
  throw UnknownModel(fmt::format("{}: {} {}; run it with transformers", where_, key, why));
}

}  // namespace overspill::inference
