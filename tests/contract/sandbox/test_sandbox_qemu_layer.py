"""A layer in a copied machine; needs QEMU (`make vm-qemu`)."""

import pytest

from penstock.envs.backends import open_backend
from penstock.envs.microvm.images.assets import vm_cache_dir
from penstock.envs.microvm.recipe.layer import LayerSources, build_layer
from penstock.envs.sandbox import BackendUnavailable

from .check_sandbox import sh

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(300)]
START_S = 120.0


async def test_copies_work_in_their_layer(tmp_path):
    try:
        open_backend("qemu-tcg")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    cache, source = tmp_path / "vm", tmp_path / "source"
    cache.mkdir()
    for path in vm_cache_dir().iterdir():
        if path.name != "images":
            (cache / path.name).symlink_to(path)
    source.mkdir()
    (source / "a.py").write_text("A = 1\n")
    build_layer("task", LayerSources(folder=source), cache, lambda line: None)
    backend = open_backend("qemu-tcg", cache=cache, layer="task")
    machines = [await backend.start(timeout_s=START_S) for _ in range(2)]
    await sh(machines[0], "echo B = 2 >> a.py", timeout_s=START_S)
    told = [await sh(machine, "cat a.py", timeout_s=START_S) for machine in machines]
    assert told == ["A = 1\nB = 2\n", "A = 1\n"]
    for machine in machines:
        await machine.close()
