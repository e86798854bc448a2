"""Settings of rubric judges."""

from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PlainText,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    check_encrypted,
    one_of,
)

CRITERIA_MAX, CHOICES_MAX, REPEATS_MAX = 16, 16, 15
SECTIONS = ("task", "diff", "final", "turns")
MASK, VERIFIABLE = "mask", "verifiable"
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]
_URL = r"^https?://[^\s/@?#]+(/[^\s@?#]*)?\Z"


def _yes_no() -> dict[str, float]:
    return {"yes": 1.0, "no": 0.0}


class CriterionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One question of a rubric."""

    name: Name
    text: _Text
    """Question, which the choices answer."""
    weight: PositiveFloat = 1.0
    """Weight relative to the rubric's other criteria."""
    choices: dict[_Text, UnitInterval] = msgspec.field(default_factory=_yes_no)
    """Score of each answer."""

    def __post_init__(self) -> None:
        """Check the choices."""
        if not 2 <= len(self.choices) <= CHOICES_MAX or len({*self.choices.values()}) < 2:
            text = f"expected 2 to {CHOICES_MAX} answers with at least two different scores"
            raise ConfigError(f"judge.judges.criteria.{self.name}.choices: {text}")


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible chat-completions service; configurations never hold its key."""

    url: Annotated[str, msgspec.Meta(pattern=_URL)]
    """Base URL, including `/v1`."""
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    key_env: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?\Z")] = ""
    """Environment variable of the judge's process that holds the key."""
    key_file: Annotated[str, msgspec.Meta(pattern=r"^(/.*)?\Z")] = ""
    """Absolute path of a file that holds only the key."""
    timeout_s: PositiveFloat = 60.0
    """Timeout of one call in seconds."""
    reply_tokens_max: PositiveInt = 16
    """Maximum tokens of a reply; a model that thinks first needs more."""
    temperature: NonNegativeFloat = 0.0
    structured: bool = False
    """Request JSON that holds the letter (`response_format`), if the service supports it."""
    allow_plain_text: PlainText = []
    """Hosts off this machine that may get key and episodes over `http://`."""

    def __post_init__(self) -> None:
        """Refuse two sources of the key."""
        if self.key_env and self.key_file:
            raise ConfigError("judge.judges.endpoint: expected key_env or key_file, got both")

    def check_encrypted(self) -> None:
        """Check the address before anything is sent to it; readers of older runs need none.

        Raises:
            ConfigError: Key and episodes would pass in plain text.

        """
        check_encrypted("judge.judges.endpoint.url", self.url, self.allow_plain_text)


class RubricConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rubric judge: its questions, who answers them, and the weight of its score."""

    name: Name
    weight: PositiveFloat
    """Reward if every criterion gets its best answer."""
    criteria: list[CriterionConfig]
    endpoint: EndpointConfig | None = None
    """Service that answers; exclusive with `policy_version`."""
    policy_version: NonNegativeInt | None = None
    """Policy version of the run's own replicas that answer."""
    repeats: PositiveInt = 1
    """Calls per criterion, each with the choices in another order."""
    shows: tuple[Annotated[str, one_of(SECTIONS)], ...] = ("task", "diff", "final")
    """Sections of an episode that the judge sees."""
    section_chars_max: PositiveInt = 12_000
    """Maximum characters per section; a longer one is cut in the middle."""
    on_failure: Annotated[str, one_of((MASK, VERIFIABLE))] = VERIFIABLE
    """Whether a rollout that the judge cannot score is masked or keeps its verifiable reward."""
    num_attempts_max: PositiveInt = 3
    """Attempts per call."""
    retry_delay_s: PositiveFloat = 1.0
    """First pause between attempts; doubles."""
    deadline_s: PositiveFloat = 180.0
    """Time limit in seconds on all calls for one rollout."""
    num_concurrent: PositiveInt = 8
    """Concurrent calls."""
    down_s: PositiveFloat = 30.0
    """Seconds without calls after a service failed `DOWN_AFTER` rollouts in a row."""
    calibration: str = ""
    """File written by `penstock judge calibrate`, for `judge.calibration_min`."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        field = f"judge.judges.{self.name}"
        names = [one.name for one in self.criteria]
        if not 1 <= len(names) <= CRITERIA_MAX or len(set(names)) < len(names):
            text = f"expected 1 to {CRITERIA_MAX} criteria, each name once, got {names}"
            raise ConfigError(f"{field}.criteria: {text}")
        if (self.endpoint is None) == (self.policy_version is None):
            raise ConfigError(f"{field}: expected either endpoint or policy_version")
        if self.repeats > REPEATS_MAX:
            text = f"expected at most {REPEATS_MAX}, got {self.repeats}"
            raise ConfigError(f"{field}.repeats: {text}")
        if not self.shows or len(set(self.shows)) < len(self.shows):
            text = f"expected some of {', '.join(SECTIONS)}, each once, got {list(self.shows)}"
            raise ConfigError(f"{field}.shows: {text}")
