"""Demonstrations for mid-training: episodes of mixed quality on training tasks.

An actor with known weaknesses (`Habits`) attempts a task with the harness itself, so every
observation has the wording that the policy will meet. It may give up, edit wrongly, not check, or
have a call refused and continue. The policy that imitates it starts low, and
has seen what RL then has to find.
"""

import random
from dataclasses import dataclass

import msgspec

from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.harness.session import Session
from penstock.envs.harness.tool_calls import ToolResult
from penstock.envs.ladder.dry_run import DryRunSandbox
from penstock.envs.ladder.repository import CHECK_COMMAND, SEARCH, Repository, ShortEdit
from penstock.messages.rollout import ToolCall
from penstock.messages.settings import UnitInterval


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
        self._session = Session(harness, self._sandbox, repository.task.limits)
        self._turns: list[DemonstratedTurn] = []

    async def run(self) -> Transcript:
        repository, habits = self._repository, self._habits
        if self._flip(habits.looks):
            if repository.task.category == SEARCH:
                await self._turn("grep", pattern=f"def {repository.function_name}")
            await self._turn("read_file", path=repository.path)
            if self._flip(habits.edits):
                await self._edit_and_check()
        await self._turn("finish")
        return Transcript(repository.task.instruction, tuple(self._turns), self._harness)

    async def _edit_and_check(self) -> None:
        edit = self._choose()
        if self._flip(self._habits.slips):
            await self._slip(edit)
        await self._edit(edit)
        if not self._flip(self._habits.checks):
            return
        if await self._check() or not self._flip(self._habits.repairs):
            return
        if await self._repair(edit, self._choose()):
            await self._check()

    def _choose(self) -> ShortEdit:
        if self._flip(self._habits.edits_rightly):
            return self._repository.gold_edit
        return self._repository.wrong_edit(self._rng) or self._repository.gold_edit

    async def _repair(self, first: ShortEdit, second: ShortEdit) -> bool:
        """Edit what the first edit left behind, or take that back and edit in another place.

        Returns:
            False where the first edit's text is not there exactly once: no edit can name it.

        """
        text = self._sandbox.files[self._repository.path]
        if first.new == second.new or text.count(first.new) != 1:
            return False
        if first.old == second.old:
            await self._edit(ShortEdit(first.new, second.new))
        else:
            await self._edit(ShortEdit(first.new, first.old))
            await self._edit(second)
        return True

    async def _edit(self, edit: ShortEdit) -> None:
        await self._turn("edit_file", path=self._repository.path, old=edit.old, new=edit.new)

    async def _slip(self, edit: ShortEdit) -> None:
        """Name a file or quote a text that is not there, or a text that is there more than once."""
        other = self._repository.wrong_edit(self._rng) or edit
        quotes = [other.new, *(edit.old[:end] for end in range(1, len(edit.old)))]
        text = self._sandbox.files[self._repository.path]
        slips = [
            (self._repository.path, old)
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
            await self._turn("edit_file", is_slip=True, path=path, old=old, new=edit.new)

    async def _check(self) -> bool:
        result = await self._turn("run_terminal", command=CHECK_COMMAND)
        return result.text == "ok"

    async def _turn(self, tool: str, *, is_slip: bool = False, **arguments: str) -> ToolResult:
        calls = (ToolCall(name=tool, arguments=arguments),)
        results = await self._session.run(calls)
        self._turns.append(DemonstratedTurn(calls, tuple(results), is_slip))
        return results[0]

    def _flip(self, probability: float) -> bool:
        return self._rng.random() < probability
