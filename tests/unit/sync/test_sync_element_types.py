"""Kinds of elements in the live protocol: coded as what they are, and named in manifests."""

from collections import Counter

import numpy as np
import pytest
import torch

from penstock.actors.policy.checkpoint import as_numpy
from penstock.actors.policy.snapshot import E8M0, FP8_E4M3
from penstock.actors.relay.core.objects import representation
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.history import read_back
from penstock.actors.relay.publish.publisher import Publisher
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels import delta
from penstock.kernels.digest import root_digest


async def no_sleep(duration_s):
    """Take no time."""


def state(step):
    """Return MXFP8 weights with their scales, beside some of bf16, after small steps."""
    generator = torch.Generator().manual_seed(3)
    master = 0.02 * torch.randn(1 << 15, generator=generator)
    for _ in range(step):
        master += 2e-4 * torch.randn(master.shape, generator=generator)
    scales = torch.full((1 << 10,), 2.0**-12).to(torch.float8_e8m0fnu)
    return {
        "experts": (master * 4096).to(torch.float8_e4m3fn).view(64, -1),
        "experts.scales": scales.view(64, -1),
        "norm": master[:512].to(torch.bfloat16),
    }


def snapshot(step):
    return {name: as_numpy(tensor) for name, tensor in state(step).items()}


async def test_fp8_is_coded_by_its_exponents_and_named():
    store = MemoryStore()
    publisher = Publisher(StoreIO(store, no_sleep))
    for version in range(3):
        manifest = await publisher.prepare(
            version, snapshot(version), optimizer_step=version, config_json=""
        )
        assert manifest.representation == "mxfp8+bf16"
    headers = [delta.read_header(await store.get(shard.object_key)) for shard in manifest.shards]
    assert [header.dtype for header in headers] == [
        delta.Dtype.BF16, delta.Dtype.FP8_E4M3, delta.Dtype.INT8,
    ]  # fmt: skip
    assert headers[1].codec is delta.Codec.CLASS_GAP_ULP
    as_integers = delta.encode(*(snapshot(step)["experts"].view(np.uint8) for step in (1, 2)))
    assert manifest.shards[1].num_bytes < 0.9 * len(as_integers)
    flat, _ = await read_back(StoreIO(store, no_sleep, _in_place), 2)
    assert flat.digest() == root_digest(snapshot(2)) == manifest.target_root_digest


async def _in_place(function, *args):
    return function(*args)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"BF16": 5}, "bf16"),
        ({"BF16": 5, "F32": 9}, "fp32+bf16"),
        ({"F8_E4M3": 9, "F32": 1}, "fp8_e4m3+fp32"),
        ({"F8_E4M3": 6, "F8_E8M0": 1, "BF16": 8}, "bf16+mxfp8"),
        ({"I32": 1, "U32": 1}, "int32"),
    ],
)
def test_a_manifest_names_what_there_is_most_of_first(counts, expected):
    assert representation(Counter(counts)) == expected


def test_bytes_that_torch_calls_floats_keep_their_kind_through_numpy():
    assert as_numpy(torch.zeros(2).to(torch.float8_e4m3fn)).dtype.metadata == FP8_E4M3.metadata
    assert as_numpy(torch.ones(2).to(torch.float8_e8m0fnu)).dtype.metadata == E8M0.metadata
    assert as_numpy(torch.zeros(2, dtype=torch.uint8)).dtype.metadata is None
