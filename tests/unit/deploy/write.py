"""`python -m tests.unit.deploy.write`: write the golden files again; look at the difference."""

from tests.unit.deploy.rendering import RENDERED, golden_files


def main() -> None:
    files = golden_files()
    for path in RENDERED.iterdir():
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (RENDERED / name).write_text(text)


if __name__ == "__main__":
    main()
