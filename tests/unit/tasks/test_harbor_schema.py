"""What is accepted, Harbor's own `TaskConfig` accepts; what only Harbor accepts is refused by name.

Needs `make harbor-env` (Python 3.12 or newer).
"""

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.tasks.test_harbor_fields import REFUSED, REFUSED_STEP, STEP, WHOLE, WHOLE_STEPS

from penstock.envs.egress.rules import EgressRuleError, parse_rules
from penstock.envs.tasks.harbor.fields import parse_fields
from penstock.envs.tasks.harbor.schema import HarborFieldError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PYTHON = Path(__file__).parents[3] / ".venv-harbor" / "bin" / "python"
JUDGE = """\
import json, sys, warnings
warnings.simplefilter("ignore")
from harbor.models.task.config import TaskConfig
for line in sys.stdin:
    try:
        TaskConfig.model_validate(json.loads(line))
        print("", flush=True)
    except Exception as error:
        print(repr(str(error)), flush=True)
"""
NUM_EXAMPLES = 3_000
ODD = st.one_of(
    st.booleans(), st.integers(-5, 100_000), st.floats(allow_nan=False), st.text(),
    st.sampled_from(["", "public", "allowlist", "separate", "windows", "2G", "a.test", "/app"]),
    st.lists(st.sampled_from(["a.test", "*.b.test", "10.0.0.1", "x y", ""]), max_size=3),
    st.dictionaries(st.sampled_from(["name", "command", "A", "cpus"]), st.text(), max_size=2),
)  # fmt: skip
FIELDS = sorted(
    {
        f"{table}.{name}"
        for table, inner in WHOLE.items()
        if isinstance(inner, dict)
        for name in inner
    }
    | {name for name, value in WHOLE.items() if not isinstance(value, dict)}
    | set(REFUSED)
    | {"environment.allow_internet", "environment.docker_image", "environment.memory_mb"}
)  # fmt: skip


STEP_FIELDS = sorted(
    {f"{table}.{name}" for table in ("agent", "verifier") for name in STEP[table]}
    | {field.strip() for field in REFUSED_STEP}
)
NAMES = st.sampled_from(
    [
        "two",
        "TWO",
        "Ａ",
        "A",
        "a.",
        "con.x",
        "aux",
        "a/b",
        "a:b",
        " ",
        "é",
        "e\u0301",
        "x" * 256,
        "\t",
    ]
)


def change(draw, made, fields, refused):
    """Make some fields odd, or leave them out."""
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        table, _, name = field.rpartition(".")
        holder = made[table] if table else made
        if draw(st.booleans()):
            holder.pop(name, None)
        else:
            holder[name] = draw(st.one_of(ODD, st.just(refused.get(field, False))))


@st.composite
def task_settings(draw):
    """A whole task's settings, some of whose fields are odd or absent."""
    made = json.loads(json.dumps(draw(st.sampled_from([WHOLE, WHOLE_STEPS]))))
    if made.get("steps"):
        change(draw, made["steps"][0], STEP_FIELDS, REFUSED_STEP)
        if draw(st.booleans()):
            made["steps"][0]["name"] = draw(NAMES)
    change(draw, made, FIELDS, REFUSED)
    return made


@pytest.fixture(scope="module")
def harbor():
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: make harbor-env, with Python 3.12 or newer")
    with subprocess.Popen(
        [PYTHON, "-c", JUDGE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def refusal(task):
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert refusal(WHOLE) == ""
        yield refusal
        process.stdin.close()


def test_nothing_is_accepted_that_harbor_refuses(harbor):
    counts = {"both": 0, "harbor alone": 0, "neither": 0}

    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(task_settings())
    def compare(task):
        refused = harbor(task)
        try:
            fields = parse_fields(task)
            parse_rules(fields.egress)
            assert fields.agent_s > 0 and fields.verifier_s > 0 and fields.machine
            for number in range(len(fields.steps or [])):
                assert fields.step_verifier_s(number) > 0 and fields.min_reward(number) != 9e9
            assert not refused, (task, refused)
            counts["both"] += 1
        except (HarborFieldError, EgressRuleError) as error:
            named = str(error).partition(":")[0].rpartition(".")[2].partition("[")[0]
            known = {field.rpartition(".")[2] for field in FIELDS + STEP_FIELDS} | WHOLE.keys()
            assert named in known or "egress rule" in str(error), str(error)
            counts["neither" if refused else "harbor alone"] += 1

    compare()
    assert min(counts.values()) > NUM_EXAMPLES // 50, counts
    print(counts)
