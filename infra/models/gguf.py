"""Reads a GGUF file: a model's configuration, weights and tokenizer, by its metadata alone.

llama.cpp stores the rows of query and key matrices of the architecture `llama` in pairs of rotary
dimensions, Hugging Face in halves; the reader reorders them. Quantized tensors become the
float32 values that llama.cpp computes with. Anything that is not listed here is refused by name.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.messages.errors import ConfigError

_PAIRED = {"llama": True, "qwen2": False, "qwen3": False}
"""Architectures that are read, and whether their query and key rows are stored in pairs."""
_OWN_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{
        f"attn_{ours}.{kind}": f"self_attn.{theirs}_proj.{kind}"
        for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o"))
        for kind in ("weight", "bias")
    },
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    **{f"ffn_{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_NUMBERS = r"\p{N}"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "default": None,
    "gpt-2": None,
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "llama-bpe": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", _NUMBERS),
}
"""How the pre-tokenizers of byte-level vocabularies split text: by a regular expression, by steps
before GPT-2's own expression, or by that alone."""
_CONTROL_TYPES = (2, 3, 4)
"""Types of tokens that no text becomes: unknown, control, user-defined."""
_SPACE = "▁"


class GgufModel(NamedTuple):
    """A model, with the content of the files of a Hugging Face folder."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    """float32, by their names in the folder."""
    tokenizer: dict[str, Any]
    """Content of tokenizer.json."""
    tokenizer_config: dict[str, Any]
    chat_template: str
    """Empty if the file has none."""


def read_gguf(path: Path) -> GgufModel:
    """Read a model; it must fit in memory as float32.

    Raises:
        ConfigError: The package gguf is missing, the file is damaged, or it has something
        unsupported; the error names the file and the key or tensor.

    """
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise ConfigError("GGUF files need the package gguf: pip install -e '.[gguf]'") from error
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        found = {tensor.name: tensor for tensor in reader.tensors}
    # The package raises errors of every kind for a damaged file.
    except Exception as error:
        raise ConfigError(f"{path}: expected a GGUF file: {error!r}") from error
    header = _Header(path, fields)
    config = _config(header, found.keys())
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in found.items():
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        # Sizes are stored innermost first.
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        target = _folder_name(header, name)
        if _PAIRED[header.architecture] and re.search(r"\.attn_[qk]\.", name):
            is_query = ".attn_q." in name
            heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
            values = _in_halves(values, heads)
        tensors[target] = values.copy()
    return GgufModel(config, tensors, *_tokenizer(header))


class _Header:
    """The metadata of a file, which errors name."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path, self._fields = path, fields
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in _PAIRED:
            raise self.refuse("general.architecture", f"one of {', '.join(_PAIRED)}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value; without a default it is required."""
        if (value := self._fields.get(name, default)) is None:
            raise ConfigError(f"{self._path}: {name} is missing")
        return value

    def own(self, name: str, default: Any = None) -> Any:
        """Return a value of the architecture's own keys."""
        return self.get(f"{self.architecture}.{name}", default)

    def has(self, name: str) -> bool:
        """Return whether the key exists."""
        return name in self._fields

    def refuse(self, name: str, expected: str) -> ConfigError:
        """Return the error for an unsupported value."""
        found = repr(self._fields.get(name))[:100]
        return ConfigError(f"{self._path}: {name}: expected {expected}, got {found}")


def _config(header: _Header, tensors: Any) -> dict[str, Any]:
    own = header.architecture
    if header.own("expert_count", 0):
        raise header.refuse(f"{own}.expert_count", "none: only dense models are read")
    if header.own("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        raise header.refuse(f"{own}.rope.scaling.type", "no scaled rotary embedding")
    values = {ours: header.own(theirs) for ours, theirs in _OWN_KEYS.items()}
    heads = int(values["num_attention_heads"])
    head_dim = header.own("attention.key_length", int(values["hidden_size"]) // heads)
    if header.own("rope.dimension_count", head_dim) != head_dim:
        raise header.refuse(f"{own}.rope.dimension_count", f"{head_dim}, all of a head")
    names = [f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos", "padding")]
    ids = {
        name.removeprefix("tokenizer.ggml.").replace("padding", "pad"): header.get(name)
        for name in names
        if header.has(name)
    }
    return {
        **values,
        **ids,
        # float32 in the file: 1e-5 is stored as 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(values["rms_norm_eps"]))),
        "model_type": own,
        "architectures": [f"{own.capitalize()}ForCausalLM"],
        "vocab_size": len(header.get("tokenizer.ggml.tokens")),
        "num_key_value_heads": header.own("attention.head_count_kv", heads),
        "head_dim": int(head_dim),
        "rope_theta": float(header.own("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def _folder_name(header: _Header, name: str) -> str:
    block = _BLOCK.fullmatch(name)
    target = _LAYER.get(block[2]) if block else _NAMES.get(name)
    if target is None:
        raise header.refuse(f"tensor {name}", "a tensor of a dense Llama-like model")
    return f"model.layers.{block[1]}.{target}" if block else target


def _in_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder [heads * D, ...] from pairs of rotary dimensions to halves."""
    paired = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(header: _Header) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the content of tokenizer.json and tokenizer_config.json, and the chat template."""
    tokens: list[str] = header.get("tokenizer.ggml.tokens")
    types: list[int] = header.get("tokenizer.ggml.token_type", [1] * len(tokens))
    kinds = {"gpt2": _byte_level, "llama": _byte_fallback}
    kind = header.get("tokenizer.ggml.model")
    if kind not in kinds:
        raise header.refuse("tokenizer.ggml.model", f"one of {', '.join(kinds)}")
    added = [
        {"id": index, "content": token, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for index, (token, one) in enumerate(zip(tokens, types, strict=True))
        if one in _CONTROL_TYPES
    ]  # fmt: skip
    vocabulary = {token: index for index, token in enumerate(tokens)}
    table = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
             "post_processor": None, **kinds[kind](header, vocabulary)}  # fmt: skip
    template = str(header.get("tokenizer.chat_template", ""))
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special: dict[str, Any] = {
        f"{short}_token": tokens[header.get(f"tokenizer.ggml.{long}_token_id")]
        for long, short in names.items()
        if header.has(f"tokenizer.ggml.{long}_token_id")
    }
    config: dict[str, Any] = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": header.own("context_length"),
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
    }
    return table, config, template


def _byte_level(header: _Header, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    name = header.get("tokenizer.ggml.pre", "default")
    if name not in _SPLITS:
        raise header.refuse("tokenizer.ggml.pre", f"one of {', '.join(_SPLITS)}")
    split = _SPLITS[name]
    is_pattern = isinstance(split, str)
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    ] if is_pattern else list(split or [])  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append(level | {"use_regex": not is_pattern})
    merges = [merge.split(" ", 1) for merge in header.get("tokenizer.ggml.merges")]
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": level | {"use_regex": True},
        "model": _bpe(vocabulary, merges),
    }


def _byte_fallback(header: _Header, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """Return a SentencePiece-like tokenizer: spaces as `▁`, unknown characters as bytes."""
    scores: list[float] = header.get("tokenizer.ggml.scores")
    unknown = header.get("tokenizer.ggml.unknown_token_id", 0)
    prefix = header.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    names = list(vocabulary)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(vocabulary, [list(merge) for merge in _merges(vocabulary, scores)])
        | {"unk_token": names[unknown], "byte_fallback": True, "fuse_unk": True},
    }


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the merges of a SentencePiece vocabulary: pairs that form a token, best score first."""
    order = sorted(vocabulary, key=lambda token: (-scores[vocabulary[token]], vocabulary[token]))
    for token in order:
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def _bpe(vocabulary: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False, "vocab": dict(vocabulary), "merges": merges,
    }  # fmt: skip


def as_json(value: Any) -> bytes:
    """Return the content of a JSON file of a model's folder."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode()
