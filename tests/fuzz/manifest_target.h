// A checkpoint folder whose data files never change, and what is done with any bytes as its manifest or its
// index.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>

namespace overspill::fuzz {

class ManifestTarget {
 public:
  /// Makes the folder below `parent`, on a file system in memory if it can be had: it is written for each
  /// input.
  explicit ManifestTarget(const std::filesystem::path& parent);
  ManifestTarget(const ManifestTarget&) = delete;
  ManifestTarget& operator=(const ManifestTarget&) = delete;
  ~ManifestTarget();

  /// Reads `input` as the manifest, or as the index of one where it begins as an index does; of what is
  /// accepted every byte is verified, it is merged and written again. True if it was accepted. Ends the
  /// process (uncaught exception, abort) where a promise is broken.
  bool run(std::string_view input);

  /// The data files by name. Their bytes are a function of name and place.
  static const std::map<std::string, std::string>& files();

 private:
  bool run_text(std::string_view text);

  std::filesystem::path folder_, merged_, again_;
};

/// The text with its own checksum made to fit, where it has one.
std::string sealed(std::string text);

/// The checksums of a range of a data file as a manifest has them; "" where there is no such range.
std::string range_checksums(const std::string& file, uint64_t offset, uint64_t bytes);

}  // namespace overspill::fuzz
