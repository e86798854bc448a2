"""`penstock export`: the folder is whole, is refused or is none, and says what the run says."""

import asyncio
import json

import msgspec
import numpy as np
import pytest
import torch
from tests.unit.models.test_models_export_template import CODE

from penstock.actors.policy.checkpoint import (
    as_numpy,
    hf_views,
    load_checkpoint,
    load_published,
    publishable_state,
)
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import ModelFormatError, config_json
from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, train_tokenizer
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.history import delta_folder
from penstock.actors.relay.publish.publisher import Publisher
from penstock.infra.cli import main
from penstock.infra.export.folder import write_model
from penstock.infra.export.tokenizer_files import TokenizerFiles
from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.stores.directory import DirectoryStore

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SPARSE = PolicyConfig(
    vocab_size=400,
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=16,
    moe_intermediate_size=32,
    rope_theta=5e4,
)
DENSE = msgspec.structs.replace(
    SPARSE,
    num_experts=0,
    num_experts_per_tok=0,
    intermediate_size=48,
    tie_word_embeddings=False,
)


def policy_of(config, version, noise=0.1):
    policy = Policy(config, seed=version)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=noise)
    return policy


async def publish(folder, config, num_versions=3, noise=0.1):
    """A run's folder as far as an export reads it."""
    (folder / "config.toml").write_text("")
    store = DirectoryStore(folder / "objects")
    return await publish_to(store, config, num_versions, noise)


async def publish_to(store, config, num_versions=3, noise=0.1):
    tokenizer = train_tokenizer([CODE], vocab_size=400)
    await store.put(TOKENIZER_KEY, tokenizer.to_json().encode())
    publisher = Publisher(StoreIO(store))
    for version in range(num_versions):
        state = publishable_state(policy_of(config, version, noise))
        snapshot = {name: as_numpy(tensor) for name, tensor in state.items()}
        await publisher.prepare(
            version, snapshot, optimizer_step=version, config_json=config_json(config)
        )
    return tokenizer


@pytest.fixture(params=[SPARSE, DENSE], ids=["sparse", "dense"])
async def run(request, tmp_path):
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    await publish(folder, request.param)
    return folder


def export(run, *arguments):
    return main(["--runs-dir", str(run.parent), "export", "r1", *arguments])


@pytest.mark.parametrize("version", [None, 0, 1])
def test_an_export_computes_alike_everywhere(run, tmp_path, version, capsys):
    out = tmp_path / "out"
    chosen = [] if version is None else ["--version", str(version)]
    assert export(run, *chosen, "-o", str(out), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["policy_version"] == (2 if version is None else version)
    policy = load_checkpoint(out)
    expected = policy_of(policy.config, told["policy_version"])
    load_published(expected, publishable_state(expected))
    for name, view in hf_views(policy).items():
        assert torch.equal(view, hf_views(expected)[name]), name
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.arange(2, 50)
    with torch.no_grad():
        ours = policy.logits(policy(ids, [len(ids)]).hidden)
        torch.testing.assert_close(ours, model(ids[None]).logits[0], atol=1e-4, rtol=0)
    assert model.generation_config.eos_token_id == model.config.eos_token_id is not None
    assert not list(tmp_path.glob(".out*"))
    assert not list(out.glob("*mtp*"))


def test_objects_on_the_runs_own_server_are_read_after_the_run(tmp_path):
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[store]\nkind = "jetstream"\n')

    async def fill():
        run = RunDir(folder)
        async with open_log(run, "test"):
            await publish_to(run.store(), SPARSE, num_versions=1)

    asyncio.run(fill())
    assert export(folder, "-o", str(tmp_path / "out")) == 0
    load_checkpoint(tmp_path / "out")


def test_a_version_that_is_not_there_is_refused(run, tmp_path, capsys):
    for version in ("7", "-1"):
        assert export(run, "--version", version, "-o", str(tmp_path / "out")) == 2
        assert f"run r1: version {version}: expected one of 0 to 2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_version_whose_objects_are_gone_is_refused_whole(run, tmp_path, capsys):
    for path in (run / "objects" / delta_folder(1)).rglob("*"):
        if path.is_file():
            path.unlink()
    assert export(run, "--version", "1", "-o", str(tmp_path / "out")) == 2
    assert "run r1: version 1 is no longer in its store" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]


def test_a_run_without_weights_is_refused(tmp_path, capsys):
    folder = tmp_path / "runs" / "r1"
    (folder / "objects").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    assert export(folder, "-o", str(tmp_path / "out")) == 2
    assert "has published no weights yet" in capsys.readouterr().err


def test_only_a_new_or_empty_folder_is_written_to(run, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    assert export(run, "-o", str(out)) == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert export(run, "-o", str(out)) == 2
    assert "is not empty" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    assert export(run, "-o", str(link)) == 2
    assert not (tmp_path / "elsewhere").exists()


def test_an_export_that_fails_leaves_nothing(tmp_path):
    tensors = {"model.norm.weight": np.zeros(3, np.uint16)}
    with pytest.raises(ModelFormatError):
        write_model(tmp_path / "out", config_json(SPARSE), tensors, TokenizerFiles({}, {}), None)
    assert not list(tmp_path.iterdir())


def test_large_models_are_written_in_shards(tmp_path):
    policy = policy_of(SPARSE, 0)
    tensors = {name: as_numpy(tensor) for name, tensor in publishable_state(policy).items()}
    empty = TokenizerFiles({}, {})
    write_model(tmp_path / "out", config_json(SPARSE), tensors, empty, None, shard_bytes_max=30_000)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    load_checkpoint(tmp_path / "out")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
