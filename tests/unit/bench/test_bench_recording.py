"""`python -m tests.lab recording`: pairs of steps, told with an interval."""

import pytest
from tests.lab.__main__ import PROGRAMS

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.infra.mismatch.recording import measure_recording
from penstock.kernels import native

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")


def test_each_batch_has_a_ratio_inside_its_interval():
    config = PolicyConfig(
        vocab_size=90,
        hidden_size=32,
        num_hidden_layers=3,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
    )
    found = measure_recording(Policy(config, seed=0), {1: 20, 3: 10})
    assert list(found["step"]) == ["1", "3"]
    for row in found["step"].values():
        assert 0.0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    engine, sealed = (found["bytes_per_token"][name] for name in ("engine", "sealed"))
    assert engine == 3 * 2
    assert 3 < sealed < 3.5, "18 bits are 3 bytes; a turn adds a header"


def test_it_is_a_command():
    assert "recording" in PROGRAMS
