"""Tiny configurations of model families, for transformers; imports nothing."""

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # The defaults of some families are ids of a larger vocabulary.
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIGMOID = ROUTED | {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
TIED = {"tie_word_embeddings": True}
WINDOW = {"sliding_window": 12}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
FAMILIES = {
    "llama": ("LlamaConfig", GROUPED),
    "smollm2": ("LlamaConfig", {"num_key_value_heads": 2} | TIED),
    "smollm3": ("SmolLM3Config", {"num_key_value_heads": 2} | TIED),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 2} | TIED),
    "qwen3": ("Qwen3Config", GROUPED),
    "mistral": ("MistralConfig", GROUPED | WINDOW),
    "gemma2": ("Gemma2Config", GROUPED | TIED | WINDOW),
    "gemma3_text": ("Gemma3TextConfig", GROUPED | TIED | WINDOW),
    "glm4": ("Glm4Config", GROUPED),
    "phi3": ("Phi3Config", {"num_key_value_heads": 2}),
    "granite": ("GraniteConfig", {"num_key_value_heads": 2, "logits_scaling": 3.0}),
    "cohere2": ("Cohere2Config", {"num_key_value_heads": 2} | TIED | WINDOW),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 2}),
    "gpt_oss": ("GptOssConfig", GROUPED | WINDOW | {"num_local_experts": 8}
                | {"num_experts_per_tok": 2}),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", {"num_key_value_heads": 2, "num_experts": 8}
              | {"num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoeConfig", {"num_key_value_heads": 2, "num_local_experts": 8}
                   | {"num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", ROUTED | {"num_key_value_heads": 2, "num_experts": 8}
                  | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", GROUPED | ROUTED | {"num_experts": 8, "norm_topk_prob": True}),
    "glm4_moe": ("Glm4MoeConfig", GROUPED | SIGMOID),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", LATENT | SIGMOID),
    "dots1": ("Dots1Config", GROUPED | SIGMOID),
    "deepseek_v3": ("DeepseekV3Config", LATENT | SIGMOID | {"n_group": 4, "topk_group": 2}),
    "qwen3_5_text": ("Qwen3_5TextConfig", GROUPED | LINEAR),
    "qwen3_next": ("Qwen3NextConfig", GROUPED | LINEAR | ROUTED | {"num_experts": 8}
                   | {"shared_expert_intermediate_size": 32}),
}  # fmt: skip
"""Name -> configuration class of transformers, and what is not `SHAPE`."""
