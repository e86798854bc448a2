"""What QEMU boots: the kernel out of Debian's package, and the first file system."""

import shutil
import struct
import subprocess

import pytest

from penstock.envs.microvm.recipe.image import pack_cpio
from penstock.envs.microvm.recipe.qemu import LZ4_LEGACY, build_program, kernel_payload
from penstock.envs.microvm.recipe.steps import BuildError, Steps


def image(payload):
    """A file with the x86 boot header's fields, and a payload where they say."""
    data = bytearray(3 * 512)
    data[0x1F1] = 1
    struct.pack_into("<II", data, 0x248, 512, len(payload))
    return bytes(data) + payload + b"after"


def test_the_kernel_is_where_the_header_says():
    assert kernel_payload(image(LZ4_LEGACY + b"kernel" + b"size")) == LZ4_LEGACY + b"kernel"


def test_an_unknown_packing_is_named():
    with pytest.raises(BuildError, match="1f8b0800"):
        kernel_payload(image(b"\x1f\x8b\x08\x00gzip"))


def test_the_first_file_system_unpacks_as_it_was_packed(tmp_path):
    if shutil.which("cpio") is None:
        pytest.skip("cpio is missing: apt-get install cpio")
    packed = pack_cpio([("d", 0o40755, b""), ("d/f", 0o100755, b"x" * 5), ("e", 0o100644, b"")])
    subprocess.run(["cpio", "-idm", "--quiet"], input=packed, cwd=tmp_path, check=True, timeout=20)
    assert (tmp_path / "d" / "f").read_bytes() == b"xxxxx"
    assert (tmp_path / "d" / "f").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "e").read_bytes() == b""


def test_what_a_build_of_qemu_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"missing programs: .*meson, ninja"):
        build_program(Steps(tmp_path, print))
