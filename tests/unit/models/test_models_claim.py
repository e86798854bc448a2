"""A checkpoint's folder goes into a run, or is refused before any work, by what is wrong."""

import json
import threading
from pathlib import Path

import msgspec
import pytest
from tests.outside_model import write_model, write_tokenizer

from penstock.actors.policy.hf.config import ModelFormatError
from penstock.actors.policy.hf.stored import INDEX_KEY, fetch_model, stored_model
from penstock.actors.policy.tokenizer import TOKENIZER_KEY
from penstock.infra.config.file import apply_overrides, parse_config, read_toml
from penstock.infra.models.claim import claim_model, fill_shape, open_model
from penstock.infra.run import prepare as preparing
from penstock.infra.run.task_sources import drawn_tasks
from penstock.messages.errors import ConfigError, CorruptDataError
from penstock.messages.task import Split

QUICKSTART = Path("examples/quickstart/config.toml")
FITTING = (
    "generator.num_tokens_max=4096",
    "prepare.limits={num_turns_max=4, num_tokens_max=4096, turn_tokens_max=24}",
    "prepare.num_train_tasks=3",
    "prepare.num_heldout_tasks=2",
    "model.chat=renderers:qwen3",
    "trainer.midtrain.num_tokens=0",
)


class MemoryStore(dict):
    async def put(self, key, data):
        self[key] = bytes(data)

    async def get(self, key):
        return self[key]

    async def exists(self, key):
        return key in self


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture
def model(made, tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in made.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def configured(folder: Path, *overrides: str):
    given = (f"model.checkpoint={folder}", *FITTING, *overrides)
    data = apply_overrides(read_toml(QUICKSTART), given)
    fill_shape(data)
    return parse_config(data, "test")


async def test_a_checkpoint_becomes_the_runs_shape_and_its_files_the_stores(model, tmp_path):
    config = configured(model)
    assert config.policy.rope_theta == 123_456.0
    assert (config.policy.num_experts, config.policy.tie_word_embeddings) == (4, False)
    assert (config.policy.mtp_num_heads, config.trainer.midtrain.num_tokens) == (0, 0)
    store = MemoryStore()
    await preparing.prepare(config, store, lambda _: None)
    stored = await stored_model(store)
    weights = {path.name for path in model.glob("*.safetensors*")}
    assert len(weights) > 2, "it is sharded"
    tokens = {"config.json", TOKENIZER_KEY, "tokenizer_config.json", "generation_config.json"}
    assert set(stored.digests) == weights | tokens
    assert store[TOKENIZER_KEY] == (model / TOKENIZER_KEY).read_bytes()
    assert not any(key.startswith("midtrain/") for key in store)
    for path in model.iterdir():
        path.unlink()
    await preparing.prepare(config, store, lambda _: None)  # The folder is needed no more.
    await fetch_model(store, stored, tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == set(stored.digests)
    store["model/config.json"] += b" "
    with pytest.raises(CorruptDataError, match=r"model/config\.json: the bytes do not match"):
        await fetch_model(store, stored, tmp_path)
    store[INDEX_KEY] = msgspec.json.encode({"digests": {"../x": "0"}})
    store["model/../x"] = b""
    with pytest.raises(CorruptDataError, match=r"model/\.\./x"):
        await fetch_model(store, await stored_model(store), tmp_path)


async def test_an_unprepared_store_has_no_model(model):
    config = configured(model)
    store = MemoryStore()
    await claim_model(config.model, config.policy, store)
    assert list(store)[-2:] == [INDEX_KEY, TOKENIZER_KEY]
    assert await stored_model(MemoryStore()) is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("policy.hidden_size=128", r"policy\.hidden_size: expected 32, as .*config\.json says, "),
        ("policy.rope_theta=1e4", r"policy\.rope_theta: expected 123456\.0"),
        ("policy.num_layers=2", r"num_layers"),
        ("generator.num_tokens_max=8192", r"expected at most policy\.max_position_embeddings 4096"),
        (
            "prepare.limits.num_tokens_max=4097",
            r"prepare\.limits\.num_tokens_max: expected at most generator\.num_tokens_max 4096",
        ),
        ("trainer.midtrain.num_tokens=9", r"trainer\.midtrain\.num_tokens: with model\.checkpoint"),
        ("model.corpora=[{path='x'}]", r"trainer\.midtrain\.num_tokens: with model\.checkpoint"),
    ],
)
def test_what_contradicts_a_checkpoint_is_refused_by_name(model, setting, expected):
    with pytest.raises(ConfigError, match=expected):
        configured(model, setting)


def test_without_texts_there_is_no_mid_training_by_default(model):
    data = apply_overrides(read_toml(QUICKSTART), [f"model.checkpoint={model}", *FITTING])
    del data["trainer"]["midtrain"]
    fill_shape(data)
    assert parse_config(data, "test").trainer.midtrain.num_tokens == 0


@pytest.mark.parametrize(
    "name", ["from-checkpoint", "pretrain-then-rl", "sft-then-rl", "preferences-then-rl"]
)
def test_shipped_configurations_fit_a_model(model, name):
    given = [f"model.checkpoint={model}"]
    given += ["model.corpora=[{path='src'}]"] if name == "pretrain-then-rl" else []
    data = apply_overrides(read_toml(Path(f"infra/configs/{name}.toml")), given)
    fill_shape(data)
    config = parse_config(data, name)
    assert config.model.has_corpus == (config.trainer.midtrain.num_tokens > 0)
    assert all(Path(corpus.path).is_absolute() for corpus in config.model.corpora)
    assert all(Path(path).is_absolute() for path in config.model.preferences)


def test_paths_become_absolute_without_a_checkpoint_too():
    data = apply_overrides(read_toml(QUICKSTART), ["model.corpora=[{path='src', weight=0.5}]"])
    fill_shape(data)
    [corpus] = parse_config(data, "test").model.corpora
    assert (Path(corpus.path).is_absolute(), corpus.weight) == (True, 0.5)


def test_a_foreign_format_needs_a_checkpoint():
    data = apply_overrides(read_toml(QUICKSTART), ["model.chat=renderers:qwen3"])
    with pytest.raises(ConfigError, match=r"model\.chat: expected 'penstock' where there is no"):
        parse_config(data, "test")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-*.safetensors"])
def test_a_missing_file_is_named(model, name):
    [path] = model.glob(name)
    path.unlink()
    with pytest.raises((ConfigError, ModelFormatError), match=path.name):
        config = configured(model)
        open_model(config.model, config.policy)


@pytest.mark.parametrize(
    ("chat", "left_out", "expected"),
    [
        ("renderers:qwen3", "</tool_call>", r"needs the token '</tool_call>'"),
        ("penstock", "", r"'penstock' needs the special token '<\|end\|>'"),
        ("chatml", "", r"expected 'penstock', 'template' or 'renderers:NAME', got 'chatml'"),
        ("renderers:nothing", "", r"renderers:NAME with NAME one of .*; got 'nothing'"),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_format_is_refused(model, chat, left_out, expected):
    write_tokenizer(model, left_out=left_out)
    config = configured(model, f"model.chat={chat}")
    with pytest.raises(ConfigError, match=expected):
        open_model(config.model, config.policy)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(model):
    raw = json.loads((model / TOKENIZER_KEY).read_text())
    token = raw["added_tokens"][-1] | {"id": 600, "content": "<more>"}
    raw["added_tokens"].append(token)
    (model / TOKENIZER_KEY).write_text(json.dumps(raw).replace('"id": 600', '"id": 521'))
    config = configured(model)
    open_model(config.model, config.policy)
    raw["model"]["vocab"]["zzz"] = 600
    (model / TOKENIZER_KEY).write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"its ids go up to 600, .*vocab_size is 544"):
        open_model(config.model, config.policy)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model": {"type": "Unigram"}}', "\ud800"])
def test_a_file_that_is_no_tokenizer_is_refused(model, text):
    (model / TOKENIZER_KEY).write_bytes(text.encode("utf-8", "surrogatepass"))
    config = configured(model)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer of bytes|utf-8"):
        open_model(config.model, config.policy)


def test_a_task_that_does_not_fit_is_refused_with_both_numbers(model):
    limits = "prepare.limits={num_turns_max=4, num_tokens_max=300, turn_tokens_max=24}"
    config = configured(model, limits)
    chat = open_model(config.model, config.policy)
    words = r"its prompt has \d{4} .*, and its longest context is 300"
    with pytest.raises(ConfigError, match=words):
        preparing.build_outside(config, chat, threading.Event())


def test_a_folders_task_beyond_the_engines_context_is_refused(model, monkeypatch):
    config = configured(model)
    [candidate, *_] = drawn_tasks(config.prepare, 0)[Split.TRAIN]
    limits = msgspec.structs.replace(candidate.task.limits, num_tokens_max=32_768)
    task = msgspec.structs.replace(candidate.task, task_id="mined/1", limits=limits)
    candidate = msgspec.structs.replace(candidate, task=task)
    with pytest.raises(ConfigError, match=r"mined/1: limits\.num_tokens_max: .* 4096, got 32768"):
        preparing._checked(candidate, config, None)
