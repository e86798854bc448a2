"""Models from outside, made on the spot: a Qwen3-like tokenizer, tiny models by transformers."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.actors.policy.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Added tokens that Qwen3's `tokenizer.json` does not call special."""
_TEXTS = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]


@cache
def tokenizer_json(*, left_out: str = "") -> str:
    """Return a byte-level BPE of 512 plain tokens with Qwen3's added ones, or all but one."""
    bpe = BpeTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    bpe.train_from_iterator(_TEXTS, trainer)
    bpe.add_special_tokens([name for name in SPECIAL if name != left_out])
    bpe.add_tokens([name for name in MARKUP if name != left_out])
    return bpe.to_str(pretty=True)


def qwen_tokenizer() -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json(), "tokenizer.json")


def write_tokenizer(folder: Path, *, left_out: str = "") -> None:
    (folder / "tokenizer.json").write_text(tokenizer_json(left_out=left_out))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder: Path, *, dense: bool = False, seed: int = 0) -> None:
    """Write a tiny Qwen3-MoE or dense Qwen3 by transformers, with the tokenizer beside it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {
        "vocab_size": 544,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 123_456.0, "rope_type": "default"},
        "tie_word_embeddings": dense,
    }
    torch.manual_seed(seed)
    if dense:
        model = Qwen3ForCausalLM(Qwen3Config(**shape, intermediate_size=48))
    else:
        sparse = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **sparse, norm_topk_prob=True))
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    write_tokenizer(folder)
