// Behavior in episodes while the policy learns. The state has counts; shares are computed here.
const share = (part, whole) => (row) => (row[whole] ? [[row.policy_version, row[part] / row[whole]]] : []);
const SHARES = {
  looked: share("num_looked", "num_rollouts"), parallel: share("num_parallel_turns", "num_turns"),
  lookedPass: share("num_looked_solved", "num_looked"), calls: share("num_solved_calls", "num_solved"), turns: share("num_solved_turns", "num_solved"),
};

function drawBehavior() {
  const { training, evals } = state.behavior;
  const window = Math.max(1, Math.min(8, Math.floor(training.length / 6)));
  const curve = (name) => smooth(training.flatMap(SHARES[name]), window);
  const dots = (name) => evals.flatMap(SHARES[name]);
  const over = window > 1 ? `, mean of ${window}` : "";
  const habits = training.length && chart(widthOf("behavior"), {
    x: { label: "policy version" }, y: { format: percent, min: 0, max: 1, tip: (v) => `${(v * 100).toFixed(1)}%` },
    series: [
      { name: "rollouts that read before they edit", color: 1, points: curve("looked") },
      { name: "turns with two calls or more", color: 2, points: curve("parallel") },
      { name: "held out: two calls or more", color: 3, kind: "dots", points: dots("parallel") },
    ],
  });
  fill("behavior", note(`Training rollouts by their last policy version${over}`), habits || empty("No rollout has been judged yet."));
  const effort = training.some((row) => row.num_solved) && chart(widthOf("effort"), {
    x: { label: "policy version" }, y: { format: trim, min: 0 },
    series: [
      { name: "calls", color: 1, points: curve("calls") }, { name: "turns", color: 2, points: curve("turns") },
      { name: "held out: turns", color: 3, kind: "dots", points: dots("turns") },
    ],
  });
  fill("effort", note(`Mean over rollouts that solved their task${over}`), effort || empty("No task has been solved yet."));
  fill("gain", ...gainOf(state.behavior));
}

function gainOf({ gains, evals }) {
  if (!gains.length || !evals.length) return [empty("Needs two evaluations.")];
  const gain = gains[0];
  const first = evals[0], last = evals[evals.length - 1];
  const of = (name, format) => [first, last].map((row) => SHARES[name](row).map((point) => format(point[1]))[0] ?? "–");
  const rows = [
    ["pass rate", percent(gain.pass_before), percent(gain.pass_after)],
    ["rollouts that read before they edit", percent(gain.share_looks_before), percent(gain.share_looks_after)],
    ["pass rate of those", ...of("lookedPass", percent)],
    ["turns with two calls or more", ...of("parallel", percent)],
    ["calls per solved task", ...of("calls", (v) => v.toFixed(2))],
    ["turns per solved task", ...of("turns", (v) => v.toFixed(2))],
  ];
  const work = gain.gain_by_better_work;
  const split = work === null || work === undefined ? "There is no gain to attribute, or no rollout read before it edited."
    : `${percent(work)} of the gain comes from better work, ${percent(1 - work)} from reading first more often.`;
  const arrow = (before, after) => `${percent(before)} → ${percent(after)}`;
  const drawn = (t) => (t === null || t === undefined ? "" : ` (T = ${trim(t)})`);
  const sets = gains.slice(0, 8).map((g) => [`${g.eval_set}${drawn(g.temperature)}`, arrow(g.pass_before, g.pass_after), arrow(g.share_looks_before, g.share_looks_after)]);
  const bySet = gains.length > 1 ? table(["evaluation set", "pass rate", "read first"], sets, [1, 2]) : null;
  return [note("Held-out tasks, first and newest evaluation"), table(["", `version ${gain.version_before}`, `version ${gain.version_after}`], rows, [1, 2]), html("p", "sub", split), bySet];
}

function drawOutcomes() {
  const { rollouts } = state;
  const tones = { solved: 3, failed: 1, policy_error: 4, timeout: 5, infrastructure_error: 2, judge_error: 2, stale: 6, filtered: 6, cancelled: 6 };
  const parts = Object.entries(rollouts.outcomes).sort((a, b) => b[1] - a[1]).map(([name, value]) => ({ name, value, color: tones[name] ?? 6 }));
  const total = parts.reduce((sum, p) => sum + p.value, 0);
  if (!rollouts.num_finished) { fill("outcomes", empty("No rollout has finished yet.")); return; }
  const list = html("dl");
  for (const p of parts) {
    const swatch = html("i", "swatch");
    swatch.style.background = `var(--c${p.color})`;
    list.append(html("dt", "", swatch, p.name.replace("_", " ")), html("dd", "", `${integer(p.value)} · ${percent(p.value / total)}`));
  }
  const pair = (name, value) => list.append(html("dt", "", name), html("dd", "", value));
  pair("turns per rollout", trim(rollouts.num_turns / rollouts.num_finished));
  pair("tokens per rollout", trim(rollouts.num_sampled_tokens / rollouts.num_finished));
  pair("tool calls per rollout (invalid)", `${trim(rollouts.num_calls / rollouts.num_finished)} (${trim(rollouts.num_invalid_calls / rollouts.num_finished)})`);
  if (rollouts.num_summaries) pair("tokens in summaries", percent(rollouts.num_summary_tokens / rollouts.num_sampled_tokens));
  fill("outcomes", note("Verdicts of training rollouts"), stackedBar(parts), list);
}
