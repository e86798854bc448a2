"""Conservation ledger: accounts for every sampled token and every preference, from the log alone.

For each policy version, generated = trained + stale + filtered + infra_failed + judge_failed +
not_reproducible + greedy + erased + skipped + withheld + in_flight. Turns say what was generated,
batch manifests what became of it, and steps what they skipped. In a trained sample, turns that are
read but not trained count as withheld. A manifest may arrive before its turns, because order is
guaranteed only within a stream; balance is judged by the final state, not by the order of arrival.

Each of users' corrections and judgments must be in exactly one manifest. Pure.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reward import Outcome
from penstock.messages.rollout import TurnSampled, TurnSummary, tokens_by_version
from penstock.messages.signals.preferences import (
    Label,
    PreferenceEntry,
    PreferenceFate,
    PreferencePair,
    preference_name,
)
from penstock.messages.task import Purpose
from penstock.messages.training import BatchManifest, LedgerRow, SampleEntry, StepCompleted

SKIPPED = "skipped"
"""Fate of preferences in a step that changed no weights."""


class PreferenceBook:
    """Account of users' corrections and judgments, folded from the log's streams in any order.

    In a run that does not train on preferences, all of them stay waiting.
    """

    def __init__(self) -> None:
        """Start with an empty account."""
        self._made: set[str] = set()
        self._settled: dict[str, tuple[int, PreferenceFate]] = {}
        """Preference name -> step and fate."""
        self._skipped: set[int] = set()
        self._faults: list[str] = []

    def add(self, event: PreferencePair | Label) -> None:
        """Record a preference that a user created."""
        self._made.add(preference_name(event))

    def settle(self, step: int, entries: Iterable[PreferenceEntry]) -> None:
        """Record the preferences that a manifest lists; reading it again changes nothing."""
        for entry in entries:
            settled = (step, entry.fate)
            earlier = self._settled.setdefault(entry.name, settled)
            if earlier != settled:
                text = f"settled in step {earlier[0]} and in step {step}"
                self._faults.append(f"{entry.name}: {text}")

    def skip(self, step: int) -> None:
        """Record that a step changed no weights."""
        self._skipped.add(step)

    def totals(self) -> dict[str, int]:
        """Return the number of preferences created, with each fate, and still waiting."""
        fates = Counter(
            SKIPPED if step in self._skipped and fate is PreferenceFate.TRAINED else fate.value
            for step, fate in self._settled.values()
        )
        named = {fate: fates[fate] for fate in (*map(str, PreferenceFate), SKIPPED)}
        num_waiting = len(self._made - self._settled.keys())
        return {"made": len(self._made), **named, "waiting": num_waiting}

    @property
    def violations(self) -> list[str]:
        """Descriptions of everything that does not add up."""
        unknown = sorted(self._settled.keys() - self._made)
        return [*self._faults, *(f"{name}: in a manifest, but never created" for name in unknown)]


_TRAINED = "trained"
_SKIPPED = "skipped"
_WITHHELD = "withheld"
_IN_FLIGHT = "in_flight"
_COLUMNS = {
    Outcome.SOLVED: _TRAINED,
    Outcome.FAILED: _TRAINED,
    Outcome.POLICY_ERROR: _TRAINED,
    Outcome.TIMEOUT: _TRAINED,
    Outcome.STALE: "stale",
    Outcome.FILTERED: "filtered",
    Outcome.CAPPED: "filtered",
    Outcome.INFRASTRUCTURE_ERROR: "infra_failed",
    Outcome.CANCELLED: "infra_failed",
    Outcome.JUDGE_ERROR: "judge_failed",
    Outcome.NOT_REPRODUCIBLE: "not_reproducible",
    Outcome.GREEDY: "greedy",
    Outcome.ERASED: "erased",
    Outcome.WITHHELD: _WITHHELD,
}


class _Settlement(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    revision: int
    column: str
    spans: dict[int, int]
    trained_from: int = 0

    def column_of(self, version: int) -> str:
        """Return the column of a version's tokens; those before `trained_from` are withheld."""
        is_withheld = self.column in {_TRAINED, _SKIPPED} and version < self.trained_from
        return _WITHHELD if is_withheld else self.column


class Ledger:
    """Counts of sampled tokens by policy version and fate.

    Tokens of training rollouts count when their turn is stored; those of live requests when they
    become a sample (`LiveSampleJoined`). Evaluation rollouts do not count.
    """

    def __init__(self) -> None:
        self._generated: dict[str, dict[int, int]] = {}
        """Rollout -> policy version -> sampled tokens."""
        self._withheld: dict[str, dict[int, int]] = {}
        """Rollout -> policy version -> sampled tokens of turns that are read but not trained."""
        self._seen_turns: set[tuple[str, int]] = set()
        self._settled: dict[str, _Settlement] = {}
        self._columns: dict[int, Counter[str]] = {}
        """Policy version -> column -> tokens."""
        self._unequal: dict[str, None] = {}
        """Settled rollouts whose turns do not yet match their settlement, in order of settling."""
        self._faults: list[str] = []
        self._skipped: set[int] = set()
        """Steps that changed no weights."""
        self.preferences = PreferenceBook()

    def add_turn(self, event: TurnSampled) -> None:
        """Count a sampled turn; adding it again changes nothing."""
        if event.purpose is Purpose.TRAIN:
            self._generate(event.rollout_id, event.turn_index, event.turn.summary)

    def add_live(self, event: LiveSampleJoined) -> None:
        """Count live requests that became a sample; later revisions add nothing."""
        for index, turn in enumerate(event.turns):
            self._generate(event.sample_id, index, turn)

    def add_manifest(self, event: BatchManifest) -> None:
        """Settle the samples of one step, both trained and left out."""
        for group in event.groups:
            self._settle(event.step, group.samples)
        for group in event.discarded:
            self._settle(event.step, group.samples, is_discarded=True)
        self._settle(event.step, event.live)
        self.preferences.settle(event.step, event.preferences)

    def add_step(self, event: StepCompleted) -> None:
        """Record a completed step; move the samples of a skipped step to their own column."""
        # Nothing to move for a normal step, or for an event that is read again.
        if not event.skipped or event.step in self._skipped:
            return
        self._skipped.add(event.step)
        self.preferences.skip(event.step)
        for name, settlement in self._settled.items():
            if settlement.step == event.step and settlement.column == _TRAINED:
                skipped = msgspec.structs.replace(settlement, column=_SKIPPED)
                self._settled[name] = skipped
                self._move(name, settlement, skipped)

    def rows(self) -> dict[int, LedgerRow]:
        """Return one row for each policy version that drew a token, in order."""
        return {version: LedgerRow(**self._columns[version]) for version in sorted(self._columns)}

    def totals(self) -> LedgerRow:
        """Return the sum over all policy versions."""
        total: Counter[str] = Counter()
        for columns in self._columns.values():
            total.update(columns)
        return LedgerRow(**total)

    @property
    def violations(self) -> list[str]:
        """Descriptions of everything that does not add up; a sound run ends with none."""
        unequal = map(self._describe, self._unequal)
        return [*self._faults, *unequal, *self.preferences.violations]

    @property
    def balanced(self) -> bool:
        """Whether each sample was settled once, with its exact tokens, and each preference once."""
        return not (self._faults or self._unequal or self.preferences.violations)

    def _generate(self, name: str, turn_index: int, turn: TurnSummary) -> None:
        # Events may be read again, and each revision of a live sample repeats its turns.
        if (name, turn_index) in self._seen_turns:
            return
        self._seen_turns.add((name, turn_index))
        tables = [self._generated.setdefault(name, {})]
        if turn.is_withheld:
            tables.append(self._withheld.setdefault(name, {}))
        settled = self._settled.get(name)
        for version, num_tokens in tokens_by_version(turn.version_spans).items():
            # If the manifest arrived first, the tokens go straight to their settled column.
            for tokens in tables:
                tokens[version] = tokens.get(version, 0) + num_tokens
            columns = self._columns.setdefault(version, Counter())
            columns["generated"] += num_tokens
            column = _column_of(settled, version)
            columns[_withheld_column(column) if turn.is_withheld else column] += num_tokens
        self._compare(name)

    def _settle(
        self, step: int, samples: Iterable[SampleEntry], *, is_discarded: bool = False
    ) -> None:
        for sample in samples:
            name, column = sample.rollout_id, _COLUMNS[sample.outcome]
            # The skipped step's own event may have come before its manifest.
            if column == _TRAINED and not is_discarded and step in self._skipped:
                column = _SKIPPED
            settlement = _Settlement(
                step=step,
                revision=sample.revision,
                column=column,
                spans=tokens_by_version(sample.version_spans),
                trained_from=sample.trained_from,
            )
            earlier = self._settled.get(name)
            if earlier and earlier.revision < sample.revision:
                # Only a later revision of a live sample may settle again; otherwise, a second
                # settlement that differs means that two steps claim the same tokens.
                self._settle_again(name, earlier, settlement)
                continue
            if earlier:
                if earlier != settlement:
                    fault = f"{name}: settled in step {earlier.step} and in step {step}"
                    self._faults.append(fault)
                continue
            if is_discarded and column == _TRAINED:
                fault = f"{name}: discarded in step {step}, yet its outcome is {sample.outcome}"
                self._faults.append(fault)
            self._move(name, None, settlement)
            self._settled[name] = settlement
            self._compare(name)

    def _settle_again(self, name: str, earlier: _Settlement, later: _Settlement) -> None:
        """Apply a later revision of a live sample; it counts as trained if any revision was."""
        # Training cannot be undone: a revision that is left out does not take tokens back.
        if earlier.column == _TRAINED or later.column != _TRAINED:
            later = msgspec.structs.replace(later, step=earlier.step, column=earlier.column)
        self._move(name, earlier, later)
        self._settled[name] = later
        self._compare(name)

    def _move(self, name: str, before: _Settlement | None, after: _Settlement) -> None:
        """Move a rollout's tokens to their new column; tokens not settled before were in flight."""
        withheld = self._withheld.get(name, {})
        for version, num_tokens in self._generated.get(name, {}).items():
            columns, num_withheld = self._columns[version], withheld.get(version, 0)
            for settlement, sign in ((before, -1), (after, 1)):
                column = _column_of(settlement, version)
                columns[column] += sign * (num_tokens - num_withheld)
                columns[_withheld_column(column)] += sign * num_withheld

    def _compare(self, name: str) -> None:
        settlement = self._settled.get(name)
        if settlement is None or settlement.spans == self._generated.get(name, {}):
            self._unequal.pop(name, None)
        else:
            self._unequal[name] = None

    def _describe(self, name: str) -> str:
        settlement, generated = self._settled[name], self._generated.get(name, {})
        return (
            f"{name}: step {settlement.step} settles {settlement.spans} tokens by version, "
            f"but its turns have {generated}"
        )


def _column_of(settlement: _Settlement | None, version: int) -> str:
    return settlement.column_of(version) if settlement else _IN_FLIGHT


def _withheld_column(column: str) -> str:
    """Return the column of a sample's withheld turns, given that of its other tokens."""
    return _WITHHELD if column in {_TRAINED, _SKIPPED} else column
