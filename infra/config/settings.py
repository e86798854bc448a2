"""A run's configuration: typed TOML. Every table is the settings struct of one component.

Imports no torch, so that a wrong key is refused at once.
"""

from typing import Annotated, Literal

import msgspec

from penstock.actors.evaluator.schedule import EvaluatorConfig
from penstock.actors.feedback.config import JoinConfig
from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.generator.config import GeneratorConfig
from penstock.actors.judge.config import JudgeConfig
from penstock.actors.pacer.config import PacerConfig
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.actors.trainer.config import TrainerConfig
from penstock.gateway.config import GatewayConfig
from penstock.gateway.rollouts.config import RolloutsConfig
from penstock.infra.bus.settings import ArchiveSection, BusSection
from penstock.infra.config.prepare import PrepareConfig
from penstock.infra.models.settings import ModelSection
from penstock.infra.stores.settings import BUCKET, ENDPOINT, StoreKind, StoreSection
from penstock.infra.tinker.settings import TinkerConfig
from penstock.messages.errors import ConfigError
from penstock.messages.generation import NEWEST, pinned_version
from penstock.messages.settings import (
    REFERENCE,
    NonNegativeInt,
    PlainText,
    PositiveFloat,
    PositiveInt,
    check_encrypted,
)
from penstock.messages.task import Purpose

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class RunSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run itself."""

    seed: NonNegativeInt = 0
    restarts_max: NonNegativeInt = 10
    """Deaths of one process within `restart_period_s` before the run gives up."""
    restart_period_s: PositiveFloat = 300.0
    wall_s_max: PositiveFloat = 3600.0
    """A run that takes longer is stopped in order, and fails."""
    log_level: LogLevel = "info"
    """Least severe lines in the logs of its processes."""
    log_format: LogFormat = "text"
    """`text` for people, `json` (an object per line) for log collectors."""


class RegionSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One region: a relay, and any number of generators, each with its receiver."""

    name: str
    serves: list[Purpose]
    channel: str = NEWEST
    """Which versions its replicas hold: `newest`, `stable`, `candidate`, or one, `version:7`."""
    bucket: Annotated[str, msgspec.Meta(pattern=BUCKET)] = ""
    """S3 bucket of the region's weights, which must exist; empty: a directory beside its relay."""
    endpoint: Annotated[str, msgspec.Meta(pattern=ENDPOINT)] = ""
    """S3 server of the bucket, if it is not Amazon's."""
    allow_plain_text: PlainText = []
    """Hosts off this machine whose `endpoint` may be `http://`."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.endpoint and not self.bucket:
            raise ConfigError(f"regions.{self.name}.endpoint: expected a bucket with it")

    def check_encrypted(self) -> None:
        """Check the address of the bucket before anything is sent to it.

        Raises:
            ConfigError: Weights and credentials would pass in plain text.

        """
        if self.endpoint:
            field = f"regions.{self.name}.endpoint"
            check_encrypted(field, self.endpoint, self.allow_plain_text)

    def store_section(self) -> StoreSection | None:
        """Return the bucket as a `[store]`, None for a directory; see `check_encrypted`."""
        if not self.bucket:
            return None
        self.check_encrypted()
        return StoreSection(
            kind=StoreKind.S3,
            bucket=self.bucket,
            endpoint=self.endpoint,
            allow_plain_text=self.allow_plain_text,
        )


class ServeSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`penstock serve`: a service on this run, without end."""

    epoch_samples: PositiveInt = 32
    """With `--learn`, a version is made of so many samples of users,"""
    epoch_s_max: PositiveFloat = 14_400.0
    """or when the first of them has waited for so long."""
    simulates: bool = False
    """With `--learn`, whether simulated tasks go on beside users: then versions are cut as in the
    run, by groups."""
    gated: bool = True
    """With `--learn`, whether a version has to pass the gates (`[gatekeeper]`) before all users are
    served by it; takes a second generator for users. Without, whether users are served by the
    version that passed last. False (`--ungated`): by each version at once."""


def is_gateway(spec: str) -> bool:
    """Whether a role is `gateway` or `gateway:NAME`."""
    return spec.partition(":")[0] == "gateway"


class UsersSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sample users who send real requests and feedback to the gateway during the run."""

    run: Annotated[str, msgspec.Meta(pattern=rf"^({REFERENCE})?\Z")] = ""
    """Own code, `module:name`: an async function of a `UsersRequest` (docs/extend.md)."""
    num_requests: NonNegativeInt = 0
    period_s: PositiveFloat = 5.0

    def __post_init__(self) -> None:
        """Check that somebody sends the requests."""
        if self.num_requests and not self.run:
            raise ConfigError("users.run: expected own code, module:name, that sends num_requests")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a run."""

    processes: dict[str, list[str]]
    """Process name -> the roles (`role`, `role:region`, `generator:region/name`) that run in it."""
    regions: list[RegionSection]
    run: RunSection = RunSection()
    bus: BusSection = BusSection()
    archive: ArchiveSection = ArchiveSection()
    store: StoreSection = StoreSection()
    prepare: PrepareConfig = PrepareConfig()
    model: ModelSection = ModelSection()
    policy: PolicyConfig = PolicyConfig()
    generator: GeneratorConfig = GeneratorConfig()
    rollout_worker: RolloutWorkerConfig = RolloutWorkerConfig()
    sandbox_host: SandboxHostConfig = SandboxHostConfig()
    judge: JudgeConfig = JudgeConfig()
    trainer: TrainerConfig = TrainerConfig()
    pacer: PacerConfig = PacerConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    gateway: GatewayConfig = GatewayConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    feedback: JoinConfig = JoinConfig()
    gatekeeper: GatekeeperConfig = GatekeeperConfig()
    users: UsersSection = UsersSection()
    serve: ServeSection = ServeSection()
    tinker: TinkerConfig = TinkerConfig()

    @property
    def versions_pinned(self) -> set[int]:
        """The versions that some region's replicas hold for good."""
        pins = (pinned_version(region.channel) for region in self.regions)
        return {version for version in pins if version is not None}

    def regions_serving(self, purpose: Purpose) -> list[str]:
        """Return the names of the regions that serve a purpose."""
        return [region.name for region in self.regions if purpose in region.serves]

    def region(self, name: str) -> RegionSection:
        """Return one region.

        Raises:
            ConfigError: No such region.

        """
        for region in self.regions:
            if region.name == name:
                return region
        names = ", ".join(region.name for region in self.regions)
        raise ConfigError(f"regions: expected one of {names}, got {name!r}")
