"""A model made by hand, for agents: it calls a tool once, reads the result, and answers.

Every token has one successor, so a reply is a chain of tokens. Attention looks for two marks in the
context: one that tools are offered, one that a result came back.

```
 start ── tools offered, no result yet ──▶ <tool_call> ▶ one call ▶ </tool_call> ▶ <|im_end|>
   └───── else ──▶ "The" ▶ " tests" ▶ " pass" or " passed" ▶ "." ▶ <|im_end|>
```
Whole words and the whole call are tokens that no text encodes to: a reply that is tokenized again
gives other ids, so what a client sends back shows whether ids were kept as they were sampled.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tests.outside_model import tokenizer_json

from penstock.actors.policy.checkpoint import hf_views, save_checkpoint
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import Tokenizer

CONTEXT_TOKENS = 65_536
ANSWERS = ("The tests pass.", "The tests passed.")
_WORDS = ("The", " tests", " pass", " passed", ".")
_HEAD_DIM = 16
_FOUND = 7
"""Index of a head in the pair that the rotary embedding hardly turns."""
_LOGIT = 40.0
_FLAG = 24.0
_STEADY = 8.0
"""Of a dimension that all tokens have: it keeps the norm, and so the logits, nearly constant."""


def write_agent_model(
    folder: Path, tool: str, arguments: dict[str, Any], then: dict[str, Any] | None = None
) -> None:
    """Write a dense Qwen3 folder whose policy calls `tool` with these arguments.

    Args:
        folder: is made.
        tool: name that the client gives its tool.
        arguments: of the first call.
        then: arguments of the call after each result; None answers instead.

    """
    folder.mkdir(parents=True, exist_ok=True)
    calls = [_call(tool, arguments), *([] if then is None else [_call(tool, then)])]
    table, ids = _vocabulary(calls)
    text = json.dumps(table)
    vocab_size = Tokenizer.from_json(text, "tokenizer.json").vocab_size
    config = PolicyConfig(
        vocab_size=-(-vocab_size // 32) * 32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=_HEAD_DIM,
        num_experts=0,
        num_experts_per_tok=0,
        intermediate_size=32,
        rope_theta=1e8,
        tie_word_embeddings=False,
        max_position_embeddings=CONTEXT_TOKENS,
        mtp_num_heads=0,
    )
    policy = Policy(config)
    _set_weights(hf_views(policy), ids, calls)
    save_checkpoint(policy, folder)
    (folder / "tokenizer.json").write_text(text)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))


def _call(tool: str, arguments: dict[str, Any]) -> str:
    return f"\n{json.dumps({'name': tool, 'arguments': arguments})}\n"


def _vocabulary(calls: list[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a `tokenizer.json` with the words and the calls as tokens, and ids by text."""
    table = json.loads(tokenizer_json())
    vocabulary: dict[str, int] = table["model"]["vocab"]
    for text in (*_WORDS, *calls):
        vocabulary.setdefault(_spelled(text), len(vocabulary))
    ids = {text: vocabulary[_spelled(text)] for text in (*_WORDS, *calls)}
    for number, token in enumerate(table["added_tokens"]):  # Added tokens come after all others.
        token["id"] = ids[token["content"]] = len(vocabulary) + number
    return table, ids


def _spelled(text: str) -> str:
    """Return ASCII text in the alphabet of byte-level BPE."""
    return text.replace(" ", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}").replace(
        "\n", "\N{LATIN CAPITAL LETTER C WITH DOT ABOVE}"
    )


@torch.no_grad()
def _set_weights(views: dict[str, torch.Tensor], ids: dict[str, int], calls: list[str]) -> None:
    chain = [
        *[(_WORDS[0], [_WORDS[1]]), (_WORDS[1], [_WORDS[2], _WORDS[3]])],
        *[(_WORDS[2], [_WORDS[4]]), (_WORDS[3], [_WORDS[4]]), (_WORDS[4], ["<|im_end|>"])],
        *[("<tool_call>", [calls[0]]), ("</tool_call>", ["<|im_end|>"])],
        *[(call, ["</tool_call>"]) for call in calls],
    ]
    steady, start, offered, answered, first = 0, 1, 2, 3, 8
    for name, view in views.items():
        view.fill_(1.0 if "norm" in name else 0.0)
    embedding, head = views["model.embed_tokens.weight"], views["lm_head.weight"]
    embedding[:, steady] = _STEADY
    embedding[:, start] = 1.0
    place_of = {text: first + number for number, (text, _) in enumerate(chain)}
    for text, follows in chain:
        embedding[ids[text], start] = 0.0
        embedding[ids[text], place_of[text]] = 1.0
        head[[ids[one] for one in follows], place_of[text]] = _LOGIT
    head[ids[_WORDS[0]], start] = _LOGIT
    call_open = ids["<tool_call>"]
    head[call_open, start] = _LOGIT - _FLAG / 2
    head[call_open, offered] = _FLAG
    if calls[1:]:
        head[ids[calls[1]], place_of["<tool_call>"]] = _LOGIT - _FLAG / 2
        head[ids[calls[1]], answered] = _FLAG
    else:
        head[call_open, answered] = -2 * _FLAG
    marks = {offered: "<tool_call>", answered: "<tool_response>"}
    for number, (flag, text) in enumerate(marks.items()):
        place = first + len(chain) + number
        embedding[ids[text], place] = 1.0
        _look_for(views, number, place, flag, steady)
    scale = (_STEADY**2 + 1.0) ** 0.5 / 64**0.5
    head *= scale


def _look_for(
    views: dict[str, torch.Tensor], number: int, place: int, flag: int, steady: int
) -> None:
    """Make head `number` of the first layer set `flag` where a token with `place` was before."""
    layer = "model.layers.0.self_attn."
    rows = slice(number * _HEAD_DIM, (number + 1) * _HEAD_DIM)
    query, key, value = (views[f"{layer}{kind}_proj.weight"][rows] for kind in "qkv")
    query[_FOUND, steady] = 1.0
    key[0, steady] = 1.0
    key[_FOUND, place] = 1000.0
    value[0, place] = 1.0
    views[f"{layer}o_proj.weight"][flag, number * _HEAD_DIM] = (_STEADY**2 + 1.0) ** 0.5 / 64**0.5
    for kind in "qk":
        views[f"{layer}{kind}_norm.weight"].fill_(6.0**0.5)
