"""The conservation ledger: every sampled token ends in exactly one column.

generated = trained + stale + filtered + infra_failed + judge_failed + in_flight, for each policy
version. It is folded from the log alone: turns say what was generated, batch manifests what became
of it. Streams are not ordered among each other, so a manifest may come before its turns; the
balance is judged on the state, not on the way to it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reward import Outcome
from penstock.messages.rollout import TurnSampled, VersionSpan
from penstock.messages.task import Purpose
from penstock.messages.training import BatchManifest, LedgerRow, SampleEntry

_TRAINED = "trained"
_COLUMNS = {
    Outcome.SOLVED: _TRAINED,
    Outcome.FAILED: _TRAINED,
    Outcome.POLICY_ERROR: _TRAINED,
    Outcome.TIMEOUT: _TRAINED,
    Outcome.STALE: "stale",
    Outcome.FILTERED: "filtered",
    Outcome.INFRASTRUCTURE_ERROR: "infra_failed",
    Outcome.CANCELLED: "infra_failed",
    Outcome.JUDGE_ERROR: "judge_failed",
}


class _Settlement(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    column: str
    spans: dict[int, int]


class Ledger:
    """Counts sampled tokens by policy version and fate.

    Train rollouts count from their turns on, live requests from `LiveSampleJoined` on (before that
    they are not training data); evaluation is not training data at all.
    """

    def __init__(self) -> None:
        self._generated: dict[str, dict[int, dict[int, int]]] = {}
        self._settled: dict[str, _Settlement] = {}
        self._faults: list[str] = []

    def add_turn(self, event: TurnSampled) -> None:
        """Count a sampled turn; adding one again changes nothing."""
        if event.purpose is Purpose.TRAIN:
            turns = self._generated.setdefault(event.rollout_id, {})
            turns[event.turn_index] = _sum_spans(event.turn.version_spans)

    def add_live(self, event: LiveSampleJoined) -> None:
        """Count a live request that became a sample."""
        spans = _sum_spans(event.turn.version_spans)
        self._generated.setdefault(event.request_id, {})[0] = spans

    def add_manifest(self, event: BatchManifest) -> None:
        """Settle the samples of one step, trained or left out."""
        for group in event.groups:
            self._settle(event.step, group.samples)
        for group in event.discarded:
            self._settle(event.step, group.samples, is_discarded=True)
        self._settle(event.step, event.live)

    def rows(self) -> dict[int, LedgerRow]:
        """Return one row for each policy version that drew a token, in order."""
        counts: dict[int, Counter[str]] = {}
        for rollout_id, version, num_tokens in self._tokens():
            columns = counts.setdefault(version, Counter())
            settlement = self._settled.get(rollout_id)
            columns["generated"] += num_tokens
            columns[settlement.column if settlement else "in_flight"] += num_tokens
        return {version: LedgerRow(**counts[version]) for version in sorted(counts)}

    def totals(self) -> LedgerRow:
        """Return the sum over all policy versions."""
        rows = self.rows().values()
        fields = LedgerRow.__struct_fields__
        return LedgerRow(**{name: sum(getattr(row, name) for row in rows) for name in fields})

    @property
    def violations(self) -> list[str]:
        """What does not add up, in words; empty is what a run must end with."""
        return [*self._faults, *self._mismatches()]

    @property
    def balanced(self) -> bool:
        """Whether each settled sample was settled once, to the token."""
        return not self.violations

    def _settle(
        self, step: int, samples: Iterable[SampleEntry], *, is_discarded: bool = False
    ) -> None:
        for sample in samples:
            name, column = sample.rollout_id, _COLUMNS[sample.outcome]
            settlement = _Settlement(
                step=step, column=column, spans=_sum_spans(sample.version_spans)
            )
            earlier = self._settled.setdefault(name, settlement)
            if earlier != settlement:
                self._faults.append(f"{name}: settled in step {earlier.step} and in step {step}")
            if is_discarded and column == _TRAINED:
                fault = f"{name}: discarded in step {step}, yet its outcome is {sample.outcome}"
                self._faults.append(fault)

    def _mismatches(self) -> Iterator[str]:
        for name, settlement in self._settled.items():
            generated = _merge(self._generated.get(name, {}).values())
            if generated != settlement.spans:
                yield (
                    f"{name}: step {settlement.step} settles {settlement.spans} tokens by version, "
                    f"its turns have {generated}"
                )

    def _tokens(self) -> Iterator[tuple[str, int, int]]:
        for rollout_id, turns in self._generated.items():
            for version, num_tokens in _merge(turns.values()).items():
                yield rollout_id, version, num_tokens


def _sum_spans(spans: Iterable[VersionSpan]) -> dict[int, int]:
    return _merge({span.policy_version: span.num_tokens} for span in spans)


def _merge(counts: Iterable[dict[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for count in counts:
        total.update(count)
    return {version: num for version, num in sorted(total.items()) if num}
