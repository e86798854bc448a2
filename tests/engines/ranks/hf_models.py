"""Tiny models that transformers makes, and what it computes: run in the environment of `ranks`.

python hf_models.py make KIND FOLDER
python hf_models.py logits FOLDER
"""

import json
import sys

import torch
import transformers

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SIGMOID = {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def config_of(kind):
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**SHAPE, **GROUPED, num_experts=8, norm_topk_prob=True)
    if kind == "glm4_moe":
        return transformers.Glm4MoeConfig(**SHAPE, **GROUPED, **SIGMOID)
    groups = {"n_group": 4, "topk_group": 2}
    return transformers.DeepseekV3Config(**SHAPE, **LATENT, **SIGMOID, **groups)


def make(kind, folder):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(kind)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)


@torch.no_grad()
def logits(folder):
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print(json.dumps(model(torch.arange(3, 51)[None]).logits[0].tolist()))


if __name__ == "__main__":
    {"make": make, "logits": logits}[sys.argv[1]](*sys.argv[2:])
