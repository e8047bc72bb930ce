#include "inference/format/json.h"

#include <fmt/format.h>

#include <set>
#include <vector>

#include "inference/error.h"

namespace overspill::inference {

using Json = nlohmann::json;

Json parse_object(std::string_view text, const std::string& file) {
  std::vector<std::set<std::string>> names;  // of the objects that have begun and not ended
  const auto look = [&](int depth, Json::parse_event_t event, Json& value) {
    using Event = Json::parse_event_t;
    if (depth > kJsonDepthMax) {
      throw ModelError(fmt::format("{}: its JSON nests deeper than {} levels; fetch the model again", file,
                                   kJsonDepthMax));
    }
    if (event == Event::object_start) names.emplace_back();
    if (event == Event::object_end) names.pop_back();
    if (event == Event::key && !names.back().insert(value.get<std::string>()).second) {
      throw ModelError(fmt::format("{}: it gives '{:.80}' twice; fetch the model again", file,
                                   value.get_ref<const std::string&>()));
    }
    return true;
  };
  try {
    Json found = Json::parse(text, look);
    if (!found.is_object())
      throw ModelError(fmt::format("{}: it is no JSON object; fetch the model again", file));
    return found;
  } catch (const Json::exception& error) {
    throw ModelError(fmt::format("{}: it is no JSON ({:.200}); fetch the model again", file, error.what()));
  }
}

}  // namespace overspill::inference
