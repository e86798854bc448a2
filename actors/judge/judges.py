"""The judges: what each must offer, and the table that names them."""

from collections.abc import Callable
from typing import Protocol, cast

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.hidden_tests import HiddenTestsJudge, SameFilesJudge
from penstock.actors.judge.reward import Findings
from penstock.actors.judge.task_steps import StepsJudge
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import is_reference, load_reference
from penstock.messages.reading.trajectories import Trajectory


class Judge(Protocol):
    """Finds out what a rollout achieved."""

    @property
    def name(self) -> str:
        """Its name in verdicts."""
        ...

    @property
    def version(self) -> str:
        """Goes up with every change to what it finds."""
        ...

    async def judge(self, rollout: Trajectory, task: GradedTask, ctx: Context) -> Findings:
        """Grade one rollout; failures of machines are an outcome, not an error."""
        ...


JUDGES: dict[str, Callable[[JudgeConfig], Judge]] = {
    HiddenTestsJudge.name: lambda config: StepsJudge(SameFilesJudge(HiddenTestsJudge(config))),
}


def make_judge(config: JudgeConfig) -> Judge:
    """Return the judge that the settings name.

    Raises:
        ConfigError: There is none of that name, or own code that it names is no judge.

    """
    if is_reference(config.judge):
        own = cast("Callable[[JudgeConfig], Judge]", load_reference(config.judge, "judge.judge"))
        judge = own(config)
        if missing := [part for part in ("version", "judge") if not hasattr(judge, part)]:
            text = f"expected a judge, it has no {', '.join(missing)}"
            raise ConfigError(f"judge.judge: {config.judge!r}: {text}")
        return judge
    if config.judge not in JUDGES:
        choices = ", ".join(sorted(JUDGES))
        raise ConfigError(f"judge.judge: {config.judge!r} is none of {choices}")
    return JUDGES[config.judge](config)
