"""Fake machines that can be saved and copied, with all that they remember."""

import asyncio
from pathlib import Path

import msgspec
from tests.sim.rollout.machines import FakeBackend, FakeMachine

from penstock.envs.sandbox import Capability, SandboxFileError
from penstock.messages.sandbox import ExecResult


class Saved(msgspec.Struct):
    """What a checkpoint holds: files, and the answers that operation keys stand for."""

    files: dict[str, str]
    results: dict[str, ExecResult]


class SavingBackend(FakeBackend):
    """Its copies remember operation keys, as real ones do."""

    capabilities = frozenset({Capability.COLD_BOOT, Capability.CHECKPOINT, Capability.FORK})

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[FakeMachine] = []
        self.num_saves = 0
        self.save_s = 0.01
        self.is_forgetful = False
        """Whether its checkpoints hold nothing."""

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> FakeMachine:
        machine = await super().start(cpu=cpu, timeout_s=timeout_s)

        async def checkpoint(folder: Path) -> None:
            await asyncio.sleep(self.save_s)
            self.num_saves += 1
            results = {key: await task for key, task in machine._results.items()}
            folder.mkdir(parents=True)
            state = msgspec.msgpack.encode(Saved(files=machine.files, results=results))
            if not self.is_forgetful:
                (folder / "state").write_bytes(state)

        machine.checkpoint = checkpoint
        return machine

    async def restore(
        self, folder: Path, *, cpu: int | None = None, timeout_s: float = 10.0
    ) -> FakeMachine:
        try:
            saved = msgspec.msgpack.decode((folder / "state").read_bytes(), type=Saved)
        except (OSError, msgspec.DecodeError) as error:
            raise SandboxFileError(f"checkpoint {folder}: {error}") from error
        machine = await self.start(cpu=cpu)
        machine.files = saved.files
        for key, result in saved.results.items():
            machine._results[key] = asyncio.create_task(_answer(result))
        self.copies.append(machine)
        return machine


async def _answer(result: ExecResult) -> ExecResult:
    return result
