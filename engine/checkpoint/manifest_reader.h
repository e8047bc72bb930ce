// The text of a manifest, read in one pass straight into its structs. The text is untrusted: time is linear
// in its length and memory at most about eight times it, whatever it says.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string_view>

#include "engine/checkpoint/manifest.h"

namespace overspill::engine {

inline constexpr size_t kHexDigits = 16;  // of one checksum in a manifest

/// what() says what is wrong with the text; the caller adds the file's name and the way out.
class MalformedManifest : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Every field must be known, present once and of its type: a typo, or a field of another version, is an
/// error and never a silent default. What the values mean is checked by check_manifest. Throws
/// MalformedManifest.
Manifest parse_manifest(std::string_view text);

}  // namespace overspill::engine
