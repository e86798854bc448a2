"""What is said of sandbox hosts and their scheduler is checked when it is read."""

from pathlib import Path

import pytest

from penstock.infra.config.file import load_config
from penstock.messages.errors import ConfigError

QUICKSTART = Path("examples/quickstart/config.toml")
FLEET = (
    'processes.machines=["sandbox_host:a", "judge"]',
    'processes.machines-b=["sandbox_host:b"]',
    'processes.scheduler=["scheduler"]',
    "sandbox_host.reports_to_scheduler=true",
    "rollout_worker.places_groups=true",
)


def test_two_hosts_and_a_scheduler_are_a_fleet() -> None:
    config = load_config(QUICKSTART, FLEET)
    assert config.rollout_worker.places_groups
    # The other one is `local`.
    load_config(QUICKSTART, ['processes.machines-b=["sandbox_host:b"]'])


@pytest.mark.parametrize("spec", ["a b", "*", "", "a.b", ">", "a/b", "..", "é", "acquire"])
def test_a_name_that_no_host_can_have_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"toml: processes\.more: 'sandbox_host:.*a host's name"):
        load_config(QUICKSTART, [f'processes.more=["sandbox_host:{spec}"]'])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ['processes.more=["sandbox_host:a", "sandbox_host:a"]'],
            r"processes\.more: 'sandbox_host:a' is in",
        ),
        (['processes.more=["sandbox_host:local"]'], r"processes\.more: .* in processes\.machines"),
        (['processes.more=["scheduler", "scheduler"]'], r"processes\.more: 'scheduler' is in"),
        (
            ['processes.more=["scheduler:x"]'],
            r"processes\.more: expected 'scheduler', got 'scheduler:x'",
        ),
        (["sandbox_host.host='a b'"], r"sandbox_host\.host: expected a host's name"),
        (["sandbox_host.quota=-1"], r">= 0 .*\$\.sandbox_host\.quota"),
        (
            ["sandbox_host.quotas={rollouts = 4}"],
            r"\(train\|eval\|live\).*\$\.sandbox_host\.quotas",
        ),
        (["sandbox_host.quotas={train = -4}"], r">= 0 .*\$\.sandbox_host\.quotas"),
        (["sandbox_host.reserved_slots=-1"], r">= 0 .*\$\.sandbox_host\.reserved_slots"),
        (["rollout_worker.places_groups=true"], r"places_groups: expected with it the role"),
        (
            [*FLEET, "sandbox_host.reports_to_scheduler=false"],
            r"places_groups: .*reports_to_scheduler",
        ),
        (
            [*FLEET, 'processes.scheduler=["compactor"]'],
            r"places_groups: expected with it the role",
        ),
        (
            [*FLEET, "sandbox_host.pool.live_max=7", "sandbox_host.pool.size=2"],
            r"pool\.live_max: expected .*group_size 8, got 7",
        ),
        ([*FLEET, "sandbox_host.quota=7"], r"sandbox_host\.quota: expected at least .* 8, got 7"),
        ([*FLEET, "sandbox_host.quotas={train = 1}"], r"sandbox_host\.quotas\.train.* 8, got 1"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(QUICKSTART, overrides)


CHAINS = (
    "prepare.limits.num_segments_max=4",
    "prepare.limits.window_tokens_max=256",
    "rollout_worker.summary.num_tokens_max=64",
    "generator.num_tokens_max=512",
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["prepare.limits.window_tokens_max=0"],
            r"prepare\.limits\.window_tokens_max: expected one, as num_segments_max is 4",
        ),
        (
            ["prepare.limits.window_tokens_max=1024"],
            r"prepare\.limits\.window_tokens_max: expected at most generator\.num_tokens_max 512",
        ),
        (
            ["rollout_worker.summary.trigger=0.8"],
            r"rollout_worker\.summary\.num_tokens_max: expected less than 51, what rollout_worker"
            r"\.summary\.trigger 0\.8 leaves of prepare\.limits\.window_tokens_max 256, got 64",
        ),
        (["rollout_worker.summary.trigger=1.0"], r"< 1.*\$\.rollout_worker\.summary\.trigger"),
        (["rollout_worker.summary.mode='read'"], r"\$\.rollout_worker\.summary\.mode"),
        (["rollout_worker.summary.request=' '"], r"rollout_worker\.summary\.request: expected"),
    ],
)
def test_a_window_holds_what_is_read_and_a_summary(overrides, expected) -> None:
    limits = load_config(QUICKSTART, [*CHAINS, "prepare.limits.num_tokens_max=4096"]).prepare.limits
    assert (limits.num_segments_max, limits.window_tokens_max) == (4, 256)
    with pytest.raises(ConfigError, match=expected):
        load_config(QUICKSTART, [*CHAINS, *overrides])


def test_without_a_summary_a_window_needs_no_room_for_one() -> None:
    load_config(QUICKSTART, [*CHAINS, "rollout_worker.summary={mode='none', trigger=0.9}"])
