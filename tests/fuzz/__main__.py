"""`python -m tests.fuzz TARGET --seconds 600`: coverage-guided fuzzing of one decoder, by atheris.

Without a target: all, one after the other. Inputs that break something are kept in
`.cache/fuzz/TARGET/`, and given as a file they are tried again.
"""

import argparse
import subprocess
import sys
from pathlib import Path

CACHE = Path(".cache/fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", help="default: all")
    parser.add_argument("--seconds", type=int, default=600, help="for each (default: %(default)s)")
    parser.add_argument("--file", type=Path, help="try this one input")
    arguments = parser.parse_args()
    if arguments.target is None:
        return _all(arguments.seconds)
    return _one(arguments.target, arguments.seconds, arguments.file)


def _all(seconds: int) -> int:
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in TARGETS:
        command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(seconds)]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    print(f"fuzz: {len(TARGETS)} targets, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _one(name: str, seconds: int, file: Path | None) -> int:
    import atheris

    with atheris.instrument_imports(include=["penstock"]):
        from tests.fuzz.guard import attempt
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    for seed in target.seeds():  # what is made once is made before memory is watched
        attempt(target.run, seed)
    folder = CACHE / name
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    if file is not None:
        attempt(target.run, file.read_bytes())
        return 0
    print(f"fuzz: {name} for {seconds} s", flush=True)
    options = [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", "-max_len=65536"]
    options += ["-rss_limit_mb=4096", "-timeout=20", "-print_final_stats=1", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], lambda data: attempt(target.run, data))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
