"""Arguments of `penstock tasks make` that make no sense are told before anything is started."""

import pytest

from penstock.infra.cli import main


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--concurrent", "0", "at least 1"),
        ("-n/--num", "0", "at least 1"),
        ("-n/--num", "-5", "at least 1"),
        ("--wall-s", "-3", "more than 0"),
        ("--wall-s", "nan", "more than 0"),
        ("--heldout", "7", "0 to 1"),
        ("--heldout", "many", "0 to 1"),
    ],
)
def test_the_flag_and_what_it_takes_are_named(tmp_path, capsys, flag, value, expected):
    output = tmp_path / "tasks"
    make = ["tasks", "make", "own:tasks", "-o", str(output), f"{flag.split('/')[-1]}={value}"]
    with pytest.raises(SystemExit) as ended:
        main(make)
    assert ended.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert flag in line and expected in line and repr(value) in line
    assert not output.exists()
