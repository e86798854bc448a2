"""Penstock: reinforcement learning for coding agents as typed events on durable streams.

`penstock.infra.api.names` lists what this package offers programs; each name is imported when it
is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # The table again: no checker looks into `__getattr__`.
    from penstock.actors.judge.config import JudgeConfig as JudgeConfig
    from penstock.actors.judge.reward import Findings as Findings
    from penstock.actors.judge.task_steps import HiddenTestsJudge as HiddenTestsJudge
    from penstock.actors.policy.chat.builtin import PenstockChat as PenstockChat
    from penstock.actors.policy.chat.format import ChatMessage as ChatMessage
    from penstock.actors.policy.chat.format import OfferedTools as OfferedTools
    from penstock.actors.policy.chat.format import Role as Role
    from penstock.actors.policy.tokenizer import Tokenizer as Tokenizer
    from penstock.actors.policy.tokenizer import train_tokenizer as train_tokenizer
    from penstock.actors.runtime.context import Context as Context
    from penstock.actors.trainer.config import LossConfig as LossConfig
    from penstock.actors.trainer.objective.losses import LossTokens as LossTokens
    from penstock.actors.trainer.objective.losses import TokenLosses as TokenLosses
    from penstock.actors.trainer.objective.registry import LossSpec as LossSpec
    from penstock.envs.harness.tool_calls import Argument as Argument
    from penstock.envs.harness.tool_calls import ArgumentType as ArgumentType
    from penstock.envs.harness.tool_calls import InvalidCallError as InvalidCallError
    from penstock.envs.harness.toolbox import ToolSpec as ToolSpec
    from penstock.envs.harness.toolbox import Toolbox as Toolbox
    from penstock.envs.harness.tools import tools_of as tools
    from penstock.envs.harness import HARNESS_VERSION as HARNESS_VERSION
    from penstock.envs.harness.session import ToolSession as ToolSession
    from penstock.envs.harness.tool_calls import ToolResult as ToolResult
    from penstock.envs.harness.tools import tool_schemas as tool_schemas
    from penstock.envs.harness.tools import tools_prompt as tools_prompt
    from penstock.envs.tasks.source import TaskCandidate as TaskCandidate
    from penstock.envs.tasks.source import TaskOrigin as TaskOrigin
    from penstock.envs.tasks.storage import GradedTask as GradedTask
    from penstock.infra.api.rollouts import RolloutAttempt as RolloutAttempt
    from penstock.infra.api.rollouts import play as play
    from penstock.infra.api.runs import Run as Run
    from penstock.infra.api.runs import open_run as open_run
    from penstock.infra.api.runs import run as run
    from penstock.messages.reading.trajectories import Trajectory as Trajectory
    from penstock.messages.reward import Outcome as Outcome
    from penstock.messages.task import HiddenTests as HiddenTests
    from penstock.messages.task import Split as Split
    from penstock.messages.task import Task as Task
    from penstock.infra.corpora.builder import CorpusBuilder as CorpusBuilder
    from penstock.infra.corpora.request import Corpora as Corpora
    from penstock.infra.corpora.request import CorpusRequest as CorpusRequest
    from penstock.infra.run.users import UsersRequest as UsersRequest
    from penstock.infra.run.task_sources import TaskRequest as TaskRequest
    from penstock.messages.errors import ConfigError as ConfigError
    from penstock.messages.errors import PenstockError as PenstockError
    from penstock.messages.rollout import ToolCall as ToolCall
    from penstock.messages.task import Limits as Limits


def __getattr__(name: str) -> Any:
    from importlib import import_module

    from penstock.infra.api.names import NAMES

    if name not in NAMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    module, attribute = NAMES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    from penstock.infra.api.names import NAMES

    return sorted([*globals(), *NAMES])
