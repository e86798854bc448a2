"""Part `aa`: a thousand experiments between equal arms, and some with a drop of five points."""

import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.lab.simulate.users.experiments import simulate_experiments
from tests.lab.simulate.users.settings import UsersScenario

NUM_PER_CHUNK = 50
NUM_PROCESSES = 2
_SHARES = ("aa_false_decisions", "aa_false_promotions", "aa_false_rollbacks", "planted_rolled_back")


def simulate_aa(scenario: UsersScenario) -> dict[str, Any]:
    """Run the part; return its figures: shares are means over chunks of equal size."""
    num_chunks = max(1, scenario.num_experiments // NUM_PER_CHUNK)
    found: list[dict[str, Any]] = []
    with ProcessPoolExecutor(NUM_PROCESSES) as pool:
        first = 1_000_000 * (scenario.seed + 1)
        chunks = [
            pool.submit(simulate_experiments, NUM_PER_CHUNK, first + number * NUM_PER_CHUNK)
            for number in range(num_chunks)
        ]
        for number, chunk in enumerate(chunks):
            found.append(chunk.result())
            false = sum(one["aa_false_decisions"] for one in found) / len(found)
            text = f"{(number + 1) * NUM_PER_CHUNK} A/A experiments: {false:.1%} false decisions\n"
            sys.stderr.write(text)
    shares = {name: round(sum(one[name] for one in found) / num_chunks, 4) for name in _SHARES}
    sessions = sorted(one["planted_sessions_p50"] for one in found)
    return shares | {
        "num_experiments": num_chunks * NUM_PER_CHUNK,
        "planted_points": found[0]["planted_points"],
        "planted_num": sum(one["planted_num"] for one in found),
        "planted_sessions_by_power": found[0]["planted_sessions_by_power"],
        "planted_sessions_p50": sessions[num_chunks // 2],
    }
