"""Each class of settings has bounds on both sides: nothing is infinite or beyond its machine."""

from pathlib import Path

import pytest

from penstock.infra.config.file import load_config
from penstock.messages.errors import ConfigError

QUICKSTART = Path("examples/quickstart/config.toml")


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1.0"])
@pytest.mark.parametrize(
    "name",
    [
        "trainer.optimizer.learning_rate",
        "trainer.loss.ratio_cap",
        "trainer.loss.token_denominator",
        "trainer.batch_wait_s_max",
        "generator.lag_s_max",
        "run.wall_s_max",
        "policy.rope_theta",
    ],
)
def test_a_float_setting_is_finite(name, value):
    section = r"\.".join(name.split("."))
    with pytest.raises(ConfigError, match=rf"Expected `float` .*\$\.{section}"):
        load_config(QUICKSTART, [f"{name}={value}"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trainer.num_passes", 1025),
        ("trainer.num_passes", 10**25),
        ("trainer.num_threads", 1025),
        ("trainer.midtrain.num_workers", 1025),
        ("generator.num_threads", 1025),
        ("trainer.groups_per_batch", 2**53),
        ("trainer.steps_max", 2**63),
        ("run.seed", -1),
        ("run.seed", 10**25),
    ],
)
def test_an_integer_setting_is_within_its_class(name, value):
    with pytest.raises(ConfigError, match=rf"Expected `int` .*\$\.{name}"):
        load_config(QUICKSTART, [f"{name}={value}"])
