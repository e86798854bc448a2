"""`python -m penstock.infra.commands.vm_setup`: builds kernel, image and agent into the cache.

Idempotent and safe to run twice at once; only what changed is built. Takes about five minutes on
two cores the first time, mostly the kernel's compilation. With `--qemu` also what QEMU boots,
Debian's cloud kernel (a download of 27 MB), and QEMU itself (24 MB of source, five more minutes).
"""

import argparse
import sys
import time

from penstock.envs.microvm.images.assets import vm_cache_dir
from penstock.envs.microvm.recipe.assets import build_assets
from penstock.envs.microvm.recipe.qemu import build_qemu_assets
from penstock.envs.microvm.recipe.steps import BuildError


def main() -> int:
    """Build what is missing; return the exit status."""
    parser = argparse.ArgumentParser(description="Build what virtual machines boot.")
    parser.add_argument("--qemu", action="store_true", help="also what QEMU boots")
    with_qemu = parser.parse_args().qemu
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[vm {time.monotonic() - started:4.0f} s] {line}", flush=True)

    folder = vm_cache_dir()
    try:
        assets = build_assets(folder, say)
        if with_qemu:
            build_qemu_assets(folder, say)
    except BuildError as error:
        print(f"[vm] {error}", file=sys.stderr)
        return 1
    say(f"ready in {folder}: kernel {assets.kernel_version}, image {assets.image_digest[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
