// JSON from outside: bounded in length by whoever read it, in depth here, and without two values for one
// name.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace overspill::inference {

/// The object that `text` holds. Throws ModelError, which begins with `file`, where the text is no JSON
/// object, nests deeper than `kJsonDepthMax`, or gives a name twice in one object.
nlohmann::json parse_object(std::string_view text, const std::string& file);

inline constexpr int kJsonDepthMax = 32;

}  // namespace overspill::inference
