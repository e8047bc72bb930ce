// config.json as a family reads it: value after value is taken out, and what is left at the end is unknown.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace overspill::inference {

/// A null counts as absent everywhere. Every method that takes throws ModelError for a value of another type
/// or range, naming file, key and value.
class Config {
 public:
  Config(nlohmann::json object, std::string where) : object_(std::move(object)), where_(std::move(where)) {}

  /// An integer from 1 to `most`; the second form throws where it is absent.
  std::optional<int64_t> take_count_if(std::string_view key, int64_t most = kCountMax);
  int64_t take_count(std::string_view key, int64_t most = kCountMax);
  std::optional<double> take_real_if(std::string_view key);
  double take_real(std::string_view key);
  bool take_flag(std::string_view key, bool otherwise);
  std::optional<std::string> take_text_if(std::string_view key);
  std::string take_text(std::string_view key);
  std::optional<std::vector<int64_t>> take_counts_if(std::string_view key);  // from 0
  std::optional<std::vector<std::string>> take_texts_if(std::string_view key);
  std::optional<Config> take_object_if(std::string_view key);

  /// Takes what changes no logit of a forward without dropout; `kHarmless` of config.cc is taken by itself.
  void pass_over(std::initializer_list<std::string_view> keys);
  /// Throws UnknownModel unless the key is absent or has this value, the only one that is computed here.
  void expect(std::string_view key, const nlohmann::json& value);
  /// Throws UnknownModel, which names the keys, where some are left that have a value.
  void finish();

  [[noreturn]] void refuse(std::string_view key, const std::string& why) const;   // ModelError
  [[noreturn]] void unknown(std::string_view key, const std::string& why) const;  // UnknownModel
  const std::string& where() const { return where_; }

 private:
  static constexpr int64_t kCountMax = int64_t{1} << 30;  // a product of two is far from overflow

  std::optional<nlohmann::json> take(std::string_view key);

  nlohmann::json object_;
  std::string where_;
};

}  // namespace overspill::inference
