"""The parts of the VM build that need neither network nor root."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.envs.backends import backends
from penstock.envs.microvm.images.assets import digest_bytes, load_assets, were_assets_built_before
from penstock.envs.microvm.probe import probe
from penstock.envs.microvm.recipe import assets as build
from penstock.envs.microvm.recipe.image import pack_initramfs
from penstock.envs.microvm.recipe.kernel import (
    SourceUnavailable,
    choose_source,
    fetch_kernel,
    module_version,
)
from penstock.envs.microvm.recipe.steps import BuildError, Steps, build_lock, require_programs


def package(name):
    return f"linux-source-{name} - Linux kernel source for version {name} with Debian patches\n"


def test_the_preferred_series_is_taken_when_it_is_there():
    assert choose_source(package("7.3") + package("7.2") + package("6.12")) == "linux-source-7.2"


def test_else_the_newest_that_has_the_seccomp_mode():
    assert choose_source(package("6.16") + package("7.10") + package("7.9")) == "linux-source-7.10"
    with pytest.raises(BuildError, match=r"6\.16 or newer"):
        choose_source(package("6.12") + package("6.1"))


def test_debians_kernel_is_refused_without_the_seccomp_mode(tmp_path):
    (tmp_path / "7.2.7").mkdir()
    assert module_version(tmp_path) == "7.2.7"
    (tmp_path / "7.2.7").rename(tmp_path / "6.12.9")
    with pytest.raises(BuildError, match=r"expected version 6\.16 or newer, found 6\.12\.9"):
        module_version(tmp_path)


def test_missing_programs_are_all_named():
    with pytest.raises(BuildError, match=r"no-such-a, no-such-b; as root: .*apt-packages"):
        require_programs("sh", "no-such-a", "no-such-b")


def test_debians_kernel_names_the_programs_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="missing programs: apt-get, dpkg-deb, gcc, strip"):
        fetch_kernel(Steps(tmp_path, quiet, is_awaited=True), tmp_path)


def test_a_driver_that_a_newer_package_lacks_is_named(tmp_path):
    with pytest.raises(BuildError, match=r"expected a file \*\*/erofs\.ko, found none"):
        pack_initramfs(Steps(tmp_path, quiet), "kernel", tmp_path, ["erofs"])


def test_a_step_ends_with_its_builder(tmp_path):
    script = (
        "import sys; from pathlib import Path\n"
        "from penstock.envs.microvm.recipe.steps import Steps\n"
        "step = ['sh', '-c', 'echo $$ > pid.new; mv pid.new pid; exec sleep 60']\n"
        "Steps(Path(sys.argv[1]), print).run('step', step, timeout_s=60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) as builder:
        until((tmp_path / "pid").exists)
        builder.kill()
    step = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/cmdline")
    until(lambda: not step.exists() or b"sleep" not in step.read_bytes())


def until(is_so):
    for _ in range(3000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError


def test_a_failed_step_shows_the_end_of_its_output(tmp_path):
    steps = Steps(tmp_path, lambda line: None)
    with pytest.raises(BuildError, match=r"exited with 3.*\n.*reason"):
        steps.run("step", ["sh", "-c", "echo reason; exit 3"], timeout_s=10)
    with pytest.raises(BuildError, match="took too long"):
        steps.run("step", ["sleep", "100"], timeout_s=0.05)
    for is_awaited in (False, True):
        with pytest.raises(BuildError, match="no-such-program exited with 127"):
            Steps(tmp_path, quiet, is_awaited=is_awaited).run(
                "step", ["no-such-program"], timeout_s=10
            )


@pytest.mark.parametrize(
    ("said", "is_network"),
    [
        ("Temporary failure resolving 'deb.debian.org'", True),
        ("Could not connect to deb.debian.org:80 (1.2.3.4). - connect (111: ...)", True),
        ("curl: (6) Could not resolve host: deb.debian.org", True),
        ("pip: NewConnectionError(Failed to establish a new connection)", True),
        ("E: Unable to locate package user-mode-linux", False),
    ],
)
def test_a_step_that_needs_the_network_says_what_to_do(tmp_path, said, is_network):
    with pytest.raises(BuildError) as failed:
        Steps(tmp_path, quiet).run("step", ["sh", "-c", f'echo "{said}"; exit 100'], timeout_s=10)
    text = str(failed.value)
    assert said in text
    assert ("it needs the network: connect this machine" in text) is is_network


@pytest.fixture
def recipe(monkeypatch):
    """Builders that make small files; returns the names of what was built."""
    built = []
    inputs = {"kernel": [b"k1"], "image": [b"i1"], "debian": [b"d1"]}

    def kernel(steps, folder):
        built.append("kernel")
        (folder / "kernel.new").write_bytes(b"kernel of " + inputs["kernel"][0])
        return folder / "kernel.new", "7.2"

    def agent(steps, folder):
        (folder / "agent.new").write_bytes(b"agent of " + inputs["image"][0])
        return folder / "agent.new"

    def debian(steps, folder):
        built.append("debian")
        names = ("kernel", "initramfs", "loader", "library")
        for name in names:
            (folder / f"{name}-debian").write_bytes(name.encode())
        digests = {f"{name}_digest": name for name in names}
        recipe = {"kernel_version": "7.3", "kernel_inputs": digest_bytes(*inputs["debian"])}
        return {name: f"{name}-debian" for name in names} | digests | recipe

    def image(steps, folder, agent):
        built.append("image")
        (folder / "image.new").write_bytes(b"image of " + inputs["image"][0])
        return folder / "image.new"

    fakes = {"build_kernel": kernel, "build_agent": agent, "build_image": image}
    for name, fake in (fakes | {"fetch_kernel": debian}).items():
        monkeypatch.setattr(build, name, fake)
    monkeypatch.setattr(build, "kernel_inputs", lambda: inputs["kernel"])
    monkeypatch.setattr(build, "image_inputs", lambda: inputs["image"])
    monkeypatch.setattr(build, "debian_inputs", lambda: inputs["debian"])
    return built, inputs


def quiet(line):
    pass


def test_only_what_changed_is_built_again(tmp_path, recipe):
    built, inputs = recipe
    first = build.build_assets(tmp_path, quiet)
    assert built == ["kernel", "image"]
    assert build.build_assets(tmp_path, quiet) == first
    assert built == ["kernel", "image"]
    inputs["image"] = [b"i2"]
    second = build.build_assets(tmp_path, quiet)
    assert built == ["kernel", "image", "image"]
    assert second.kernel_digest == first.kernel_digest
    assert second.image_digest != first.image_digest
    assert load_assets(tmp_path) == (tmp_path, second)
    made_at = (tmp_path / "current.json").stat().st_mtime
    assert were_assets_built_before(made_at + 1.0, tmp_path) and not were_assets_built_before(
        made_at, tmp_path
    )
    assert not were_assets_built_before(made_at + 1.0, tmp_path / "elsewhere")
    inputs["image"] = [b"i3"]
    third = build.build_assets(tmp_path, quiet)
    kept = {x for one in (second, third) for x in one.files().values()}
    assert {p.name for p in tmp_path.iterdir()} == kept | {"current.json", "build.lock"}


@pytest.mark.parametrize(
    ("kind", "again"), [("kernel", ["kernel"]), ("image", ["image"]), ("launcher", [])]
)
def test_a_damaged_file_is_built_again(tmp_path, recipe, kind, again):
    built, _ = recipe
    first = build.build_assets(tmp_path, quiet)
    file, said = tmp_path / first.files()[kind], []
    whole = file.read_bytes()
    file.write_bytes(whole[:4])
    built.clear()
    assert build.build_assets(tmp_path, said.append) == first
    assert built == again
    assert file.read_bytes() == whole
    assert any(f"{file} is damaged" in line for line in said)


def test_a_failed_build_leaves_the_old_set(tmp_path, recipe, monkeypatch):
    _, inputs = recipe
    first = build.build_assets(tmp_path, quiet)
    inputs["kernel"] = [b"k2"]

    def fails(steps, folder):
        raise BuildError("no compiler")

    monkeypatch.setattr(build, "build_kernel", fails)
    with pytest.raises(BuildError):
        build.build_assets(tmp_path, quiet)
    assert load_assets(tmp_path) == (tmp_path, first)


def test_without_the_newer_source_debians_kernel_stands_in(tmp_path, recipe, monkeypatch):
    built, _ = recipe
    working, said = build.build_kernel, []

    def unavailable(steps, folder):
        raise SourceUnavailable("no linux-source of 6.16 or newer")

    monkeypatch.setattr(build, "build_kernel", unavailable)
    assets = build.build_assets(tmp_path, said.append)
    assert assets.is_debian
    assert built == ["debian", "image"]
    assert any("1.7 times the CPU time" in line for line in said)
    monkeypatch.setattr(build, "build_kernel", working)
    assert not build.build_assets(tmp_path, quiet).is_debian
    assert built == ["debian", "image", "kernel"]


def test_a_run_that_waits_takes_debians_kernel_until_one_was_compiled(tmp_path, recipe):
    built, inputs = recipe
    first = build.build_assets(tmp_path, quiet, at_once=True)
    assert first.is_debian
    assert build.build_assets(tmp_path, quiet, at_once=True) == first
    assert built == ["debian", "image"]
    compiled = build.build_assets(tmp_path, quiet)
    assert not compiled.is_debian
    assert set(compiled.files()) == {"kernel", "image", "agent", "launcher"}
    assert build.build_assets(tmp_path, quiet, at_once=True) == compiled
    assert built == ["debian", "image", "kernel"]
    inputs["kernel"] = [b"k2"]
    assert not build.build_assets(tmp_path, quiet, at_once=True).is_debian
    assert built == ["debian", "image", "kernel", "kernel"]


def test_debians_kernel_is_taken_again_where_its_recipe_changed(tmp_path, recipe):
    built, inputs = recipe
    build.build_assets(tmp_path, quiet, at_once=True)
    inputs["debian"] = [b"d2"]
    changed = build.build_assets(tmp_path, quiet, at_once=True)
    assert changed.kernel_inputs == digest_bytes(b"d2")
    assert built == ["debian", "image", "debian"]


def test_a_run_that_waits_compiles_where_debians_cannot_be_had(tmp_path, recipe, monkeypatch):
    built, _ = recipe

    def fails(steps, folder):
        raise BuildError("no such package")

    monkeypatch.setattr(build, "fetch_kernel", fails)
    assert not build.build_assets(tmp_path, quiet, at_once=True).is_debian
    assert built == ["kernel", "image"]


def test_what_a_dead_builder_left_is_swept(tmp_path, recipe):
    (tmp_path / "build-dead").mkdir()
    (tmp_path / "build-dead" / "x").write_text("x")
    build.build_assets(tmp_path, quiet)
    assert not (tmp_path / "build-dead").exists()


def test_a_second_builder_waits_for_the_first(tmp_path):
    script = (
        "import sys; from pathlib import Path\n"
        "from penstock.envs.microvm.recipe.steps import build_lock\n"
        "with build_lock(Path(sys.argv[1]), lambda line: print(line, flush=True)): print('in')\n"
    )
    with build_lock(tmp_path, quiet):
        other = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert "waiting" in other.stdout.readline()
    with other:
        assert other.stdout.readline() == "in\n"


async def test_the_probe_says_what_is_missing_and_how_to_get_it(tmp_path):
    results = {r.name: r for r in await probe(tmp_path)}
    assert set(results) == set(backends)
    assert not any(r.available for r in results.values())
    assert "images base" in results["uml"].how_to_get
    assert "vm-qemu" in results["qemu-tcg"].how_to_get
