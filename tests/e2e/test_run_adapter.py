"""A whole run with LoRA: trained, published, sampled, replayed."""

import pytest
from tests.e2e.test_run_outside_model import run_from
from tests.outside_model import write_model

pytest.importorskip("transformers")
pytest.importorskip("renderers")
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


def test_adapters_train_and_a_replay_gives_their_bits(tmp_path):
    write_model(tmp_path / "model", dense=True)
    optimizer = {"learning_rate": 0.01, "weight_decay": 0.1}
    run_from(tmp_path, tmp_path / "model", adapter={"rank": 4}, optimizer=optimizer)
