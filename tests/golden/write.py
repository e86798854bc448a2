"""`python -m tests.golden.write`: keep a golden file for every message that has none.

A file is never written again: it is what an earlier version put on disk, and must stay readable.
After a breaking change, which needs a new class, remove the old class's file with the class.
"""

from pathlib import Path

from tests.golden.examples import example

from penstock.messages.codec import MESSAGES, encode

FOLDER = Path(__file__).parent / "v2"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for message_type in MESSAGES:
        path = FOLDER / f"{message_type.__name__}.msgpack"
        if not path.exists():
            path.write_bytes(encode(example(message_type)))
            print(path.name)


if __name__ == "__main__":
    main()
