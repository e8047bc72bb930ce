// From config.json to a spec: what is unknown, missing or impossible is named.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "inference/error.h"
#include "inference/model/families.h"
#include "tests/inference/temporary_folder.h"

namespace overspill::inference {
namespace {

using Json = nlohmann::json;

class Spec : public testing::Test {
 protected:
  Json config_ = {{"model_type", "llama"},      {"vocab_size", 100},
                  {"hidden_size", 32},          {"intermediate_size", 48},
                  {"num_hidden_layers", 3},     {"num_attention_heads", 4},
                  {"num_key_value_heads", 2},   {"max_position_embeddings", 64},
                  {"rms_norm_eps", 1e-5},       {"hidden_act", "silu"},
                  {"tie_word_embeddings", true}};
  TemporaryFolder folder_;

  ModelSpec spec() {
    folder_.write("config.json", config_.dump());
    Json header = Json::object();
    for (int i = 0; i < 40; ++i)
      header[fmt::format("t{}", i)] = {
          {"dtype", "U8"}, {"shape", {16}}, {"data_offsets", {16 * i, 16 * i + 16}}};
    folder_.write("model.safetensors", safetensors(header.dump(), 40 * 16));
    return describe(ModelFolder(folder_.path()));
  }
  template <class Error>
  std::string refusal() {
    try {
      spec();
    } catch (const Error& error) {
      return error.what();
    } catch (const std::exception& other) {
      return fmt::format("another error: {}", other.what());
    }
    return "";
  }
  void expect_unknown(const std::string& key) {
    const std::string said = refusal<UnknownModel>();
    EXPECT_FALSE(said.starts_with("another error")) << said;
    EXPECT_NE(said.find(key), std::string::npos) << said;
  }
  void expect_wrong(const std::string& key, const Json& value) {
    const Json before = config_;
    config_[key] = value;
    const std::string said = refusal<ModelError>();
    EXPECT_NE(said.find(key), std::string::npos) << key << " = " << value << ": " << said;
    config_ = before;
  }
};

TEST_F(Spec, ALlama) {
  const ModelSpec found = spec();
  EXPECT_EQ(found.family, "llama");
  EXPECT_EQ(found.layers.size(), 3u);
  EXPECT_FALSE(found.head);
  EXPECT_EQ(found.layers[2].attention.head_size, 8);
  EXPECT_EQ(found.layers[2].attention.qkv.rows(), 64);
  EXPECT_EQ(found.layers[2].attention.qkv.parts[1].tensor, "model.layers.2.self_attn.k_proj.weight");
  EXPECT_EQ(found.layers[0].attention.rope->frequencies.size(), 4u);
  EXPECT_FALSE(found.layers[0].attention.window);
}

TEST_F(Spec, AKeyThatIsNotKnownIsNamedUnlessItIsNull) {
  config_["attn_temperature"] = nullptr;
  EXPECT_EQ(refusal<UnknownModel>(), "");
  config_["attn_temperature"] = 0.5;
  expect_unknown("attn_temperature = 0.5");
}

TEST_F(Spec, AQuantisedModelIsNotTakenForAnother) {
  config_["quantization_config"] = {{"quant_method", "gptq"}};
  expect_unknown("quantization_config");
}

TEST_F(Spec, AFamilyThatIsNotKnown) {
  config_["model_type"] = "mamba";
  expect_unknown("'mamba'");
}

TEST_F(Spec, RopeTypes) {
  config_["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 4.0}};
  expect_unknown("'yarn'");
  config_["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}};
  EXPECT_FLOAT_EQ(spec().layers[0].attention.rope->frequencies[0], 0.25f);
  config_["rope_scaling"] = {{"type", "linear"}, {"factor", 4.0}, {"beta", 1.0}};
  expect_unknown("beta");
  config_["rope_scaling"] = {{"type", "linear"}};
  EXPECT_NE(refusal<ModelError>().find("factor"), std::string::npos);
  config_["rope_scaling"] = {{"type", "linear"}, {"factor", 0}};
  EXPECT_NE(refusal<ModelError>().find("factor"), std::string::npos);
  config_.erase("rope_scaling");
  config_["rope_parameters"] = {{"rope_type", "llama3"},   {"rope_theta", 1e4},
                                {"factor", 8.0},           {"low_freq_factor", 1.0},
                                {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 16}};
  const auto frequencies = spec().layers[0].attention.rope->frequencies;
  // Wave lengths 2 pi (blended), 62.8, 628 and 6283 (divided by the factor).
  EXPECT_FLOAT_EQ(frequencies[1], 0.1f / 8);
  EXPECT_FLOAT_EQ(frequencies[3], 0.001f / 8);
  EXPECT_GT(frequencies[0], 1.0f / 8);
  EXPECT_LT(frequencies[0], 1.0f);
}

TEST_F(Spec, ValuesThatCannotBe) {
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "num_key_value_heads", "max_position_embeddings"}) {
    for (const Json& value : {Json(0), Json(-1), Json(1.5), Json("4"), Json(true), Json(int64_t{1} << 40),
                              Json(~uint64_t{0}), Json::array({4}), Json::object()})
      expect_wrong(key, value);
    if (key != std::string("num_key_value_heads")) expect_wrong(key, nullptr);
  }
  expect_wrong("head_dim", 1 << 30);
  expect_wrong("num_hidden_layers", 41);  // of 40 tensors
  expect_wrong("num_key_value_heads", 3);
  expect_wrong("rms_norm_eps", "small");
  expect_wrong("hidden_act", 5);
  expect_wrong("attention_bias", 1);
  expect_wrong("rope_theta", 0);
  expect_wrong("rope_parameters", 5);
}

TEST_F(Spec, AnActivationThatIsNotKnown) {
  config_["hidden_act"] = "relu6";
  expect_unknown("'relu6'");
}

TEST_F(Spec, ExpertsAreAtMostWhatTheFilesHave) {
  config_["model_type"] = "mixtral";
  config_["num_experts_per_tok"] = 2;
  config_["num_local_experts"] = 8;
  EXPECT_EQ(std::get<Mixture>(spec().layers[0].feed_forward).experts.size(), 8u);
  config_["num_local_experts"] = 14;  // three layers of them, and 40 tensors
  EXPECT_NE(refusal<ModelError>().find("num_local_experts"), std::string::npos);
  // Entries for layers that are not there, or twice for one, are no dense layers.
  config_["mlp_only_layers"] = {7, 8, 9};
  EXPECT_NE(refusal<ModelError>().find("num_local_experts"), std::string::npos);
  config_["mlp_only_layers"] = {0, 0, 0};
  config_["num_local_experts"] = 20;
  EXPECT_EQ(spec().layers.size(), 3u);
  config_["num_local_experts"] = 21;
  EXPECT_NE(refusal<ModelError>().find("num_local_experts"), std::string::npos);
  config_.erase("mlp_only_layers");
  config_["num_local_experts"] = 8;
  expect_wrong("num_experts_per_tok", 9);
}

/// Of each layer: before a tensor's shape is looked at.
TEST_F(Spec, RotaryFrequenciesAreAtMostWhatTheFilesHave) {
  config_["head_dim"] = 1 << 16;
  EXPECT_NE(refusal<ModelError>().find("num_hidden_layers"), std::string::npos);
}

TEST_F(Spec, LayerTypes) {
  config_["model_type"] = "qwen2";
  config_["sliding_window"] = 16;
  config_["use_sliding_window"] = true;
  config_["max_window_layers"] = 1;
  EXPECT_FALSE(spec().layers[0].attention.window);
  EXPECT_EQ(spec().layers[1].attention.window, 16);
  config_["layer_types"] = {"sliding_attention", "full_attention", "full_attention"};
  EXPECT_EQ(spec().layers[0].attention.window, 16);
  EXPECT_FALSE(spec().layers[1].attention.window);
  config_["layer_types"] = {"full_attention"};
  EXPECT_NE(refusal<ModelError>().find("layer_types"), std::string::npos);
  config_["layer_types"] = {"full_attention", "full_attention", "linear_attention"};
  expect_unknown("'linear_attention'");
}

}  // namespace
}  // namespace overspill::inference
