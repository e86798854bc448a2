"""Coding tasks, the command to attempt one, and the staleness budget that grants commands."""

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.settings import Finite, NonNegativeInt


class Split(StrEnum):
    """Training never touches a held-out task."""

    TRAIN = "train"
    HELDOUT = "heldout"


class Purpose(StrEnum):
    """Why a rollout or a request runs; generators and the trainer treat each differently."""

    TRAIN = "train"
    EVAL = "eval"
    LIVE = "live"


SleepS = Annotated[float, msgspec.Meta(ge=0, le=60)]

ModuleName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_]\w{0,63}(\.[A-Za-z_]\w{0,63}){0,15}\Z")
]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one episode, finite and with a maximum; reaching one is a typed stop reason."""

    num_turns_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 8
    num_tokens_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 1024
    """Prompt, observations and what was sampled, over all segments; what a later segment reads
    again counts once."""
    turn_tokens_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 128
    wall_s_max: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 120.0
    tool_s_max: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 10.0
    output_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 2048
    """Maximum size of one tool observation; what is cut is reported in it."""
    num_segments_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1
    """Contexts that an episode may have one after the other, each but the first begun with a
    summary of what came before; turns, tokens and seconds are bounded over all of them."""
    window_tokens_max: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    """Tokens of one context; 0: `num_tokens_max`. Needed with more than one segment."""


class MachineNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine must have; 0 and empty leave it to the host."""

    memory_mib: int = 0
    """Its memory, which also holds the files that are written."""
    disk_mib: int = 0
    """Files that can be written: at most 70% of its memory, which grows for it."""
    processors: int = 0
    isolation_min: str = ""
    """The least `IsolationClass` (`envs/sandbox.py`)."""


class TaskStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is asked next, in the same machine, once the agent has ended the step before."""

    instruction: str
    files: dict[str, str] = {}
    """Written into the working directory before it is asked."""
    binaries: dict[str, bytes] = {}
    has_setup: bool = False
    """Whether `setup.sh` of the working directory then runs there."""

    @property
    def contents(self) -> dict[str, bytes]:
        """Texts and binaries, by path."""
        return _encoded(self.files) | self.binaries


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the agent may see of a task."""

    task_id: str
    category: str
    """The step of the difficulty ladder, e.g. `operator`."""
    split: Split
    instruction: str
    files: dict[str, str]
    """Path relative to the working directory -> text."""
    binaries: dict[str, bytes] = {}
    """Files that are no UTF-8 text, by path as in `files`."""
    pages: dict[str, str] = {}
    """Path -> text that `read_file` shows once and no machine holds (`envs/harness/pages.py`)."""
    limits: Limits = Limits()
    egress: list[str] = []
    """Hosts that its programs may reach, each `name:port`, `*.name:port` or `name:port@address`."""
    image: str = ""
    """Digest of the image layer that its machines have above the base image; by default none. A
    name that meant nothing where the task was read in stays a name: no host has an image of it."""
    machine: MachineNeeds = MachineNeeds()
    """What its machines must have, the grading one included; a host that has less refuses it."""
    source: str = ""
    """Name of the source that a run has it from (`[[prepare.sources]]`)."""
    call_sleep_s: tuple[SleepS, SleepS] = (0.0, 0.0)
    """Its machine sleeps between these before each call: a slow environment, for measurements."""
    has_setup: bool = False
    """Whether `setup.sh` of the working directory runs there before the agent starts."""
    steps: list[TaskStep] = []
    """What follows the instruction, one after the other; limits are of the whole episode."""

    @property
    def contents(self) -> dict[str, bytes]:
        """All that the agent starts with, texts and binaries, by path."""
        return _encoded(self.files) | self.binaries


class HiddenTests(msgspec.Struct, frozen=True, kw_only=True):
    """What only the judge sees: never enters the VM of the episode."""

    task_id: str
    files: dict[str, str]
    argv: list[str]
    """Run in the working directory of a fresh VM with the episode's files plus `files`."""
    expected: list[str] = []
    """The last lines it must print, one per test. Never enters a VM: code under test cannot print
    what it does not know."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 10.0
    gold_files: dict[str, str] = {}
    """A known solution, for the task's own gates."""
    binaries: dict[str, bytes] = {}
    """Of the tests: files that are no UTF-8 text, by path as in `files`."""
    gold_binaries: dict[str, bytes] = {}
    """Of the known solution."""
    sealed_modules: list[ModuleName] = []
    """Modules of the machine that hold the right answer: the code under test finds its own copy in
    their place."""
    peer: list[str] = []
    """The code under test as a program of its own. With it the verifier's user runs `argv` and
    alone can read `files`, the agent's user runs this, and a socket joins the two."""
    unseparated: bool = False
    """Its verifier shares process and user with the code under test, which can forge a reward."""
    steps: list["HiddenTests"] = []
    """Of a task's later steps, one each; all else here is of the first."""
    is_last_step_all: bool = False
    """Whether the reward is that of the last step that counts, not the mean over them."""
    min_reward: Finite | None = None
    """Later steps count only if this one's reward is not less."""

    @property
    def contents(self) -> dict[str, bytes]:
        """The tests' files, texts and binaries, by path."""
        return _encoded(self.files) | self.binaries

    @property
    def gold_contents(self) -> dict[str, bytes]:
        """The known solution's."""
        return _encoded(self.gold_files) | self.gold_binaries


def _encoded(files: dict[str, str]) -> dict[str, bytes]:
    return {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}


TEMPERATURE_MIN = 1e-3
"""Lowest temperature but 0: logits divided by less may leave float32."""
TOP_P_MIN = 1e-6
"""Smallest nucleus: less is 0 in float32 arithmetic, and would leave no token at all."""
TOP_LOGPROBS_MAX = 20
GRAMMAR_CHARS_MAX = 1 << 18
"""Longest grammar, in characters."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a turn may say; `actors/policy/chat/grammars.py` makes them."""

    text: Annotated[str, msgspec.Meta(max_length=GRAMMAR_CHARS_MAX)] = ""
    """A grammar in llguidance's Lark syntax; empty on the log, which keeps what it allowed."""
    prefix_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    """Forced: the turn begins with these tokens, and the grammar is of what follows them."""
    blake3: str = ""
    """Digest of the text, where it is left out."""


LogitBias = Annotated[dict[int, Finite], msgspec.Meta(max_length=1024)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn.

    In this order (vLLM's): bias, penalties, grammar, temperature, and of what is left top-k, top-p
    and min-p, each judged by the distribution that the one before left.
    """

    temperature: float = 1.0
    """0 is greedy; otherwise at least `TEMPERATURE_MIN`."""
    top_p: float = 1.0
    """From `TOP_P_MIN` to 1."""
    top_k: int = 0
    """The most likely tokens that stay; 0: all."""
    min_p: float = 0.0
    """In [0, 1]: tokens with less than this share of the likeliest one's probability go."""
    presence_penalty: float = 0.0
    """In [-2, 2]: subtracted from the logits of tokens that this turn has already."""
    frequency_penalty: float = 0.0
    """In [-2, 2]: subtracted once for each time that this turn has the token."""
    repetition_penalty: float = 1.0
    """In (0, 10]: logits of tokens in the context or this turn are divided by it where they are
    positive, else multiplied (arXiv 1909.05858)."""
    logit_bias: LogitBias = {}
    """Token id -> in [-100, 100], added to its logit."""
    grammar: Grammar | None = None
    num_top_logprobs: int = 0
    """How many of the likeliest tokens to report beside each sampled one, at most
    `TOP_LOGPROBS_MAX`; shapes nothing."""
    num_tokens_max: int = 128
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is explored: such a turn is never trained by policy gradient."""
        return self.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens cannot be drawn; which ones, the turn's `support` says."""
        cuts = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return self.grammar is not None or (cuts and not self.is_greedy)

    @property
    def is_penalized(self) -> bool:
        """Whether logits depend on which tokens came before."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that leaves another one in mid-episode."""

    rollout_id: str
    member: int
    seed: int
    """Seed of its own turns."""


class Branching(msgspec.Struct, frozen=True, kw_only=True):
    """Makes a command a tree: its rollout is the trunk and continues as one of its branches."""

    trunk_turns: int
    """Shared by all. An episode that ends with them or before has no branches: the others then
    begin at the prompt, as rollouts of their own."""
    branches: list[Branch]
    """Without the command's own rollout."""


class StartRollout(Event, frozen=True, kw_only=True):
    """Pacer -> one rollout worker. Work queue; a grant of one staleness credit a group."""

    stream: ClassVar[Stream] = Stream.TASKS
    rollout_id: str
    group_id: str
    group_index: int
    """Position of the group in the run's order of grants, from 0; eval groups have their own."""
    group_size: int
    member: int
    """0 <= member < group_size."""
    purpose: Purpose
    task: Task
    sampling: Sampling
    policy_version: int
    """The trainer's version when the credit was granted."""
    harness: str = "1"
    """Version of the tools; 2 also gives the working directory a sealed git repository."""
    branching: Branching | None = None
    """Rollouts that share this one's first turns: one command and one worker has them all."""

    def key(self) -> str:
        """One command per rollout."""
        return self.rollout_id


class GroupGranted(Event, frozen=True, kw_only=True):
    """Pacer -> monitor, and the pacer itself after a restart: which task a group attempts.

    Published before the group's commands, so that a restart commands the same.
    """

    stream: ClassVar[Stream] = Stream.TRAINING
    group_index: NonNegativeInt
    task_id: str
    source: str = ""
    """Of the task."""
    attempt: NonNegativeInt = 0
    """Groups that attempted the task before."""
    num_fresh: NonNegativeInt = 0
    """Training tasks that no group has attempted, this one not counted."""
    num_skipped: NonNegativeInt = 0
    """Attempted tasks that were left out, being always or never solved."""

    def key(self) -> str:
        """One per group."""
        return str(self.group_index)


class CreditsChanged(Event, frozen=True, kw_only=True):
    """Pacer -> monitor, and the pacer itself after a restart. The latest wins."""

    stream: ClassVar[Stream] = Stream.CREDITS
    policy_version: int
    num_groups_granted: int
    num_groups_trained: int
    num_groups_discarded: int
    num_groups_allowed: int
    """(staleness_max + policy_version + 1) x groups a batch + discarded."""
    staleness_max: int

    def key(self) -> str:
        """One state per run."""
        return "state"
