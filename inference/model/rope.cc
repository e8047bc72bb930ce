#include "inference/model/rope.h"

#include <fmt/format.h>

#include <cmath>
#include <numbers>

namespace overspill::inference {
namespace {

/// Llama 3.1's change of frequencies: long waves are slowed down by `factor`, short ones stay, and between
/// the two the change is blended (transformers, modeling_rope_utils.py, _compute_llama3_parameters).
double llama3(double frequency, double factor, double low, double high, double trained) {
  const double wave = 2 * std::numbers::pi / frequency;
  if (wave < trained / high) return frequency;
  if (wave > trained / low) return frequency / factor;
  const double blend = (trained / wave - low) / (high - low);
  return (1 - blend) * frequency / factor + blend * frequency;
}

}  // namespace

Rope rope_of(Config parameters, int64_t head_size, double theta, double partial_factor) {
  theta = parameters.take_real_if("rope_theta").value_or(theta);
  partial_factor = parameters.take_real_if("partial_rotary_factor").value_or(partial_factor);
  const std::optional<std::string> old_name = parameters.take_text_if("type");
  const std::string type = parameters.take_text_if("rope_type").value_or(old_name.value_or("default"));
  if (theta <= 0) parameters.refuse("rope_theta", fmt::format("is {}, and is to be above 0", theta));
  if (partial_factor <= 0 || partial_factor > 1)
    parameters.refuse("partial_rotary_factor", fmt::format("is {}, and is to be in (0, 1]", partial_factor));
  const auto dimensions = static_cast<int64_t>(static_cast<double>(head_size) * partial_factor);

  double factor = 1, low = 1, high = 1, trained = 1;
  if (type == "linear" || type == "llama3") factor = parameters.take_real("factor");
  if (type == "llama3") {
    low = parameters.take_real("low_freq_factor");
    high = parameters.take_real("high_freq_factor");
    trained = static_cast<double>(parameters.take_count("original_max_position_embeddings"));
    if (low <= 0 || high <= low) parameters.refuse("high_freq_factor", "is not above low_freq_factor");
  } else if (type != "default" && type != "linear") {
    parameters.unknown("rope_type",
                       fmt::format("is '{:.40}', and default, linear and llama3 are computed", type));
  }
  if (factor <= 0) parameters.refuse("factor", fmt::format("is {}, and is to be above 0", factor));
  parameters.finish();

  Rope rope;
  for (int64_t i = 0; i < dimensions / 2; ++i) {
    double frequency = 1 / std::pow(theta, static_cast<double>(2 * i) / static_cast<double>(dimensions));
    if (type == "linear") frequency /= factor;
    if (type == "llama3") frequency = llama3(frequency, factor, low, high, trained);
    rope.frequencies.push_back(static_cast<float>(frequency));
  }
  return rope;
}

Rope take_rope(Config& config, int64_t head_size, double theta) {
  theta = config.take_real_if("rope_theta").value_or(theta);
  const double partial = config.take_real_if("partial_rotary_factor").value_or(1);
  std::optional<Config> parameters = config.take_object_if("rope_parameters");
  std::optional<Config> scaling = config.take_object_if("rope_scaling");
  if (!parameters) parameters = scaling ? scaling : Config(nlohmann::json::object(), config.where());
  return rope_of(std::move(*parameters), head_size, theta, partial);
}

}  // namespace overspill::inference
