"""Draw the curve of the README from a run's log: `python docs/site/curve.py RUN FILE.svg`.

Solved shares by optimizer step: of each step's groups, smoothed, and of held-out tasks as dots.
"""

import sys
from itertools import pairwise
from pathlib import Path

import penstock

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 300, 52, 34, 16, 40
SMOOTHED_OVER = 9
_STYLE = (
    "text{fill:#8a94a3;font:13px system-ui,sans-serif}.g{stroke:#8a94a3;stroke-opacity:.25}"
    ".r{stroke:#14b8a6;stroke-opacity:.3;fill:none}.m{stroke:#14b8a6;stroke-width:2.5;fill:none}"
    ".e{fill:#f59e0b}.v{stroke:#f59e0b;stroke-width:2;stroke-dasharray:5 4}"
)
Point = tuple[float, float]


def main(name: str, output: Path) -> None:
    """Write the SVG of a run."""
    run = penstock.open_run(name)
    steps = [delivery.event for delivery in run.events("StepCompleted")]
    training = [(step.step, step.metrics["pass_rate"]) for step in steps]
    evaluations = [
        (event.policy_version, event.num_solved / event.num_tasks)
        for event in (delivery.event for delivery in run.events("EvalCompleted"))
        if event.is_main and event.num_tasks
    ]
    output.write_text(draw(training, sorted(evaluations), run.summary["seed"]), encoding="utf-8")


def smoothed(points: list[Point], width: int = SMOOTHED_OVER) -> list[Point]:
    """Return the mean of each point and its neighbors, `width` in all where there are so many."""
    half = width // 2
    near = [points[max(0, at - half) : at + half + 1] for at in range(len(points))]
    return [(x, sum(y for _, y in p) / len(p)) for (x, _), p in zip(points, near, strict=True)]


def draw(training: list[Point], evaluations: list[Point], seed: int) -> str:
    """Return the picture; steps from 0, shares from 0 to 1."""
    last = max([x for x, _ in training + evaluations], default=1.0) or 1.0

    def place(point: Point) -> Point:
        x, y = point
        across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return round(LEFT + x / last * across, 1), round(TOP + (1.0 - y) * down, 1)

    def line(points: list[Point], name: str) -> str:
        places = " ".join(f"{x},{y}" for x, y in map(place, points))
        return f'<polyline class="{name}" points="{places}"/>'

    title = f"Solved tasks by optimizer step, quickstart, seed {seed}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title><style>{_STYLE}</style>",
        f'<text x="{LEFT}" y="18">{title}: training (line), held-out (dots)</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place((0, share))
        parts += [
            f'<path class="g" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>',
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>',
        ]
    for step in (0, last / 2, last):
        x, _ = place((step, 0))
        parts.append(f'<text x="{x}" y="{HEIGHT - 14}" text-anchor="middle">{step:.0f}</text>')
    parts += [line(training, "r"), line(smoothed(training), "m")]
    for before, after in pairwise(evaluations):
        parts.append(line([before, after], "v"))
    for point in evaluations:
        x, y = place(point)
        at = f'x="{min(max(x, LEFT + 18), WIDTH - 30)}" y="{y - 10}" text-anchor="middle"'
        parts.append(f'<circle class="e" cx="{x}" cy="{y}" r="5"/><text {at}>{point[1]:.0%}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
