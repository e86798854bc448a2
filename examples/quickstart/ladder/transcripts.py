"""Demonstrations for mid-training: episodes of mixed quality on training tasks.

An actor with known weaknesses (`Habits`) attempts a task with the harness itself, so every
observation has the wording that the policy will meet. It may give up, edit wrongly, not check, or
have a call refused and continue. The policy that imitates it starts low, and
has seen what RL then has to find.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from penstock import HARNESS_VERSION, ToolCall, ToolResult, ToolSession
from penstock.messages.settings import UnitInterval

from .dry_run import DryRunSandbox
from .repository import (
    CHECK_COMMAND,
    SEARCH,
    Fault,
    Repository,
    ShortEdit,
)

_EDIT = "edit_file"


class Habits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the demonstrating actor behaves: probabilities at each choice."""

    looks: UnitInterval = 0.95
    """Reads the file before it edits; else it gives up at once."""
    edits: UnitInterval = 0.8
    """Tries an edit after looking; else it gives up."""
    edits_rightly: UnitInterval = 0.45
    """Share of edits that are right."""
    slips: UnitInterval = 0.0
    """Before an edit, tries one that is refused: the wrong file, or text that is not there just
    once. The policy reads the slip and does not imitate it: what it learns is how to continue."""
    checks: UnitInterval = 0.7
    """Runs the visible check after an edit."""
    repairs: UnitInterval = 0.4
    """After a failed check takes its own edit back and tries another; else it ends."""
    parallel: UnitInterval = 0.0
    """On a task with several bugs, reads all files in one turn and edits them in one; else it makes
    one call a turn."""


@dataclass(frozen=True)
class DemonstratedTurn:
    """Calls of one turn and what they gave."""

    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]
    is_slip: bool = False
    """Not to be imitated."""


@dataclass(frozen=True)
class Transcript:
    """One attempt."""

    instruction: str
    turns: tuple[DemonstratedTurn, ...]
    harness: str = HARNESS_VERSION
    """Version of the tools that were used."""

    def until_edited(self) -> "Transcript":
        """Return it up to its last edit; whole where it makes none."""
        edits = [index for index, turn in enumerate(self.turns) if turn.calls[0].name == _EDIT]
        return replace(self, turns=self.turns[: edits[-1] + 1]) if edits else self


async def demonstrate(
    repository: Repository, habits: Habits, rng: random.Random, harness: str = HARNESS_VERSION
) -> Transcript:
    """Attempt a task once, with one version of the tools."""
    return await _Attempt(repository, habits, rng, harness).run()


class _Attempt:
    def __init__(
        self, repository: Repository, habits: Habits, rng: random.Random, harness: str
    ) -> None:
        self._repository, self._habits, self._rng = repository, habits, rng
        self._harness = harness
        self._sandbox = DryRunSandbox(repository.task.files)
        self._session = ToolSession(harness, self._sandbox, repository.task.limits)
        self._is_parallel = len(repository.faults) > 1 and self._flip(habits.parallel)
        self._turns: list[DemonstratedTurn] = []

    async def run(self) -> Transcript:
        repository, habits = self._repository, self._habits
        if self._flip(habits.looks):
            if repository.task.category == SEARCH:
                pattern = f"def {repository.faults[0].function_name}"
                await self._turn(ToolCall(name="grep", arguments={"pattern": pattern}))
            await self._turns_of(
                ToolCall(name="read_file", arguments={"path": fault.path})
                for fault in repository.faults
            )
            if self._flip(habits.edits):
                await self._edit_and_check()
        await self._turn(ToolCall(name="finish", arguments={}))
        return Transcript(repository.task.instruction, tuple(self._turns), self._harness)

    async def _edit_and_check(self) -> None:
        faults = self._repository.faults
        edits = [self._choose(fault) for fault in faults]
        if self._flip(self._habits.slips):
            await self._slip(faults[0], edits[0])
        await self._turns_of(_edit(*one) for one in zip(faults, edits, strict=True))
        if not self._flip(self._habits.checks):
            return
        if await self._check() or not self._flip(self._habits.repairs):
            return
        wrong = [
            (fault, edit)
            for fault, edit in zip(faults, edits, strict=True)
            if edit != fault.gold_edit
        ]
        if all([await self._repair(*one, self._choose(one[0])) for one in wrong]):
            await self._check()

    def _choose(self, fault: Fault) -> ShortEdit:
        if self._flip(self._habits.edits_rightly):
            return fault.gold_edit
        return fault.wrong_edit(self._rng) or fault.gold_edit

    async def _repair(self, fault: Fault, first: ShortEdit, second: ShortEdit) -> bool:
        """Edit what the first edit left behind, or take that back and edit in another place.

        Returns:
            False where the first edit's text is not there exactly once: no edit can name it.

        """
        text = self._sandbox.files[fault.path]
        if first.new == second.new or text.count(first.new) != 1:
            return False
        if first.old == second.old:
            await self._turn(_edit(fault, ShortEdit(first.new, second.new)))
        else:
            await self._turn(_edit(fault, ShortEdit(first.new, first.old)))
            await self._turn(_edit(fault, second))
        return True

    async def _slip(self, fault: Fault, edit: ShortEdit) -> None:
        """Name a file or quote a text that is not there, or a text that is there more than once."""
        other = fault.wrong_edit(self._rng) or edit
        quotes = [other.new, *(edit.old[:end] for end in range(1, len(edit.old)))]
        text = self._sandbox.files[fault.path]
        slips = [
            (fault.path, old)
            for old in quotes
            if old not in ("", edit.new) and text.count(old) != 1
        ]
        slips += [
            (path, edit.old)
            for path, content in self._sandbox.files.items()
            if content.count(edit.old) != 1
        ]
        if slips:
            path, old = self._rng.choice(slips)
            arguments = {"path": path, "old": old, "new": edit.new}
            await self._turn(ToolCall(name=_EDIT, arguments=arguments), is_slip=True)

    async def _check(self) -> bool:
        [result] = await self._turn(
            ToolCall(name="run_terminal", arguments={"command": CHECK_COMMAND})
        )
        return result.text == "ok"

    async def _turns_of(self, calls: Iterable[ToolCall]) -> None:
        """Make calls that do not need each other's results: in one turn, or in a turn each."""
        if self._is_parallel:
            await self._turn(*calls)
            return
        for call in calls:
            await self._turn(call)

    async def _turn(self, *calls: ToolCall, is_slip: bool = False) -> list[ToolResult]:
        results = await self._session.run(calls, lambda: 0.0)  # No clock: the same each time.
        self._turns.append(DemonstratedTurn(calls, tuple(results), is_slip))
        return results

    def _flip(self, probability: float) -> bool:
        return self._rng.random() < probability


def _edit(fault: Fault, edit: ShortEdit) -> ToolCall:
    arguments = {"path": fault.path, "old": edit.old, "new": edit.new}
    return ToolCall(name=_EDIT, arguments=arguments)
