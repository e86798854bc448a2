"""A run's configuration: typed TOML. Every table is the settings struct of the part it configures.

Imports no torch, so that a wrong key is told at once.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.actors.evaluator.config import GatekeeperConfig
from penstock.actors.feedback.join import JoinConfig
from penstock.actors.generator.config import GeneratorConfig
from penstock.actors.judge.config import JudgeConfig
from penstock.actors.pacer.config import PacerConfig
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.actors.sync_relay.core.config import WeightsConfig, publisher_ranks
from penstock.actors.trainer.config import TrainerConfig
from penstock.envs.backends import backend_class, backends
from penstock.envs.harness import HARNESS_VERSION
from penstock.envs.sandbox import Capability
from penstock.gateway.config import GatewayConfig
from penstock.infra.quickstart.config import PrepareConfig
from penstock.infra.regions.settings import LinkSection, check_processes
from penstock.infra.run.fleet_checks import check_fleet, check_group_fits
from penstock.infra.stores.settings import StoreKind, StoreSection
from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeInt, PositiveFloat, PositiveInt
from penstock.messages.task import Purpose


class RunSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run itself."""

    seed: int = 0
    restarts_max: NonNegativeInt = 10
    """Deaths of one process within `restart_period_s` before the run gives up."""
    restart_period_s: PositiveFloat = 300.0
    wall_s_max: PositiveFloat = 3600.0
    """The run is stopped in order, and fails, when it takes longer."""


class BusSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which NATS server."""

    url: str = ""
    """Empty: one embedded in the run."""
    server_path: str = ""
    """nats-server to embed; empty: the installed wheel's, then PATH."""


class RegionSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One region: a relay, and a generator with its receiver."""

    name: str
    serves: list[Purpose]
    link: LinkSection | None = None
    """It is far away: its processes reach the others over a link of these properties."""


class PoolSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines of one sandbox host."""

    backend: str = "uml"
    allow_process: bool = False
    """Accept the `process` backend, which isolates less, and train what ran in it."""
    size: NonNegativeInt = 4
    """Idle machines kept ready."""
    live_max: PositiveInt = 40
    """All machines that exist; bounds memory."""


class UsersSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sample users who send real requests and feedback to the gateway during the run."""

    num_requests: NonNegativeInt = 0
    period_s: PositiveFloat = 5.0


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a run."""

    processes: dict[str, list[str]]
    """Process -> the roles (`role` or `role:region`) that share it."""
    regions: list[RegionSection]
    run: RunSection = RunSection()
    bus: BusSection = BusSection()
    store: StoreSection = StoreSection()
    weights: WeightsConfig = WeightsConfig()
    prepare: PrepareConfig = PrepareConfig()
    policy: PolicyConfig = PolicyConfig()
    generator: GeneratorConfig = GeneratorConfig()
    rollout_worker: RolloutWorkerConfig = RolloutWorkerConfig()
    sandbox: SandboxHostConfig = SandboxHostConfig()
    pool: PoolSection = PoolSection()
    judge: JudgeConfig = JudgeConfig()
    trainer: TrainerConfig = TrainerConfig()
    pacer: PacerConfig = PacerConfig()
    gatekeeper: GatekeeperConfig = GatekeeperConfig()
    gateway: GatewayConfig = GatewayConfig()
    feedback_join: JoinConfig = JoinConfig()
    users: UsersSection = UsersSection()

    def replicas(self, purpose: Purpose) -> tuple[str, ...]:
        """Return the replicas that serve a purpose; a replica bears its region's name."""
        return tuple(region.name for region in self.regions if purpose in region.serves)

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


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and apply `key.path=value` overrides (values in TOML syntax).

    Raises:
        ConfigError: Unreadable, an unknown key, or a wrong value; the text gives file and path.

    """
    return parse_config(apply_overrides(read_toml(path), overrides), str(path))


def parse_config(data: dict[str, Any], source: str) -> RunConfig:
    """Check the tables of a configuration.

    Raises:
        ConfigError: As `load_config`.

    """
    _derive(data)
    try:
        config = msgspec.convert(data, RunConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error
    _check_whole(config, source)
    return config


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, laid over the one beside it that its `base` names, if it does.

    Raises:
        ConfigError: Missing, not TOML, or a base with a base.

    """
    data = _read_plain(path)
    if "base" not in data:
        return data
    base = _read_plain(path.parent / str(data.pop("base")))
    if "base" in base:
        raise ConfigError(f"{path}: base: expected a file without a base of its own")
    return _laid_over(base, data)


def _read_plain(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such configuration file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _laid_over(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return base with data's keys set, table by table."""
    merged = dict(base)
    for key, value in data.items():
        below = merged.get(key)
        tables = isinstance(value, dict) and isinstance(below, dict)
        merged[key] = _laid_over(below, value) if tables else value
    return merged


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tables with `key.path=value` set.

    Raises:
        ConfigError: Not of that form.

    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: expected KEY=VALUE")
        *tables, last = key.strip().split(".")
        target = data
        for table in tables:
            target = target.setdefault(table, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {override}: {table} is no table")
        target[last] = _parse_value(text)
    return data


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


_TABLES = ("trainer", "pacer", "prepare", "sandbox", "rollout_worker", "judge", "weights", "pool")


def _derive(data: dict[str, Any]) -> None:
    """Let parts follow each other: grants what is trained, demonstrations the tools, and so on."""
    if not all(isinstance(data.get(name, {}), dict) for name in ("processes", *_TABLES)):
        return  # what is no table is refused as such
    trainer = data.get("trainer", {})
    for name in ("groups_per_batch", "staleness_max", "steps_max"):
        value = trainer.get(name, getattr(TrainerConfig(), name))
        data.setdefault("pacer", {}).setdefault(name, value)
    harness = data["pacer"].get("harness", HARNESS_VERSION)
    data.setdefault("prepare", {}).setdefault("harness", harness)
    addresses = data.get("sandbox", {}).get("egress_addresses", False)
    data["prepare"].setdefault("egress_addresses", addresses)
    places = data.get("rollout_worker", {}).get("places_groups", False)
    data.setdefault("judge", {}).setdefault("places_machines", places)
    for rank in publisher_ranks(data.get("weights", {}).get("num_publisher_ranks")):
        data.get("processes", {}).setdefault(f"publisher-{rank}", [f"publisher:{rank}"])
    pool = data.get("pool", {})
    backend = pool.get("backend", "")
    if backend in backends and (backend != "process" or pool.get("allow_process") is True):
        isolation = backend_class(backend).isolation_class.value
        data.setdefault("trainer", {}).setdefault("isolation_classes", [isolation])


def _check_whole(config: RunConfig, source: str) -> None:
    """Check what no single table can."""
    pairs = (
        ("groups_per_batch", config.pacer.groups_per_batch, config.trainer.groups_per_batch),
        ("staleness_max", config.pacer.staleness_max, config.trainer.staleness_max),
        ("steps_max", config.pacer.steps_max, config.trainer.steps_max),
        ("loss.temperature", config.pacer.temperature, config.trainer.loss.temperature),
    )
    for name, granted, trained in pairs:
        if granted != trained:
            own = name.removeprefix("loss.")
            text = f"pacer.{own} and trainer.{name} must be equal, got {granted} and {trained}"
            raise ConfigError(f"{source}: {text}")
    _check_machines(config, source)
    _check_publishers(config, source)
    has_keeper = any("keeper" in specs for specs in config.processes.values())
    if has_keeper == config.store.retain_for_replay:
        text = "the role keeper and store.retain_for_replay = false belong together"
        raise ConfigError(f"{source}: {text}")
    for purpose in Purpose:
        if not config.replicas(purpose):
            raise ConfigError(f"{source}: regions: none serves {purpose.value!r}")
    linked = [region.name for region in config.regions if region.link is not None]
    if linked:
        _check_links(config, linked, source)


def _check_publishers(config: RunConfig, source: str) -> None:
    """See that each publishing rank has one process; of two, each would get some of the asking."""
    specs = (spec for specs in config.processes.values() for spec in specs)
    found = sorted(spec for spec in specs if spec.partition(":")[0] == "publisher")
    ranks = publisher_ranks(config.weights.num_publisher_ranks)
    if found != sorted(f"publisher:{rank}" for rank in ranks):
        expected = f"a process publisher-N for each of weights.num_publisher_ranks = {len(ranks)}"
        text = f"expected {expected if ranks else 'no role publisher'}, got {found}"
        raise ConfigError(f"{source}: processes: {text}")


def _check_machines(config: RunConfig, source: str) -> None:
    """See that the machines and their hosts can do what the settings ask of them."""
    try:
        places_groups = config.rollout_worker.places_groups or config.judge.places_machines
        check_fleet(config.processes, config.sandbox, places_groups=places_groups)
        if config.rollout_worker.places_groups:
            size, live_max = config.pacer.group_size, config.pool.live_max
            check_group_fits(config.sandbox, group_size=size, live_max=live_max)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    wanted = {
        "pacer.tree": (config.pacer.tree is not None, Capability.FORK),
        "rollout_worker.checkpoint_turns": (
            config.rollout_worker.checkpoint_turns > 0,
            Capability.CHECKPOINT,
        ),
    }
    for field, (is_asked, capability) in wanted.items():
        if not is_asked:
            continue
        able = [name for name in backends if capability in backend_class(name).capabilities]
        if config.pool.backend not in able:
            raise ConfigError(
                f"{source}: {field}: needs machines with the capability {capability.value!r}; "
                f"pool.backend {config.pool.backend!r} has it not, choose one of {', '.join(able)}"
            )


def _check_links(config: RunConfig, linked: list[str], source: str) -> None:
    """See that everything of a region behind a link has to cross it."""
    text = f"{source}: regions {', '.join(linked)} are behind links"
    if config.bus.url:
        raise ConfigError(f"{text} to the run's own server: expected no bus.url")
    if config.store.kind is not StoreKind.JETSTREAM:
        raise ConfigError(f'{text}, which only store.kind = "jetstream" crosses')
    check_processes(config.processes, linked)
