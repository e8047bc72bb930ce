#include "inference/model/families.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cmath>
#include <utility>

#include "inference/error.h"
#include "inference/model/config.h"
#include "inference/model/rope.h"

namespace overspill::inference {
namespace {

MatrixSpec matrix(std::string tensor, int64_t rows, int64_t columns) {
  return {{{std::move(tensor), rows}}, columns};
}

VectorSpec vector(std::string tensor, int64_t size) {
  return {{{std::move(tensor), size}}};
}

Activation activation_of(const Config& config, std::string_view key, const std::string& name) {
  if (name == "silu" || name == "swish") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  config.unknown(
      key, fmt::format("is '{:.40}', and silu, gelu, gelu_new and gelu_pytorch_tanh are computed", name));
}

// Far above those of any model. Rotary frequencies are as many as half of it, before a tensor was looked at.
constexpr int64_t kHeadSizeMax = 1 << 16;

void check_head_size(const Config& config, std::string_view key, int64_t head_size) {
  if (head_size <= kHeadSizeMax) return;
  config.refuse(
      key, fmt::format("gives heads of {} numbers, and at most {} are possible", head_size, kHeadSizeMax));
}

/// What the families since Llama have in common, each in its place below.
struct Sizes {
  std::string root;  // of names: a file that was saved from the base model has none
  int64_t vocabulary, hidden, inner, layers, heads, kv_heads, head_size, context;
  float epsilon;
  float norm_offset = 0;

  Sizes(Config& config, const ModelFolder& folder)
      : root(folder.find("embed_tokens.weight") != nullptr ? "" : "model."),
        vocabulary(config.take_count("vocab_size")),
        hidden(config.take_count("hidden_size")),
        inner(config.take_count("intermediate_size")),
        // Each layer has a tensor of its own, so a number above is a mistake that would fill memory.
        layers(config.take_count("num_hidden_layers", static_cast<int64_t>(folder.tensors().size()))),
        heads(config.take_count("num_attention_heads", hidden)),
        kv_heads(config.take_count_if("num_key_value_heads").value_or(heads)),
        head_size(
            config.take_count_if("head_dim", kHeadSizeMax).value_or(std::max<int64_t>(1, hidden / heads))),
        context(config.take_count("max_position_embeddings")),
        epsilon(static_cast<float>(config.take_real("rms_norm_eps"))) {
    check_head_size(config, "hidden_size", head_size);
    check_layers(config, folder);
    if (heads % kv_heads != 0)
      config.refuse("num_key_value_heads",
                    fmt::format("is {}, which does not divide {} heads", kv_heads, heads));
  }

  /// Each layer gets rotary frequencies, and each has that many numbers in the files.
  void check_layers(const Config& config, const ModelFolder& folder) const {
    int64_t bytes = 0;
    for (const StoredTensor& tensor : folder.tensors()) bytes += tensor.bytes;
    if (layers > bytes / head_size) {
      config.refuse("num_hidden_layers",
                    fmt::format("is {}, with heads of {} numbers, and the files have {} bytes", layers,
                                head_size, bytes));
    }
  }

  std::string layer_prefix(int64_t i) const { return fmt::format("{}layers.{}.", root, i); }

  Norm norm(std::string tensor, int64_t size) const {
    return {.epsilon = epsilon, .weight_offset = norm_offset, .weight = vector(std::move(tensor), size)};
  }

  Attention attention(const std::string& prefix, bool qkv_bias, bool out_bias) const {
    const int64_t q = heads * head_size, kv = kv_heads * head_size;
    Attention made{.heads = heads, .kv_heads = kv_heads, .head_size = head_size};
    made.qkv = {
        {{prefix + "q_proj.weight", q}, {prefix + "k_proj.weight", kv}, {prefix + "v_proj.weight", kv}},
        hidden};
    if (qkv_bias)
      made.qkv_bias = {
          {{prefix + "q_proj.bias", q}, {prefix + "k_proj.bias", kv}, {prefix + "v_proj.bias", kv}}};
    made.out = matrix(prefix + "o_proj.weight", hidden, q);
    if (out_bias) made.out_bias = vector(prefix + "o_proj.bias", hidden);
    made.scale = 1 / std::sqrt(static_cast<float>(head_size));
    return made;
  }

  void add_head_norms(Attention& attention, const std::string& prefix) const {
    attention.query_norm = norm(prefix + "q_norm.weight", head_size);
    attention.key_norm = norm(prefix + "k_norm.weight", head_size);
  }

  Dense dense(const std::string& gate, const std::string& up, const std::string& down, int64_t width,
              Activation activation) const {
    return {.activation = activation,
            .gate = matrix(gate, width, hidden),
            .up = matrix(up, width, hidden),
            .up_bias = {},
            .down = matrix(down, hidden, width),
            .down_bias = {}};
  }
  Dense dense(const std::string& prefix, int64_t width, Activation activation) const {
    return dense(prefix + "gate_proj.weight", prefix + "up_proj.weight", prefix + "down_proj.weight", width,
                 activation);
  }

  ModelSpec model(Config& config, bool tied_otherwise) const {
    ModelSpec spec{.vocabulary = vocabulary, .hidden = hidden, .context = context};
    spec.embedding = matrix(root + "embed_tokens.weight", vocabulary, hidden);
    spec.final_norm = norm(root + "norm.weight", hidden);
    if (!config.take_flag("tie_word_embeddings", tied_otherwise))
      spec.head = matrix("lm_head.weight", vocabulary, hidden);
    return spec;
  }
};

Layer pre_norm_layer(const Sizes& sizes, int64_t i, Attention attention, FeedForward feed_forward) {
  const std::string prefix = sizes.layer_prefix(i);
  return {.attention_norm = sizes.norm(prefix + "input_layernorm.weight", sizes.hidden),
          .attention = std::move(attention),
          .after_attention = {},
          .feed_forward_norm = sizes.norm(prefix + "post_attention_layernorm.weight", sizes.hidden),
          .feed_forward = std::move(feed_forward),
          .after_feed_forward = {}};
}

/// Takes `sliding_window`, `layer_types` and what stood for them before: for each layer its window, if it has
/// one. `by_pattern(i)`: whether layer i has it where layer_types is absent.
template <class ByPattern>
std::vector<std::optional<int64_t>> take_windows(Config& config, int64_t layers, ByPattern by_pattern) {
  const std::optional<int64_t> window = config.take_count_if("sliding_window");
  const auto types = config.take_texts_if("layer_types");
  if (types && static_cast<int64_t>(types->size()) != layers)
    config.refuse("layer_types", fmt::format("has {} entries for {} layers", types->size(), layers));
  std::vector<std::optional<int64_t>> windows;
  for (int64_t i = 0; i < layers; ++i) {
    bool slides = by_pattern(i);
    if (types) {
      const std::string& type = (*types)[static_cast<size_t>(i)];
      slides = type == "sliding_attention";
      if (!slides && type != "full_attention")
        config.unknown("layer_types",
                       fmt::format("has '{:.40}', and full_attention and sliding_attention are "
                                   "computed",
                                   type));
    }
    if (slides && types && !window)
      config.refuse("sliding_window", "is missing, and layer_types has such layers");
    windows.push_back(slides ? window : std::nullopt);
  }
  return windows;
}

/// Llama, Mistral, SmolLM2 (a Llama), SmolLM3, Qwen2, Qwen3.
ModelSpec llama_like(Config& config, const ModelFolder& folder, const std::string& family) {
  const Sizes sizes(config, folder);
  const bool qwen2 = family == "qwen2", qwen3 = family == "qwen3";
  const bool bias = config.take_flag("attention_bias", false);
  config.expect("mlp_bias", false);
  config.expect("rope_interleaved", false);
  config.pass_over({"pretraining_tp", "is_llama_config", "no_rope_layer_interval"});
  const Rope rope = take_rope(config, sizes.head_size, 10000);
  const Activation activation = activation_of(config, "hidden_act", config.take_text("hidden_act"));
  ModelSpec spec = sizes.model(config, family == "smollm3");

  if (family == "smollm3") config.expect("use_sliding_window", false);
  const bool sliding = config.take_flag("use_sliding_window", family == "mistral");
  const double first_sliding = config.take_real_if("max_window_layers").value_or(0);
  const auto windows = take_windows(
      config, sizes.layers, [&](int64_t i) { return sliding && static_cast<double>(i) >= first_sliding; });
  const auto with_rope =
      config.take_counts_if("no_rope_layers");  // 1 where the layer has one, in spite of its name
  if (with_rope && static_cast<int64_t>(with_rope->size()) != sizes.layers)
    config.refuse("no_rope_layers",
                  fmt::format("has {} entries for {} layers", with_rope->size(), sizes.layers));

  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string prefix = sizes.layer_prefix(i);
    Attention attention = sizes.attention(prefix + "self_attn.", qwen2 || bias, bias && !qwen2);
    if (qwen3) sizes.add_head_norms(attention, prefix + "self_attn.");
    if (!with_rope || (*with_rope)[static_cast<size_t>(i)] != 0) attention.rope = rope;
    attention.window = windows[static_cast<size_t>(i)];
    spec.layers.push_back(pre_norm_layer(sizes, i, std::move(attention),
                                         sizes.dense(prefix + "mlp.", sizes.inner, activation)));
  }
  return spec;
}

/// Llama's layer with a mixture of experts (Mixtral; Qwen3-MoE, some of whose layers may be dense).
ModelSpec mixture_of_experts(Config& config, const ModelFolder& folder, const std::string& family) {
  const Sizes sizes(config, folder);
  const bool qwen = family == "qwen3_moe";
  const auto most = static_cast<int64_t>(folder.tensors().size());
  const std::optional<int64_t> by_old_name = config.take_count_if("num_experts", most);
  const int64_t experts = by_old_name ? *by_old_name : config.take_count("num_local_experts", most);
  config.expect("num_local_experts", experts);
  const int64_t chosen = config.take_count("num_experts_per_tok", experts);
  const int64_t width = qwen ? config.take_count("moe_intermediate_size") : sizes.inner;
  const bool normalised = qwen ? config.take_flag("norm_topk_prob", false) : true;
  const int64_t every = config.take_count_if("decoder_sparse_step").value_or(1);
  const auto dense_layers = config.take_counts_if("mlp_only_layers").value_or(std::vector<int64_t>{});
  std::vector<bool> sparse(static_cast<size_t>(sizes.layers));
  for (int64_t i = every - 1; i < sizes.layers; i += every) sparse[static_cast<size_t>(i)] = true;
  for (const int64_t i : dense_layers) {
    if (i < sizes.layers) sparse[static_cast<size_t>(i)] = false;
  }
  const int64_t sparse_layers = std::ranges::count(sparse, true);
  if (sparse_layers * experts > most) {
    config.refuse(by_old_name ? "num_experts" : "num_local_experts",
                  fmt::format("is {} in each of {} layers, and the files have {} tensors", experts,
                              sparse_layers, most));
  }
  const bool bias = config.take_flag("attention_bias", false);
  config.pass_over(
      {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "max_window_layers"});
  const Rope rope = take_rope(config, sizes.head_size, qwen ? 10000 : 1000000);
  const Activation activation = activation_of(config, "hidden_act", config.take_text("hidden_act"));
  ModelSpec spec = sizes.model(config, false);
  const bool sliding = config.take_flag("use_sliding_window", !qwen);
  const auto windows = take_windows(config, sizes.layers, [&](int64_t) { return sliding; });

  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string prefix = sizes.layer_prefix(i);
    Attention attention = sizes.attention(prefix + "self_attn.", bias, bias);
    if (qwen) sizes.add_head_norms(attention, prefix + "self_attn.");
    attention.rope = rope;
    attention.window = windows[static_cast<size_t>(i)];
    if (!sparse[static_cast<size_t>(i)]) {
      spec.layers.push_back(pre_norm_layer(sizes, i, std::move(attention),
                                           sizes.dense(prefix + "mlp.", sizes.inner, activation)));
      continue;
    }
    const std::string block = prefix + (qwen ? "mlp." : "block_sparse_moe.");
    Mixture mixture{.router = matrix(block + "gate.weight", experts, sizes.hidden),
                    .experts = {},
                    .chosen = chosen,
                    .normalised = normalised};
    for (int64_t e = 0; e < experts; ++e) {
      const std::string expert = fmt::format("{}experts.{}.", block, e);
      mixture.experts.push_back(qwen ? sizes.dense(expert, width, activation)
                                     : sizes.dense(expert + "w1.weight", expert + "w3.weight",
                                                   expert + "w2.weight", width, activation));
    }
    spec.layers.push_back(pre_norm_layer(sizes, i, std::move(attention), std::move(mixture)));
  }
  return spec;
}

/// Gemma 2 and 3: norms before and after, weights stored less 1, windows in most layers, soft caps in 2, head
/// norms and a second theta in 3.
ModelSpec gemma(Config& config, const ModelFolder& folder, const std::string& family) {
  Sizes sizes(config, folder);
  sizes.norm_offset = 1;
  const bool third = family == "gemma3_text";
  config.expect("use_bidirectional_attention", false);
  const bool bias = config.take_flag("attention_bias", false);
  const auto scale = static_cast<float>(1 / std::sqrt(config.take_real("query_pre_attn_scalar")));
  const std::optional<double> softcap = config.take_real_if("attn_logit_softcapping");
  const std::optional<double> logit_softcap = config.take_real_if("final_logit_softcapping");
  const std::string act = config.take_text_if("hidden_activation").value_or("gelu_pytorch_tanh");
  config.pass_over({"hidden_act"});  // Gemma's own configs have both, and this one is not used
  const Activation activation = activation_of(config, "hidden_activation", act);
  ModelSpec spec = sizes.model(config, true);
  spec.embedding_scale = std::sqrt(static_cast<float>(sizes.hidden));
  if (logit_softcap) spec.logit_softcap = static_cast<float>(*logit_softcap);

  const std::optional<int64_t> old_pattern = config.take_count_if("sliding_window_pattern");
  const int64_t pattern =
      config.take_count_if("_sliding_window_pattern").value_or(old_pattern.value_or(third ? 6 : 2));
  const auto windows = take_windows(config, sizes.layers, [&](int64_t i) { return (i + 1) % pattern != 0; });
  const double local_theta = config.take_real_if("rope_local_base_freq").value_or(10000);
  Rope full, local;
  if (std::optional<Config> both = third ? config.take_object_if("rope_parameters") : std::nullopt) {
    const auto one = [&](std::string_view key, double theta) {
      std::optional<Config> found = both->take_object_if(key);
      if (!found) both->refuse(key, "is missing");
      return rope_of(std::move(*found), sizes.head_size, theta, 1);
    };
    full = one("full_attention", 1000000);
    local = one("sliding_attention", local_theta);
    both->finish();
  } else {
    full = take_rope(config, sizes.head_size, third ? 1000000 : 10000);
    local = third ? rope_of(Config(nlohmann::json::object(), config.where()), sizes.head_size, local_theta, 1)
                  : full;
  }

  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string prefix = sizes.layer_prefix(i);
    const auto norm = [&](const char* name) { return sizes.norm(prefix + name, sizes.hidden); };
    Attention attention = sizes.attention(prefix + "self_attn.", bias, bias);
    if (third) sizes.add_head_norms(attention, prefix + "self_attn.");
    attention.window = windows[static_cast<size_t>(i)];
    attention.rope = attention.window ? local : full;
    attention.scale = scale;
    if (softcap) attention.softcap = static_cast<float>(*softcap);
    spec.layers.push_back({.attention_norm = norm("input_layernorm.weight"),
                           .attention = std::move(attention),
                           .after_attention = norm("post_attention_layernorm.weight"),
                           .feed_forward_norm = norm("pre_feedforward_layernorm.weight"),
                           .feed_forward = sizes.dense(prefix + "mlp.", sizes.inner, activation),
                           .after_feed_forward = norm("post_feedforward_layernorm.weight")});
  }
  return spec;
}

/// Phi-3: Llama with its matrices fused in the file.
ModelSpec phi3(Config& config, const ModelFolder& folder, const std::string&) {
  const Sizes sizes(config, folder);
  config.pass_over({"embd_pdrop", "resid_pdrop"});
  const Rope rope = take_rope(config, sizes.head_size, 10000);
  config.pass_over({"original_max_position_embeddings"});  // of longrope, which take_rope refuses
  const Activation activation = activation_of(config, "hidden_act", config.take_text("hidden_act"));
  ModelSpec spec = sizes.model(config, false);
  const auto windows = take_windows(config, sizes.layers, [](int64_t) { return true; });
  for (int64_t i = 0; i < sizes.layers; ++i) {
    const std::string prefix = sizes.layer_prefix(i);
    Attention attention = sizes.attention(prefix + "self_attn.", false, false);
    attention.qkv = matrix(prefix + "self_attn.qkv_proj.weight",
                           (sizes.heads + 2 * sizes.kv_heads) * sizes.head_size, sizes.hidden);
    attention.rope = rope;
    attention.window = windows[static_cast<size_t>(i)];
    const std::string fused = prefix + "mlp.gate_up_proj.weight";
    Dense dense = sizes.dense(fused, fused, prefix + "mlp.down_proj.weight", sizes.inner, activation);
    dense.up.parts[0].first = sizes.inner;
    spec.layers.push_back(pre_norm_layer(sizes, i, std::move(attention), std::move(dense)));
  }
  return spec;
}

ModelSpec gpt2(Config& config, const ModelFolder& folder, const std::string&) {
  const int64_t vocabulary = config.take_count("vocab_size"), hidden = config.take_count("n_embd");
  const int64_t layers = config.take_count("n_layer", static_cast<int64_t>(folder.tensors().size()));
  const int64_t heads = config.take_count("n_head", hidden), context = config.take_count("n_positions");
  const int64_t inner = config.take_count_if("n_inner").value_or(4 * hidden);
  const auto epsilon = static_cast<float>(config.take_real("layer_norm_epsilon"));
  const bool scaled = config.take_flag("scale_attn_weights", true);
  const bool scaled_by_layer = config.take_flag("scale_attn_by_inverse_layer_idx", false);
  const Activation activation =
      activation_of(config, "activation_function", config.take_text("activation_function"));
  config.expect("add_cross_attention", false);
  config.pass_over({"attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn",
                    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
                    "summary_use_proj", "task_specific_params", "n_ctx"});
  if (hidden % heads != 0)
    config.refuse("n_head", fmt::format("is {}, which does not divide {}", heads, hidden));

  const std::string root = folder.find("wte.weight") != nullptr ? "" : "transformer.";
  const auto norm = [&](const std::string& name) {
    return Norm{.kind = Norm::Kind::layer,
                .epsilon = epsilon,
                .weight = vector(name + ".weight", hidden),
                .bias = vector(name + ".bias", hidden)};
  };
  const auto transposed = [](const std::string& name, int64_t rows, int64_t columns) {
    MatrixSpec made = matrix(name + ".weight", rows, columns);
    made.stored_transposed = true;
    return made;
  };

  ModelSpec spec{.vocabulary = vocabulary, .hidden = hidden, .context = context};
  spec.embedding = matrix(root + "wte.weight", vocabulary, hidden);
  spec.positions = matrix(root + "wpe.weight", context, hidden);
  spec.final_norm = norm(root + "ln_f");
  if (!config.take_flag("tie_word_embeddings", true))
    spec.head = matrix("lm_head.weight", vocabulary, hidden);
  for (int64_t i = 0; i < layers; ++i) {
    const std::string prefix = fmt::format("{}h.{}.", root, i);
    Attention attention{.heads = heads, .kv_heads = heads, .head_size = hidden / heads};
    attention.qkv = transposed(prefix + "attn.c_attn", 3 * hidden, hidden);
    attention.qkv_bias = vector(prefix + "attn.c_attn.bias", 3 * hidden);
    attention.out = transposed(prefix + "attn.c_proj", hidden, hidden);
    attention.out_bias = vector(prefix + "attn.c_proj.bias", hidden);
    attention.scale = scaled ? 1 / std::sqrt(static_cast<float>(attention.head_size)) : 1;
    if (scaled_by_layer) attention.scale /= static_cast<float>(i + 1);
    Dense dense{.activation = activation,
                .gate = {},
                .up = transposed(prefix + "mlp.c_fc", inner, hidden),
                .up_bias = vector(prefix + "mlp.c_fc.bias", inner),
                .down = transposed(prefix + "mlp.c_proj", hidden, inner),
                .down_bias = vector(prefix + "mlp.c_proj.bias", hidden)};
    spec.layers.push_back({.attention_norm = norm(prefix + "ln_1"),
                           .attention = std::move(attention),
                           .after_attention = {},
                           .feed_forward_norm = norm(prefix + "ln_2"),
                           .feed_forward = std::move(dense),
                           .after_feed_forward = {}});
  }
  return spec;
}

struct Family {
  std::string_view model_type;
  ModelSpec (*describe)(Config& config, const ModelFolder& folder, const std::string& family);
};
constexpr auto kFamilies = std::to_array<Family>({{"gemma2", gemma},
                                                  {"gemma3_text", gemma},
                                                  {"gpt2", gpt2},
                                                  {"llama", llama_like},
                                                  {"mistral", llama_like},
                                                  {"mixtral", mixture_of_experts},
                                                  {"phi3", phi3},
                                                  {"qwen2", llama_like},
                                                  {"qwen3", llama_like},
                                                  {"qwen3_moe", mixture_of_experts},
                                                  {"smollm3", llama_like}});

int64_t total(const std::vector<Rows>& parts) {
  int64_t count = 0;
  for (const Rows& part : parts) count += part.count;
  return count;
}

}  // namespace

int64_t MatrixSpec::rows() const {
  return total(parts);
}

int64_t VectorSpec::size() const {
  return total(parts);
}

ModelSpec describe(const ModelFolder& folder) {
  Config config(folder.config(), (folder.path() / "config.json").string());
  const std::string type = config.take_text("model_type");
  for (const Family& family : kFamilies) {
    if (family.model_type != type) continue;
    ModelSpec spec = family.describe(config, folder, type);
    spec.family = type;
    config.finish();
    return spec;
  }
  config.unknown("model_type", fmt::format("is '{:.40}', and the known ones are {}", type,
                                           fmt::join(family_names(), ", ")));
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const Family& family : kFamilies) names.emplace_back(family.model_type);
  return names;
}

}  // namespace overspill::inference
