// A folder of a tiny model with random weights: two layers of three have a window of 24 positions.
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "inference/kernels/forms.h"
#include "inference/run/model.h"
#include "tests/inference/temporary_folder.h"

namespace overspill::inference {

class TinyModel {
 public:
  static constexpr int64_t kVocabulary = 90;

  TinyModel() {
    const int64_t hidden = 32, inner = 48, heads = 4, kv_heads = 2, layers = 3;
    folder_.write("config.json", nlohmann::json{{"model_type", "qwen2"},
                                                {"vocab_size", kVocabulary},
                                                {"hidden_size", hidden},
                                                {"intermediate_size", inner},
                                                {"num_hidden_layers", layers},
                                                {"num_attention_heads", heads},
                                                {"num_key_value_heads", kv_heads},
                                                {"max_position_embeddings", 1024},
                                                {"rms_norm_eps", 1e-5},
                                                {"hidden_act", "silu"},
                                                {"use_sliding_window", true},
                                                {"sliding_window", 24},
                                                {"max_window_layers", 1},
                                                {"tie_word_embeddings", true}}
                                     .dump());
    add("model.embed_tokens.weight", {kVocabulary, hidden});
    add("model.norm.weight", {hidden});
    for (int64_t i = 0; i < layers; ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      const int64_t keys = hidden / heads * kv_heads;
      for (const auto& [name, rows] : {std::pair("q", hidden), std::pair("k", keys), std::pair("v", keys)}) {
        add(layer + "self_attn." + name + "_proj.weight", {rows, hidden});
        add(layer + "self_attn." + name + "_proj.bias", {rows});
      }
      add(layer + "self_attn.o_proj.weight", {hidden, hidden});
      add(layer + "mlp.gate_proj.weight", {inner, hidden});
      add(layer + "mlp.up_proj.weight", {inner, hidden});
      add(layer + "mlp.down_proj.weight", {hidden, inner});
      add(layer + "input_layernorm.weight", {hidden});
      add(layer + "post_attention_layernorm.weight", {hidden});
    }
    folder_.write("model.safetensors", safetensors(header_.dump(), 0) + data_);
  }

  std::shared_ptr<Model> load(ModelOptions options = {}) const {
    return std::make_shared<Model>(folder_.path(), options, kernels());
  }

 private:
  void add(const std::string& name, const std::vector<int64_t>& shape) {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    header_[name] = {{"dtype", "BF16"},
                     {"shape", shape},
                     {"data_offsets", {data_.size(), data_.size() + 2 * static_cast<size_t>(count)}}};
    std::normal_distribution<float> draw(shape.size() > 1 ? 0.0f : 0.5f, 0.3f);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(draw(random_)) >> 16;
      data_ += static_cast<char>(bits & 0xFF);
      data_ += static_cast<char>(bits >> 8);
    }
  }

  TemporaryFolder folder_;
  nlohmann::json header_ = nlohmann::json::object();
  std::string data_;
  std::mt19937 random_{3};
};

}  // namespace overspill::inference
