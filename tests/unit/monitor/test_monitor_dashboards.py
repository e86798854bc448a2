"""The dashboard and the alerts ask for what `/metrics` has: each name, label and label value."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.monitor.story import report, story

from penstock.actors.monitor.actor import exposition
from penstock.actors.monitor.fold import RunFold
from penstock.messages.base import Stream
from penstock.messages.control import LogArchived
from penstock.messages.reward import Outcome
from penstock.messages.telemetry import Wait

FOLDER = Path(__file__).parents[3] / "infra" / "dashboards"
STEP_METRICS = {
    "reward_mean", "pass_rate", "loss", "grad_norm", "entropy", "mismatch_k1", "mismatch_k3"
}  # fmt: skip
"""Of every step; `tests/sim/trainer` runs some."""
OWN_OF_PROMETHEUS = {"up": {"job"}}
_NAME = re.compile(r"\b(penstock_\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|=|!=|!~)\s*"([^"]*)"')
_BY = re.compile(r"\bby \(([^)]*)\)")


def exposed() -> dict[str, dict[str, set[str]]]:
    """Name -> label -> its values, of a run of which everything is known."""
    fold = RunFold()
    for event in story():
        fold.apply(event, 1000.0)
    filling = LogArchived(
        of=Stream.FEEDBACK, last=0, num_bytes=6, bytes_max=10, num_events=1, at=999.0
    )
    fold.apply(filling, 1000.0)
    wait = Wait(target="generator", reason="x", since=999.0, deadline_s=3.0)
    fold.apply(report("worker", "rollout_worker", 1000.0, 3.0, wait), 1000.0)
    found: dict[str, dict[str, set[str]]] = {}
    text = exposition(fold.state(1001.0)).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    found["penstock_step_metric"]["name"] |= STEP_METRICS
    found["penstock_rollouts_total"]["outcome"] |= set(Outcome)
    return found | {name: {label: set() for label in v} for name, v in OWN_OF_PROMETHEUS.items()}


EXPOSED = exposed()


def faults(expression: str) -> list[str]:
    """Return what an expression asks for in vain."""
    found, labels = [], set()
    for name, matchers in _NAME.findall(expression):
        if name not in EXPOSED:
            found.append(f"no metric {name}")
            continue
        labels |= EXPOSED[name].keys()
        for label, _, pattern in _MATCHER.findall(matchers):
            if label not in EXPOSED[name]:
                found.append(f"{name} has no label {label}")
            elif known := EXPOSED[name][label]:
                unknown = set(pattern.split("|")) - known
                found += [f"{name}: {label} is never {value!r}" for value in sorted(unknown)]
    by = {label.strip() for group in _BY.findall(expression) for label in group.split(",")}
    return found + [f"by {label}: no such label" for label in sorted(by - labels)]


def dashboard() -> list[tuple[str, str, str]]:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in panels
        for target in panel.get("targets", [])
    ]


def alerts() -> list[dict[str, object]]:
    [group] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return group["rules"]


@pytest.mark.parametrize(("title", "expression", "legend"), dashboard())
def test_every_panel_asks_for_what_is_exposed(title: str, expression: str, legend: str) -> None:
    assert faults(expression) == []
    [(name, _), *_] = _NAME.findall(expression)
    named = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert named <= EXPOSED[name].keys()


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_every_alert_asks_for_what_is_exposed(alert) -> None:
    assert faults(alert["expr"]) == []
    named = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    known = {label for name, _ in _NAME.findall(alert["expr"]) for label in EXPOSED[name]}
    assert named <= known and alert["annotations"]["action"]


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    text = " ".join([*(each[1] for each in dashboard()), *(str(rule["expr"]) for rule in alerts())])
    shown = {name for name, _ in _NAME.findall(text)}
    left_out = {
        "penstock_midtrain_tokens", "penstock_midtrain_loss", "penstock_role_tokens_total",
        "penstock_actor_gauge",
    }  # fmt: skip
    assert EXPOSED.keys() - shown == left_out


@pytest.mark.parametrize(
    "wrong",
    [
        "penstock_steps",
        "rate(penstock_rollouts[5m])",
        'penstock_step_metric{metric="loss"}',
        'penstock_step_metric{name="reward"}',
        "sum by (replica) (penstock_step)",
    ],
)
def test_a_wrong_name_is_found(wrong: str) -> None:
    assert faults(wrong)
