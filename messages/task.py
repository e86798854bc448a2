"""Coding tasks, sampling settings, commands to attempt tasks, and staleness credits."""

from enum import StrEnum
from typing import Annotated, ClassVar

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.settings import Finite, NonNegativeInt


class Split(StrEnum):
    """Split of a task; training never uses a held-out one."""

    TRAIN = "train"
    HELDOUT = "heldout"


class Purpose(StrEnum):
    """Purpose of a rollout or request, which decides how generators and the trainer treat it."""

    TRAIN = "train"
    EVAL = "eval"
    LIVE = "live"


SleepS = Annotated[float, msgspec.Meta(ge=0, le=60)]

ModuleName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z_]\w{0,63}(\.[A-Za-z_]\w{0,63}){0,15}\Z")
]


FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""Modes that need no state: those with which a machine writes files and folders."""
PATH_BYTES_MAX = 4_096


class FileKind(StrEnum):
    """Kind of a file."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    HARD_LINK = "hard_link"
    PIPE = "pipe"
    GONE = "gone"
    """Was there before: a folder, a link, or a file whose name is no UTF-8."""


class FileState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file, as far as a map from paths to bytes does not say it.

    Such a map has the bytes of regular files with UTF-8 names; without a state they have the mode
    `FILE_MODE`, and the folders above them `FOLDER_MODE`.
    """

    path: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PATH_BYTES_MAX)]
    """Relative to the working directory, or absolute."""
    kind: FileKind = FileKind.FILE
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)] = FILE_MODE
    target: bytes = b""
    """Text of a link; path of the file that a hard link is the same as."""
    data: bytes | None = None
    """Content of a file whose name is no UTF-8."""
    hole_bytes: NonNegativeInt = 0
    """Length of a file that is one hole: zeros that take no space and are not carried."""
    mtime_ns: int | None = None
    """Time of last change since 1970, where a program set it; else it is when it was written."""

    @property
    def name(self) -> str | None:
        """The path as text; None if it is no UTF-8."""
        try:
            return self.path.decode()
        except UnicodeDecodeError:
            return None

    @property
    def shown(self) -> str:
        """One line for people: kind, mode, and what else there is."""
        words = [self.kind.value]
        if self.kind in {FileKind.FILE, FileKind.FOLDER, FileKind.PIPE}:
            words.append(f"mode {self.mode:04o}")
        if self.target:
            words.append(f"-> {self.target.decode('utf-8', 'backslashreplace')}")
        if self.data is not None or self.hole_bytes:
            words.append(f"{self.hole_bytes or len(self.data or b'')} bytes")
        if self.mtime_ns is not None:
            words.append(f"time {self.mtime_ns / 1e9:.0f}")
        return f"{self.path.decode('utf-8', 'backslashreplace')}: {', '.join(words)}"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Finite bounds on an episode; reaching one ends it with an `EpisodeEnd` that says which."""

    num_turns_max: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 8
    num_tokens_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 1024
    """Maximum number of prompt, observation and sampled tokens over all segments; tokens that a
    later segment reads again count once."""
    turn_tokens_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 128
    wall_s_max: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 120.0
    tool_s_max: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 10.0
    output_bytes_max: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 2048
    """Maximum bytes of one tool observation, which says how much was cut."""
    num_segments_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1
    """Maximum number of consecutive contexts, each after the first beginning with a summary of the
    one before; the bounds on turns, tokens and seconds apply to all of them together."""
    window_tokens_max: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    """Maximum tokens of one context, required with several segments; 0 for `num_tokens_max`."""


class MachineNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements on a machine; 0 and empty leave the choice to the host."""

    memory_mib: int = 0
    """Memory in MiB, which also holds written files."""
    disk_mib: int = 0
    """Space for written files in MiB: at most 70% of memory, which is raised to fit."""
    processors: int = 0
    isolation_min: str = ""
    """Weakest acceptable `IsolationClass` (`envs/sandbox.py`)."""


class TaskStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Later step of a task, given in the same machine once the agent has ended the previous one."""

    instruction: str
    files: dict[str, str] = {}
    """Text files written into the working directory before the step starts, by path."""
    binaries: dict[str, bytes] = {}
    has_setup: bool = False
    """Whether `setup.sh` in the working directory is run before the step."""
    states: list[FileState] = []
    """What the files' bytes do not say."""

    @property
    def contents(self) -> dict[str, bytes]:
        """Text and binary files, by path."""
        return _encoded(self.files) | self.binaries


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Part of a task that the agent may see."""

    task_id: str
    category: str
    """Category for statistics, e.g. the rung of a difficulty ladder such as `operator`."""
    split: Split
    instruction: str
    files: dict[str, str]
    """Text files, by path relative to the working directory."""
    binaries: dict[str, bytes] = {}
    """Files that are not UTF-8 text, by path as in `files`."""
    pages: dict[str, str] = {}
    """Texts by path that `read_file` shows once and no machine holds (`envs/harness/pages.py`)."""
    limits: Limits = Limits()
    egress: list[str] = []
    """Hosts that programs may reach: `name:port`, `*.name:port` or `name:port@address`."""
    image: str = ""
    """Digest of the image layer above the base image; empty for none. A name that could not be
    resolved when the task was read stays a name, which no host can serve."""
    machine: MachineNeeds = MachineNeeds()
    """Requirements on its machines, including the one for grading; hosts with less refuse them."""
    source: str = ""
    """Name of the task source in the run's settings (`[[prepare.sources]]`)."""
    call_sleep_s: tuple[SleepS, SleepS] = (0.0, 0.0)
    """Minimum and maximum seconds to sleep before each call, to emulate a slow environment."""
    has_setup: bool = False
    """Whether `setup.sh` in the working directory is run before the agent starts."""
    steps: list[TaskStep] = []
    """Steps that follow the instruction; limits apply to the whole episode."""
    states: list[FileState] = []
    """What the files' bytes do not say: modes, links, empty folders, names that are no UTF-8."""

    @property
    def contents(self) -> dict[str, bytes]:
        """All files that the agent starts with, by path."""
        return _encoded(self.files) | self.binaries


class HiddenTests(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a task that only the judge sees; it never enters the episode's machine."""

    task_id: str
    files: dict[str, str]
    argv: list[str]
    """Test command, run in the working directory of a fresh machine with the episode's files and
    `files`."""
    expected: list[str] = []
    """Last lines that the command must print, one per test. They never enter a machine, so that the
    code under test cannot print them."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3_600)] = 10.0
    gold_files: dict[str, str] = {}
    """Text files of a known solution, for validating the task."""
    binaries: dict[str, bytes] = {}
    """Files of the tests that are not UTF-8 text, by path as in `files`."""
    gold_binaries: dict[str, bytes] = {}
    """Files of the known solution that are not UTF-8 text, by path."""
    sealed_modules: list[ModuleName] = []
    """Modules on the machine that contain the right answer; the code under test imports its own
    version in their place."""
    peer: list[str] = []
    """Command of the code under test as a separate program, run by the agent's user. The verifier's
    user runs `argv` and alone can read `files`; a socket connects the two."""
    unseparated: bool = False
    """Whether the verifier shares its user with the code under test, which can forge the reward."""
    steps: list["HiddenTests"] = []
    """Hidden tests of the later steps; the other fields are for the first step."""
    is_last_step_all: bool = False
    """Whether the reward is that of the last counted step instead of the mean over steps."""
    min_reward: Finite | None = None
    """Minimum reward of this step for later steps to count."""
    states: list[FileState] = []
    """What the bytes of the tests' files do not say."""
    gold_states: list[FileState] = []
    """What the bytes of the known solution's files do not say."""
    egress: list[str] = []
    """Hosts that the tests may reach, as `Task.egress`; with a peer none."""
    gold_env: dict[str, str] = {}
    """Variables of a known solution that is a program."""

    @property
    def contents(self) -> dict[str, bytes]:
        """All files of the tests, by path."""
        return _encoded(self.files) | self.binaries

    @property
    def gold_contents(self) -> dict[str, bytes]:
        """All files of the known solution, by path."""
        return _encoded(self.gold_files) | self.gold_binaries


def _encoded(files: dict[str, str]) -> dict[str, bytes]:
    # A str may hold lone surrogates, which strict UTF-8 refuses.
    return {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}


TEMPERATURE_MIN = 1e-3
"""Lowest temperature other than 0; logits divided by less may overflow float32."""
TOP_P_MIN = 1e-6
"""Smallest top-p; less is rounded to 0 in float32 and would exclude every token."""
TOP_LOGPROBS_MAX = 20
"""Maximum value of `Sampling.num_top_logprobs`."""
GRAMMAR_CHARS_MAX = 1 << 18
"""Maximum length of a grammar in characters."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Constraint on the text of a turn, made by `actors/policy/chat/grammars.py`."""

    text: Annotated[str, msgspec.Meta(max_length=GRAMMAR_CHARS_MAX)] = ""
    """Grammar in llguidance's Lark syntax; empty on the log, which records the allowed tokens."""
    prefix_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    """Tokens with which the turn is forced to begin; the grammar applies after them."""
    blake3: str = ""
    """Digest of the text if it is left out."""


LogitBias = Annotated[dict[int, Finite], msgspec.Meta(max_length=1024)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling settings.

    They are applied in vLLM's order: bias, penalties, grammar, temperature, then top-k, top-p and
    min-p, each on the distribution that the previous one left.
    """

    temperature: float = 1.0
    """Temperature; 0 is greedy, otherwise at least `TEMPERATURE_MIN`."""
    top_p: float = 1.0
    """Nucleus probability, from `TOP_P_MIN` to 1."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0 for all."""
    min_p: float = 0.0
    """Minimum probability of a token relative to the most likely one, in [0, 1]."""
    presence_penalty: float = 0.0
    """Value in [-2, 2] subtracted from the logits of tokens that already occur in the turn."""
    frequency_penalty: float = 0.0
    """Value in [-2, 2] subtracted from a token's logit for each occurrence in the turn."""
    repetition_penalty: float = 1.0
    """Factor in (0, 10] by which the logits of tokens in the context or turn are divided if
    positive and multiplied otherwise (arXiv 1909.05858)."""
    logit_bias: LogitBias = {}
    """Token id -> value in [-100, 100] added to its logit."""
    grammar: Grammar | None = None
    num_top_logprobs: int = 0
    """Number of most likely tokens to report next to each sampled one, at most `TOP_LOGPROBS_MAX`;
    it does not affect sampling."""
    num_tokens_max: int = 128
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is greedy; such turns are never trained by policy gradient."""
        return self.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are excluded; the turn's `support` records those that are not."""
        cuts = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return self.grammar is not None or (cuts and not self.is_greedy)

    @property
    def is_penalized(self) -> bool:
        """Whether logits are changed depending on earlier tokens."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout that continues from another one's turns."""

    rollout_id: str
    member: int
    seed: int
    """Seed of the turns after the trunk."""


class Branching(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a tree of rollouts; the command's rollout is both the trunk and one branch."""

    trunk_turns: int
    """Number of turns that all branches share. If the episode ends within them there are no
    branches, and the other rollouts start from the prompt."""
    branches: list[Branch]
    """Branches other than the command's own rollout."""


class StartRollout(Event, frozen=True, kw_only=True):
    """Pacer -> one rollout worker: run a rollout. Each group was granted one staleness credit."""

    stream: ClassVar[Stream] = Stream.TASKS
    keyed_by: ClassVar[tuple[str, ...]] = ("rollout_id",)
    rollout_id: str
    group_id: str
    group_index: int
    """Position of the group in the order of grants, from 0; evaluation groups count separately."""
    group_size: int
    member: int
    """Index in the group: 0 <= member < group_size."""
    purpose: Purpose
    task: Task
    sampling: Sampling
    policy_version: int
    """Trainer's policy version when the credit was granted."""
    harness: str = "1"
    """Version of the tools; 2 also makes the working directory a sealed git repository."""
    branching: Branching | None = None
    """Rollouts that share this one's first turns; one worker runs all of them."""


class GroupGranted(Event, frozen=True, kw_only=True):
    """Pacer -> monitor, and the pacer itself after a restart: task that a group attempts.

    It is published before the group's commands, so that a restarted pacer repeats the same choice.
    """

    stream: ClassVar[Stream] = Stream.TRAINING
    keyed_by: ClassVar[tuple[str, ...]] = ("group_index",)
    group_index: NonNegativeInt
    task_id: str
    source: str = ""
    """Source of the task, as in `Task.source`."""
    attempt: NonNegativeInt = 0
    """Number of earlier groups that attempted the task."""
    num_fresh: NonNegativeInt = 0
    """Number of training tasks that no group has attempted, not counting this one."""
    num_skipped: NonNegativeInt = 0
    """Number of attempted tasks that were skipped because they are always or never solved."""


class CreditsChanged(Event, frozen=True, kw_only=True):
    """Pacer -> monitor, and the pacer itself after a restart: state of the staleness credits."""

    stream: ClassVar[Stream] = Stream.CREDITS
    policy_version: int
    num_groups_granted: int
    num_groups_trained: int
    num_groups_discarded: int
    num_groups_allowed: int
    """Bound on granted groups: (staleness_max + policy_version + 1) x groups per batch + discarded
    groups."""
    staleness_max: int

    def key(self) -> str:
        """Return the key: only the newest event counts."""
        return "state"
