"""vLLM on a GPU as far as that shows without one: its arguments, patches of weights, drawing."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from penstock.actors.generator.engine import InvalidRequestError
from penstock.actors.generator.sampler import SamplingBatch, sample
from penstock.actors.generator.vllm.mirror import WeightMirror
from penstock.actors.generator.vllm.options import VllmOptions, engine_arguments, set_environment
from penstock.actors.generator.vllm.worker import DeviceWeights
from penstock.infra.config.file import load_config
from penstock.infra.models import engine
from penstock.kernels.delta import Patch
from penstock.kernels.digest import root_digest
from penstock.messages.errors import ConfigError

QUICKSTART = Path("examples/quickstart/config.toml")
ON_GPU = ["generator.engine=vllm", "generator.device=cuda"]


async def started_with(monkeypatch, overrides):
    """Return the options that a generator of a configuration gives to vLLM."""
    config = load_config(QUICKSTART, overrides)
    found = []

    class Started:
        def __init__(self, policy, options, tokenizer, stop_ids, config_text):
            found.append(options)

        async def start(self):
            pass

    class Chat:
        tokenizer, stop_ids = None, ()

    monkeypatch.setattr(engine, "VllmEngine", Started)
    await engine.start_engine(config.generator, config.policy, Chat())
    return found[0]


async def test_settings_reach_vllms_arguments_under_their_names(monkeypatch):
    names = {"gpu_memory_utilization": 0.4, "tensor_parallel_size": 2, "max_model_len": 4096,
             "quantization": "fp8", "kv_cache_dtype": "fp8"}  # fmt: skip
    overrides = [f"generator.vllm.{name}={value!r}" for name, value in names.items()]
    options = await started_with(monkeypatch, [*ON_GPU, *overrides])
    arguments = engine_arguments(options, Path("m"))
    assert {name: arguments[name] for name in names} == names
    assert arguments["distributed_executor_backend"] == "mp"
    assert arguments["enforce_eager"], "the quickstart's policy routes"
    assert "kv_cache_memory_bytes" not in arguments


async def test_a_cpu_gets_no_argument_of_a_gpu(monkeypatch):
    options = await started_with(monkeypatch, ["generator.engine=vllm"])
    arguments = engine_arguments(options, Path("m"))
    assert arguments["kv_cache_memory_bytes"] == 1 << 30
    assert not {"gpu_memory_utilization", "tensor_parallel_size"} & arguments.keys()


@pytest.mark.parametrize(
    "asked", ["generator.vllm.batch_invariant=true", "policy.numerics.mode=exact"]
)
async def test_batch_invariant_mode_is_asked_for_by_setting_or_exact_mode(monkeypatch, asked):
    environment = {}
    set_environment(await started_with(monkeypatch, [*ON_GPU, asked]), environment)
    assert environment["VLLM_BATCH_INVARIANT"] == "1"
    set_environment(await started_with(monkeypatch, ON_GPU), plain := {})
    assert "VLLM_BATCH_INVARIANT" not in plain


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["generator.engine=vllm", "generator.vllm.quantization=fp8"], "quantization: expected ''"),
        (["generator.engine=vllm", "policy.numerics.mode=exact"], "mode: expected fast or off"),
        ([*ON_GPU, "generator.vllm.tensor_parallel_size=3"], "a divisor of the model's 4 heads"),
        ([*ON_GPU, "generator.vllm.max_model_len=8"], "max_model_len: expected 0, or at least"),
        ([*ON_GPU, "generator.vllm.gpu_memory_utilization=1.5"], "gpu_memory_utilization"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(overrides, expected):
    with pytest.raises(ConfigError, match=expected):
        load_config(QUICKSTART, overrides)


SHAPES = {"a": (30, 4), "b": (7,), "c": (50,)}


def commit(mirror, device, patches):
    """Stage patches, bring the device's copy up to date, and return what it should hold."""
    mirror.begin()
    mirror.apply(patches)
    data = np.memmap(mirror.staged_file, np.uint8, "r")
    found = device.update(mirror.rows, data, mirror.changes)
    mirror.swap()
    return found, {name: mirror._live[1][name] for name in SHAPES}


def test_a_card_is_patched_by_what_a_version_changed():
    rng = np.random.default_rng(0)
    mirror, device = WeightMirror(SHAPES), DeviceWeights(torch.device("cpu"))
    whole = {name: rng.integers(0, 1 << 15, shape, np.uint16) for name, shape in SHAPES.items()}
    first, expected = commit(mirror, device, whole)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    for _ in range(3):
        at = np.sort(rng.choice(120, 9, replace=False)).astype(np.int64)
        patch = Patch(flat_indices=at, values=rng.integers(0, 1 << 15, 9, np.uint16))
        new = {"a": patch, "b": rng.integers(0, 1 << 15, 7, np.uint16)}
        found, expected = commit(mirror, device, new)
        for name, tensor in found.items():
            bits = tensor.view(torch.uint16).numpy()
            np.testing.assert_array_equal(bits, expected[name])
        assert found["a"].data_ptr() == places["a"], "patched in place"
        assert found["c"].data_ptr() == places["c"]


def test_after_a_failure_everything_is_sent_again():
    rng = np.random.default_rng(1)
    mirror, device = WeightMirror(SHAPES), DeviceWeights(torch.device("cpu"))
    commit(mirror, device, {"c": rng.integers(0, 99, 50, np.uint16)})
    mirror.begin()
    data = np.memmap(mirror.staged_file, np.uint8, "r")
    wrong = [("a", np.array([10_000], np.int32).tobytes())]
    with pytest.raises((ValueError, IndexError)):
        device.update(mirror.rows, data, wrong)
    found, expected = commit(mirror, device, {})
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.view(torch.uint16).numpy(), expected[name])


def test_drawing_takes_logits_of_any_device_and_gives_the_same():
    """On a device without values, only that no step needs the host's until the end."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    batch = SamplingBatch(temperatures=[1.0, 0.5, 0.0], uniforms=[0.3, 0.9, 0.1])
    tokens, logprobs = sample(logits.clone(), batch)
    again, values = sample(logits.clone(), batch)
    assert (tokens, logprobs) == (again, values)
    with pytest.raises(NotImplementedError):
        sample(logits.to("meta"), batch)  # `tolist` is the first step that needs values


def test_options_take_the_names_of_the_settings():
    config = load_config(QUICKSTART, ON_GPU)
    assert msgspec.structs.asdict(config.generator.vllm).keys() <= set(
        VllmOptions.__struct_fields__
    )


def test_tensors_that_only_transformers_knows_are_those_of_the_first_update():
    """Among them float32, as routers' biases are published."""
    rng = np.random.default_rng(2)
    mirror, device = WeightMirror({}), DeviceWeights(torch.device("cpu"))
    new = {"a": rng.integers(0, 99, (4, 3), np.uint16), "bias": rng.random(5, np.float32)}
    for patches in (
        new,
        {"bias": Patch(flat_indices=np.array([3]), values=np.zeros(1, np.uint32))},
    ):
        mirror.begin()
        mirror.apply(patches)
        data = np.memmap(mirror.staged_file, np.uint8, "r")
        found = device.update(mirror.rows, data, mirror.changes)
        mirror.verify(root_digest(mirror._standby[1]))
        mirror.swap()
    np.testing.assert_array_equal(found["a"].view(torch.uint16).numpy(), new["a"])
    expected = new["bias"].copy()
    expected[3] = 0
    np.testing.assert_array_equal(found["bias"].numpy(), expected)
    mirror.begin()
    with pytest.raises(InvalidRequestError, match="no tensor 'more'"):
        mirror.apply({"more": np.zeros(2, np.uint16)})
