// What is done with any bytes as a file of a model folder (inference/format).
#pragma once

#include <filesystem>
#include <string_view>

namespace overspill::fuzz {

class ModelTarget {
 public:
  /// Makes a folder below `parent`, whose config.json is written for each input that is one.
  explicit ModelTarget(const std::filesystem::path& parent);
  ModelTarget(const ModelTarget&) = delete;
  ModelTarget& operator=(const ModelTarget&) = delete;
  ~ModelTarget();

  /// An input is "config", a line break and a config.json; or a number, a line break and the header of a
  /// safetensors file with so many bytes behind it. True if it was accepted. Ends the process (uncaught
  /// exception, abort) where a promise is broken.
  bool run(std::string_view input);

 private:
  bool run_config(std::string_view text);

  std::filesystem::path folder_;
};

}  // namespace overspill::fuzz
