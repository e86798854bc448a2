"""Builds a Dockerfile: each step that changes files runs in a machine of its own.

```
 instruction ─▶ key of all steps so far ─▶ known layer, or ─▶ machine ─▶ tar ─▶ a new layer
```
A step sees the image's layers, for COPY a disk with the named files, and for RUN the hosts that the
caller allows. Its result is as untrusted as a stranger's layer and passes the same bounds.
"""

import asyncio
import logging
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.microvm.images.assets import digest_bytes, digest_file, load_assets
from penstock.envs.microvm.images.layers import ImageLayer
from penstock.envs.microvm.oci import dockerfile as text_of
from penstock.envs.microvm.oci.context import BuildContext
from penstock.envs.microvm.oci.dockerfile import DockerfileError, Instruction, parse_dockerfile
from penstock.envs.microvm.oci.image import (
    DEFAULT_PATH,
    RECIPE,
    ContainerConfig,
    ImageStore,
)
from penstock.envs.microvm.oci.layer_tar import LAYER_BYTES_MAX, ConvertRequest
from penstock.envs.microvm.oci.pull import fetch_layers
from penstock.envs.microvm.oci.registry import RegistrySource
from penstock.envs.microvm.oci.tree import ImageError
from penstock.envs.microvm.recipe.steps import Say
from penstock.envs.microvm.uml import UmlBackend
from penstock.envs.sandbox import SandboxError
from penstock.messages.task import MachineNeeds

log = logging.getLogger(__name__)

STEP_S, BUILD_S_MAX, START_S = 600.0, 7_200.0, 60.0
MEMORY_MIB = 3_072
FILES_PERCENT = 75
"""Of a building machine's memory, for what one step writes."""
GUEST = Path(__file__).with_name("builder_guest.py")
STEP_PROGRAM, STEP_FILE = "/tmp/step.py", "/tmp/step.json"  # noqa: S108 - of a machine
_REFUSED, _SHOWN = 3, 1_500
_PLATFORMS = {"", "linux/amd64", "linux/x86_64"}
_PREDEFINED = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_PLATFORM_ARGUMENTS = {
    f"{who}{what}": value
    for who in ("TARGET", "BUILD")
    for what, value in (("PLATFORM", "linux/amd64"), ("OS", "linux"), ("ARCH", "amd64"))
}


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for pulling an image and building a Dockerfile."""

    dockerfile: str = "Dockerfile"
    """Path in the folder."""
    arguments: dict[str, str] = {}
    """Values for ARG."""
    stage: str = ""
    """Stage to build; default: the last."""
    egress: list[str] = []
    """Allow-list entries for RUN, in the format of `Task.egress`; default: no network."""
    step_s: float = STEP_S
    memory_mib: int = MEMORY_MIB
    offline: bool = False
    credentials: Path | None = None
    cache: Path | None = None


@dataclass(kw_only=True)
class _Stage:
    """A stage and what is built of it so far."""

    layers: list[str] = field(default_factory=list)
    key: str = ""
    env: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """Variables that instructions expand."""
        return self.arguments | self.env

    @property
    def config(self) -> ContainerConfig:
        """The settings of its image."""
        return ContainerConfig(
            Env=[f"{name}={value}" for name, value in self.env.items()],
            WorkingDir=self.workdir,
            User=self.user,
            Entrypoint=self.entrypoint,
            Cmd=self.cmd,
            Labels=self.labels,
        )


async def build_dockerfile(folder: Path, name: str, options: BuildOptions, say: Say) -> ImageLayer:
    """Build the image of a folder with a Dockerfile; see `prepare.prepare_image` for errors."""
    path = folder / options.dockerfile
    try:
        with path.open("rb") as file:
            instructions = parse_dockerfile(file.read(text_of.TEXT_BYTES_MAX + 1))
    except (OSError, DockerfileError) as error:
        raise ImageError(f"{path}: {error}") from error
    store = ImageStore(say, options.cache)
    try:
        async with asyncio.timeout(BUILD_S_MAX):
            with store.locked() as scratch:
                context = BuildContext(folder, options.dockerfile)
                build = _Build(store, scratch, context, options)
                stage = await build.run(instructions)
                return store.publish(name, stage.layers, stage.config, scratch, str(folder))
    except DockerfileError as error:
        raise ImageError(f"{path}: {error}") from error
    except TimeoutError as error:
        raise ImageError(f"{path}: takes more than {BUILD_S_MAX:g} s") from error


class _Build:
    def __init__(
        self, store: ImageStore, scratch: Path, context: BuildContext, options: BuildOptions
    ) -> None:
        self._store, self._scratch, self._context = store, scratch, context
        self._options, self._say = options, store.say
        self._globals = dict(_PLATFORM_ARGUMENTS)
        self._stages: dict[str, _Stage] = {}
        self._stage = _Stage()
        # The program that runs a step is an input of its layer.
        self._recipe = digest_bytes(
            GUEST.read_bytes(), RECIPE.encode(), load_assets(options.cache)[1].image_digest.encode()
        )

    async def run(self, instructions: list[Instruction]) -> _Stage:
        """Run the stages up to the requested one, and return that one."""
        wanted = self._options.stage.lower()
        num_stages, has_wanted, name = 0, False, ""
        for one in instructions:
            if one.name == "FROM":
                if has_wanted:
                    break
                name = await self._from(one, num_stages)
                num_stages += 1
                has_wanted = bool(wanted) and wanted in {name, str(num_stages - 1)}
            elif not num_stages:
                self._global(one)
            else:
                await self._do(one)
        if wanted and not has_wanted:
            raise DockerfileError(0, f"no stage is {wanted!r}")
        return self._stage

    def _global(self, one: Instruction) -> None:
        for word in text_of.words(one, text_of.expand(one, one.text, self._globals)):
            name, _, value = word.partition("=")
            self._globals[name] = self._options.arguments.get(name, value)

    async def _from(self, one: Instruction, number: int) -> str:
        flags = one.flag({"platform"})
        platform = text_of.expand(one, flags.get("platform", ""), self._globals)
        if platform not in _PLATFORMS:
            raise one.refused(f"expected platform linux/amd64, got {platform!r}")
        given = text_of.words(one, text_of.expand(one, one.text, self._globals))
        match given:
            case [reference]:
                name = ""
            case [reference, word, name] if word.upper() == "AS":
                name = name.lower()
            case _:
                raise one.refused("expected IMAGE or IMAGE AS NAME")
        self._stage = await self._base(one, reference)
        self._stages[str(number)] = self._stage
        if name:
            self._stages[name] = self._stage
        return name

    async def _base(self, one: Instruction, reference: str) -> _Stage:
        known = self._stages.get(reference.lower())
        if known is not None and not reference.isdecimal():
            return msgspec.convert(_copied(known), _Stage)
        if reference == "scratch":
            return _Stage(key=digest_bytes(b"scratch"))
        found = self._store.load(reference)
        if found is None:
            if self._options.offline:
                raise one.refused(f"{reference!r} is not in the store, and this is offline: "
                                  "pull or load it first")  # fmt: skip
            source = RegistrySource(reference, self._scratch, self._options.credentials, self._say)
            layers, config = await fetch_layers(source, self._store, self._scratch)
            self._store.publish(reference, layers, config, self._scratch, reference)
            found = self._store.merged(layers, self._scratch), config
        layers, config = found
        if config.OnBuild:
            raise one.refused(f"{reference!r} has ONBUILD triggers, which are not built here")
        env = {k: v for k, _, v in (entry.partition("=") for entry in config.Env or [])}
        return _Stage(
            layers=layers,
            key=digest_bytes(*(layer.encode() for layer in layers)),
            env={"PATH": DEFAULT_PATH} | env,
            workdir=config.WorkingDir or "/",
            user=config.User,
            entrypoint=config.Entrypoint,
            cmd=config.Cmd,
            labels=dict(config.Labels or {}),
            shell=config.Shell or ["/bin/sh", "-c"],
        )

    async def _do(self, one: Instruction) -> None:
        stage = self._stage
        match one.name:
            case "RUN":
                await self._run(one)
            case "COPY" | "ADD":
                await self._copy(one)
            case "ENV":
                stage.env |= text_of.pairs(one, stage.variables)
            case "LABEL":
                stage.labels |= text_of.pairs(one, stage.variables)
            case "ARG":
                self._argument(one)
            case "WORKDIR":
                path = "".join(text_of.words(one, self._expanded(one)))
                stage.workdir = posixpath.normpath(posixpath.join("/", stage.workdir, path))
            case "USER":
                stage.user = "".join(text_of.words(one, self._expanded(one)))
            case "SHELL":
                stage.shell = self._list(one)
            case "ENTRYPOINT":
                stage.entrypoint, stage.cmd = self._command(one), None
            case "CMD":
                stage.cmd = self._command(one)
            case "ONBUILD":
                raise one.refused("triggers are not built here: write the instruction itself")
            case _:
                pass  # EXPOSE, HEALTHCHECK, MAINTAINER, STOPSIGNAL, VOLUME: no effect in a machine.

    def _expanded(self, one: Instruction) -> str:
        return text_of.expand(one, one.text, self._stage.variables)

    def _list(self, one: Instruction) -> list[str]:
        if not one.listed:
            raise one.refused('expected a list: ["PROGRAM", "ARGUMENT"]')
        return one.listed

    def _command(self, one: Instruction) -> list[str]:
        return one.listed if one.listed is not None else [*self._stage.shell, one.text]

    def _argument(self, one: Instruction) -> None:
        for word in text_of.words(one, self._expanded(one)):
            name, equals, default = word.partition("=")
            if name in self._options.arguments:
                self._stage.arguments[name] = self._options.arguments[name]
            elif equals:
                self._stage.arguments[name] = default
            elif name in self._globals:
                self._stage.arguments[name] = self._globals[name]

    async def _run(self, one: Instruction) -> None:
        one.flag({"mount", "network"})
        tmpfs: list[str] = []
        for name, value in one.flags:
            if name == "network" and value not in {"default", "none"}:
                raise one.refused(f"--network={value} is not built here")
            if name == "mount":
                given = {k: v for k, _, v in (part.partition("=") for part in value.split(","))}
                target = given.get("target") or given.get("dst") or given.get("destination") or ""
                # A cache only saves time, so an empty one is correct and leaves nothing in the
                # layer.
                if given.get("type", "bind") not in {"cache", "tmpfs"} or not target:
                    raise one.refused(f"--mount={value[:80]} is not built here: type=cache and "
                                      "type=tmpfs are")  # fmt: skip
                tmpfs.append(target)
        files: dict[str, str] = {}
        text = one.text
        if one.heredocs and text_of.is_heredoc_alone(text):
            content = one.heredocs[0].content
            files = {"step": content} if content.startswith("#!") else {}
            argv = ["/dev/step"] if files else [*self._stage.shell, content]
        elif one.listed is not None:
            argv = one.listed
        else:
            parts = "".join(f"{doc.content}{doc.name}\n" for doc in one.heredocs)
            argv = [*self._stage.shell, f"{text}\n{parts}" if parts else text]
        stage = self._stage
        proxies = {k: v for k, v in self._options.arguments.items() if k in _PREDEFINED}
        step = {
            "argv": argv,
            "env": proxies | stage.arguments | stage.env,
            "user": stage.user,
            "workdir": stage.workdir,
            "tmpfs": tmpfs,
            "files": files,
        }
        await self._step(one, step, egress=self._options.egress)

    async def _copy(self, one: Instruction) -> None:
        flags = one.flag({"from", "chown", "chmod", "link"})
        text = text_of.without_heredocs(one.text) if one.heredocs else one.text
        expanded = text_of.expand(one, text, self._stage.variables)
        given = one.listed if one.listed is not None else text_of.words(one, expanded)
        if len(given) + len(one.heredocs) < 2:
            raise one.refused("expected sources and a target")
        *sources, target = given
        for source in sources:
            if "://" in source or source.startswith("git@"):
                raise one.refused(f"{source[:100]!r}: only files of the folder are added; "
                                  "fetch it by RUN, with its host allowed")  # fmt: skip
        other = self._other(one, flags["from"]) if "from" in flags else None
        if other is None and "from" in flags:
            other = await self._base(one, text_of.expand(one, flags["from"], self._globals))
        context = None
        if other is None and sources:
            try:
                sources, paths = self._context.select(sources)
                context = self._scratch / "context"
                await asyncio.to_thread(self._context.write, paths, context)
            except (ImageError, OSError) as error:
                raise one.refused(str(error)) from error
        mode = flags.get("chmod", "")
        if mode and (set(mode) - set("01234567") or len(mode) > 4):
            raise one.refused(f"--chmod: expected octal digits, got {mode!r}")
        is_folder = target.endswith(("/", "/."))
        place = posixpath.normpath(posixpath.join("/", self._stage.workdir, target))
        variables = self._stage.variables
        step = {
            "argv": [],
            "workdir": self._stage.workdir,
            "sources": sources,
            "is_from": other is not None,
            "target": f"{place}/" if is_folder and place != "/" else place,
            "chown": text_of.expand(one, flags.get("chown", ""), variables),
            "mode": int(mode, 8) if mode else -1,
            "unpacks": one.name == "ADD" and other is None,
            "files": {
                doc.name: text_of.expand(one, doc.content, variables)
                if doc.is_expanded
                else doc.content
                for doc in one.heredocs
            },
        }
        await self._step(one, step, context=context, other=other)

    def _other(self, one: Instruction, name: str) -> _Stage | None:
        found = self._stages.get(name.lower())
        if found is self._stage:
            raise one.refused(f"--from={name} is this stage")
        return found

    async def _step(
        self,
        one: Instruction,
        step: dict[str, Any],
        *,
        context: Path | None = None,
        other: _Stage | None = None,
        egress: list[str] = [],  # noqa: B006 - read only
    ) -> None:
        stage = self._stage
        stage.key = digest_bytes(
            *(stage.key.encode(), self._recipe.encode(), msgspec.json.encode(step)),
            *(other.key.encode() if other else b"", " ".join(egress).encode()),
            digest_file(context).encode() if context else b"",
        )
        digest = self._store.known(stage.key)
        said = f"line {one.line}: {one.name} {one.text.splitlines()[0][:60]}"
        if digest:
            self._say(f"image: {said}: as before")
        else:
            self._say(f"image: {said}")
            disks = self._store.paths(stage.layers)
            from_disks = self._store.paths(other.layers) if other else []
            machine = _Machine(self._options, disks, from_disks, context, self._scratch / "out")
            out = await machine.run(one, step, egress)

            def request(target: Path) -> ConvertRequest:
                lowers = [str(disk) for disk in disks]
                return ConvertRequest(
                    blobs=[str(out)], lowers=lowers, is_overlay=True, target=str(target)
                )

            layer = self._store.layer
            digest = await asyncio.to_thread(layer, stage.key, request, self._scratch)
            out.unlink()
        # Merge as layers arrive, so that each machine mounts few.
        stage.layers = self._store.merged([digest, *stage.layers], self._scratch)


def _copied(stage: _Stage) -> dict[str, Any]:
    return msgspec.to_builtins(stage) | {"arguments": {}}


@dataclass(kw_only=False)
class _Machine:
    """The machine of one step."""

    options: BuildOptions
    disks: list[Path]
    from_disks: list[Path]
    context: Path | None
    out: Path

    async def run(self, one: Instruction, step: Mapping[str, Any], egress: list[str]) -> Path:
        """Run a step, and return the tar stream of what it changed."""
        # A sparse file; the machine runs as its own user and opens it by descriptor.
        with self.out.open("wb") as file:
            file.truncate(LAYER_BYTES_MAX)
        self.out.chmod(0o666)
        disks = [*self.disks, *self.from_disks, *([self.context] if self.context else [])]
        names = [f"/dev/ubd{chr(ord('b') + number)}" for number in range(len(disks) + 1)]
        num, num_from = len(self.disks), len(self.from_disks)
        memory = self.options.memory_mib
        spec = {
            **step,
            "disks": names[:num],
            "from_disks": names[num : num + num_from],
            "context": names[-2] if self.context else "",
            "out": names[-1],
            "files_mib": memory * FILES_PERCENT // 100,
        }
        backend = UmlBackend(
            self.options.cache,
            needs=MachineNeeds(memory_mib=memory),
            disks=disks,
            output=self.out,
        )
        try:
            machine = await backend.start(timeout_s=START_S)
        except SandboxError as error:
            raise one.refused(f"no machine to build in: {error}") from error
        try:
            if egress and not self.options.offline:
                await machine.allow_egress(egress)
            files = {
                STEP_PROGRAM: GUEST.read_bytes(),
                STEP_FILE: msgspec.json.encode(spec),
            }
            await machine.write_files(files)
            done = await machine.exec(
                ["python3", STEP_PROGRAM], timeout_s=self.options.step_s, cwd="/",
                output_bytes_max=1 << 20,
            )  # fmt: skip
            attempts = await machine.egress_attempts()
        except SandboxError as error:
            raise one.refused(f"the machine ended: {error}") from error
        finally:
            await machine.close()
        refused = {attempt.target[:100] for attempt in attempts if not attempt.is_allowed}
        if done.exit_code == 0 and not done.timed_out:
            return self.out
        said = (done.stdout[-_SHOWN:] + done.stderr[-_SHOWN:]).decode(errors="replace").strip()
        if done.timed_out:
            raise one.refused(f"takes more than {self.options.step_s:g} s; {said[-400:]}")
        if done.exit_code == _REFUSED:
            raise one.refused(said)
        hosts = f" (hosts not allowed: {', '.join(sorted(refused))})" if refused else ""
        raise one.refused(f"failed{hosts}: {said}")
