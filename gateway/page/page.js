// The overview: one function per section renders its part of the state. `SECTIONS` says which parts.
const BLANK = {
  run: {}, midtrain: { points: [] }, steps: [], evals: [], staleness: { tokens: {} }, regions: {},
  rollouts: { ends: {}, outcomes: {} }, judges: {}, sandbox: { gauges: {} }, ledger: { totals: {}, rows: {}, violations: [] },
  charges: { num_proven: 0, num_suspected: 0, num_quarantined: 0, quarantined: [] },
  behavior: { training: [], evals: [], gains: [] }, compute: {}, tasks: { sources: {}, sets: {} }, live: {}, gates: { channels: {}, decided: [] }, actors: {}, stall: {}, log: [],
};
let state = BLANK;

const integer = (v) => Math.round(v ?? 0).toLocaleString("en-US");
const percent = (v) => `${Math.round(v * 100)}%`;
const short = (v) => (v >= 1e9 ? `${trim(v / 1e9)}G` : v >= 1e6 ? `${trim(v / 1e6)}M` : v >= 1e3 ? `${trim(v / 1e3)}k` : trim(v));
const trim = (v) => String(Number(v.toPrecision(3)));
const bytes = (v) => (v >= 1e6 ? `${trim(v / 1e6)} MB` : v >= 1e3 ? `${trim(v / 1e3)} kB` : `${Math.round(v)} B`);
const small = (v) => (v === 0 ? "0" : Math.abs(v) < 1e-4 ? v.toExponential(0) : trim(v));
const duration = (s) => {
  const whole = Math.max(0, Math.round(s));
  const minutes = Math.floor(whole / 60), hours = Math.floor(minutes / 60);
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
};
const seconds = (v) => `${trim(v)} s`;
const milliseconds = (v) => (v >= 1000 ? `${trim(v / 1000)} s` : `${trim(v)} ms`);
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length ? (sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2) : 0;
};
const passRate = (e) => (e.num_tasks ? e.num_solved / e.num_tasks : 0);
const metric = (name) => state.steps.filter((s) => name in s.metrics).map((s) => [s.step, s.metrics[name]]);
const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

// Returns the moving average over a window: single steps are too noisy to show a trend.
function smooth(points, window) {
  return points.map(([x], i) => {
    const near = points.slice(Math.max(0, i - window + 1), i + 1);
    return [x, near.reduce((sum, p) => sum + p[1], 0) / near.length];
  });
}

function fill(id, ...children) {
  const card = document.getElementById(id);
  const title = card.querySelector("h2");
  card.replaceChildren(title, ...children.filter(Boolean));
}

const widthOf = (id) => Math.max(240, document.getElementById(id).clientWidth - 28);
const note = (content) => html("p", "sub", content);
const empty = (content) => html("div", "empty", content);

function drawHeader() {
  const { run, stall } = state;
  document.getElementById("run-id").textContent = run.run_id ?? "";
  document.getElementById("phase").textContent = { starting: "starting", midtrain: "mid-training", rl: "reinforcement learning", serving: "serving", finished: "finished" }[run.phase] ?? "no run";
  document.getElementById("elapsed").textContent = run.started_at ? `${duration(run.now - run.started_at)} · seed ${run.seed}` : "";
  document.title = run.run_id ? `Penstock · ${run.run_id}` : "Penstock";
  const banner = document.getElementById("stall");
  banner.className = `stall ${stall.is_stalled ? "bad" : run.phase === "finished" ? "good" : ""}`;
  const lead = stall.is_stalled ? "Stalled" : run.phase === "finished" ? "Done" : (stall.chain ?? []).length ? "Waiting" : "Now";
  banner.replaceChildren(html("strong", "", `${lead}: `), stall.words ?? "no state yet");
}

function tile(name, value, detail, tone = "") {
  return html("div", "tile", html("div", "name", name), html("div", `value ${tone}`, value), html("div", "note", detail));
}

function drawTiles() {
  const { evals, steps, staleness, ledger, live, sandbox, run } = state;
  const first = evals[0], last = evals[evals.length - 1];
  const step = steps[steps.length - 1];
  const within = (staleness.budget_max ?? -1) < 0 || staleness.seen_max <= staleness.budget_max;
  const settled = ledger.totals.generated ?? 0;
  document.getElementById("tiles").replaceChildren(
    tile("Held-out pass rate", last ? percent(passRate(last)) : "–", evals.length > 1 ? `from ${percent(passRate(first))} before RL` : last ? `of ${last.num_tasks} tasks` : "not evaluated yet"),
    tile("Reward, last step", step && "reward_mean" in step.metrics ? step.metrics.reward_mean.toFixed(3) : "–", step && "pass_rate" in step.metrics ? `pass rate ${percent(step.metrics.pass_rate)}` : "no step yet"),
    tile("Steps", integer(run.step), `${integer(state.rollouts.num_finished)} rollouts`),
    tile("Staleness seen", integer(staleness.seen_max), staleness.budget_max >= 0 ? `budget ${staleness.budget_max} version${staleness.budget_max === 1 ? "" : "s"}` : "versions", within ? "" : "bad-text"),
    tile("Ledger", settled ? (ledger.balanced ? "balanced" : "off") : "–", `${short(settled)} tokens sampled`, settled ? (ledger.balanced ? "good-text" : "bad-text") : ""),
    tile("VM boot, median", sandbox.boot_ms_p50 ? milliseconds(sandbox.boot_ms_p50) : "–", `${integer(sandbox.num_vms)} machines`),
    tile("Users' requests", integer(live.num_requests), `${integer(live.num_feedback)} signals, ${integer(live.num_trained)} trained`),
  );
}

function drawReward() {
  const reward = metric("reward_mean"), passed = metric("pass_rate");
  const evals = state.evals.map((e) => [e.policy_version, passRate(e)]);
  const window = Math.max(1, Math.min(8, Math.floor(reward.length / 6)));
  const raw = window > 1 ? [{ name: "reward per step", color: 1, thin: true, dash: "", points: reward }] : [];
  const rewards = reward.map((p) => p[1]);
  const graph = chart(widthOf("reward"), {
    height: 236, x: { label: "step" }, y: { format: (v) => v.toFixed(2), min: Math.min(0, ...rewards), max: Math.max(1, ...rewards) },
    series: [
      { name: window > 1 ? `reward, mean of ${window} steps` : "reward", color: 1, points: smooth(reward, window) },
      { name: window > 1 ? `training pass rate, mean of ${window} steps` : "training pass rate", color: 2, points: smooth(passed, window) },
      { name: "held-out pass rate", color: 3, kind: "dots", joined: true, points: evals },
      ...raw,
    ],
  });
  fill("reward", graph ?? empty("No step has been taken yet."));
}

function drawMidtrain() {
  const { midtrain } = state;
  const ends = [{ num_tokens: 0, loss: midtrain.loss_first }, { num_tokens: midtrain.num_tokens, loss: midtrain.loss_last, heldout_loss: midtrain.heldout_loss }];
  // Progress is telemetry, which the event server drops; the log has the first and the last loss.
  const points = midtrain.wall_s && midtrain.points.length < 2 ? ends : midtrain.points;
  const graph = chart(widthOf("midtrain"), {
    x: { label: "tokens", format: short, whole: false }, y: { format: (v) => v.toFixed(1), tip: (v) => v.toFixed(3) },
    series: [
      { name: "training loss", color: 1, points: points.filter((p) => p.loss).map((p) => [p.num_tokens, p.loss]) },
      { name: "held-out loss", color: 3, kind: "dots", points: points.filter((p) => p.heldout_loss).map((p) => [p.num_tokens, p.heldout_loss]) },
    ],
  });
  const speed = midtrain.tokens_per_s ? ` · ${short(midtrain.tokens_per_s)} tokens/s` : "";
  const total = midtrain.num_tokens_total ? ` of ${short(midtrain.num_tokens_total)}` : "";
  const line = midtrain.wall_s
    ? `${short(midtrain.num_tokens)} tokens in ${duration(midtrain.wall_s)} · perplexity ${trim(midtrain.heldout_perplexity)} on held-out text without demonstrations`
    : `${short(midtrain.num_tokens ?? 0)}${total} tokens${speed}`;
  fill("midtrain", note(`Nats per token. ${line}`), graph ?? empty("Mid-training has not begun."));
}

function drawStaleness() {
  const { staleness } = state;
  const points = Object.entries(staleness.tokens).map(([k, v]) => [Number(k), v]).sort((a, b) => a[0] - b[0]);
  const total = points.reduce((sum, p) => sum + p[1], 0) || 1;
  const budget = Math.max(0, staleness.budget_max ?? -1);
  const padded = Array.from({ length: Math.max(budget, points.length ? points[points.length - 1][0] : 0) + 1 }, (_, i) => [i, (staleness.tokens[i] ?? 0) / total]);
  const graph = points.length && chart(widthOf("staleness"), {
    x: { label: "versions behind the trainer" }, y: { format: percent, tip: (v) => `${(v * 100).toFixed(1)}%`, min: 0, max: 1 },
    series: [{ name: "of trained tokens", color: 1, kind: "bars", points: padded }],
  });
  const allowed = staleness.num_groups_allowed ? ` · ${integer(staleness.num_groups_granted)} of ${integer(staleness.num_groups_allowed)} credits used` : "";
  const bound = staleness.budget_max >= 0 ? `Budget ${staleness.budget_max}, seen at most ${staleness.seen_max}${allowed}` : "Share of trained tokens";
  fill("staleness", note(bound), graph || empty("Nothing has been trained yet."));
}

function drawStepTime() {
  const steps = state.steps;
  const graph = chart(widthOf("steptime"), {
    height: 150, stacked: true, x: { label: "step" }, y: { format: seconds, min: 0 },
    series: [
      { name: "training", color: 1, kind: "bars", points: steps.map((s) => [s.step, s.train_s]) },
      { name: "waiting for rollouts", color: 6, kind: "bars", points: steps.map((s) => [s.step, s.wait_s]) },
    ],
  });
  const train = steps.reduce((sum, s) => sum + s.train_s, 0), wait = steps.reduce((sum, s) => sum + s.wait_s, 0);
  fill("steptime", note(steps.length ? `The trainer trained ${percent(train / (train + wait || 1))} of the time` : "Trainer"), graph ?? empty("No step has been taken yet."));
}

function drawCompute() {
  const { compute } = state;
  const roles = Object.entries(compute.roles ?? {});
  if (!compute.processor_s) return fill("compute", empty("CPU time has not been measured yet."));
  const describe = (tokens) => Object.entries(tokens).filter(([, n]) => n).map(([what, n]) => `${integer(n)} ${what.replace("_", "-")}`).join(", ");
  const hasRl = roles.some(([, usage]) => usage.rl_share);
  const rows = roles.map(([name, usage]) => [name, integer(usage.processor_s), percent(usage.share), hasRl ? percent(usage.rl_share) : "–", describe(usage.tokens)]);
  const bar = stackedBar(roles.map(([name, usage], i) => ({ name, value: Math.round(usage.processor_s), color: 1 + (i % 6) })));
  const line = html("p", "sub", `${integer(compute.processor_s)} s of CPU time, ${integer(compute.machines_s)} s of it in sandbox machines`);
  fill("compute", line, bar, table(["role", "CPU s", "share", "since mid-training", "tokens"], rows, [1, 2, 3], { long: 4, optional: [3] }));
}

function drawLedger() {
  const { ledger } = state;
  const FATES = [["trained", 3], ["stale", 5], ["filtered", 4], ["infra_failed", 2], ["judge_failed", 6], ["not_reproducible", 2], ["greedy", 4], ["erased", 6], ["skipped", 5], ["withheld", 3], ["in_flight", 1]];
  const label = (name) => name.replace("_", " ");
  const badge = html("span", `badge ${ledger.balanced ? "good" : "bad"}`, ledger.balanced ? "balanced" : `${ledger.num_violations} violations`);
  const versions = Object.keys(ledger.rows).map(Number).sort((a, b) => b - a).slice(0, 5);
  const fates = FATES.filter(([name]) => [ledger.totals, ...versions.map((v) => ledger.rows[v])].some((row) => row[name]));
  const head = ["tokens", "generated", ...fates.map(([n]) => label(n))];
  const line = (name, row) => [name, integer(row.generated), ...fates.map(([n]) => integer(row[n]))];
  const rows = [line("all versions", ledger.totals), ...versions.map((v) => line(`version ${v}`, ledger.rows[v]))];
  const key = html("div", "legend", ...fates.map(([name, color]) => {
    const swatch = html("i", "swatch");
    swatch.style.background = `var(--c${color})`;
    return html("span", "", swatch, label(name));
  }));
  const faults = (ledger.violations ?? []).map((v) => html("p", "sub bad-text", v));
  const bar = stackedBar(fates.map(([name, color]) => ({ name: label(name), value: ledger.totals[name] ?? 0, color })));
  const line1 = html("p", "sub", "Every sampled token is counted in exactly one column; empty columns are hidden", ledger.totals.generated ? badge : null);
  const counts = Object.entries(ledger.preferences ?? {}).filter(([name, count]) => count || name === "made");
  const words = counts.map(([name, count]) => `${integer(count)} ${name}`).join(", ");
  const judged = words ? [html("p", "sub", `Corrections and judgments: ${words}`)] : [];
  fill("ledger", line1, bar, key, table(head, rows, head.map((_, i) => i).slice(1)), ...judged, ...faults);
}

function drawCharges() {
  const { num_proven: proven, num_suspected: suspected, quarantined } = state.charges;
  const line1 = html("p", "sub", `${integer(proven)} failures charged to one item, ${integer(suspected)} suspected, ${integer(state.charges.num_quarantined)} items in quarantine`);
  const rows = quarantined.slice(-8).reverse().map((entry) => [new Date(entry.at * 1e3).toLocaleTimeString(), entry.item, entry.task_id, entry.cause]);
  fill("charges", line1, rows.length ? table(["since", "item", "task", "cause"], rows, []) : empty("Nothing is in quarantine."));
}

function drawActors() {
  const { actors, run, stall } = state;
  const inChain = new Set((stall.chain ?? []).map((e) => e.actor));
  const rows = Object.entries(actors).filter(([, a]) => !a.has_ended).sort((a, b) => a[0].localeCompare(b[0])).map(([name, a]) => {
    const busy = run.phase === "finished" ? a.busy_fraction : a.busy_fraction_recent;
    const bar = html("span", "bar", html("i"));
    bar.firstChild.style.width = percent(busy);
    const wait = run.phase === "finished" ? undefined : a.waits[0];
    const over = wait && run.now - wait.since > wait.deadline_s;
    const silent = !a.is_reporting && run.phase !== "finished";
    const words = silent ? html("span", "bad-text", `no report for ${duration(run.now - a.at)}${a.last_error ? ` · ${a.last_error}` : ""}`)
      : wait ? html("span", over ? "bad-text" : "", `${wait.target} for ${seconds(run.now - wait.since)}${wait.reason ? ` · ${wait.reason}` : ""}`)
      : html("span", "muted", "–");
    const label = inChain.has(name) ? html("strong", "", name) : name;
    return [label, html("span", "", bar, percent(busy)), integer(a.num_queued), integer(Math.max(0, a.num_starts - 1)), words];
  });
  fill("actors", rows.length ? table(["actor", "busy", "queued", "restarts", "waits for"], rows, [2, 3], { long: 4, optional: [2, 3] }) : empty("No actor has reported yet."));
}

// Gauges of machines that mean nothing once the run has finished.
const MOMENTARY = ["live", "idle", "leased", "waiting"];

function drawSandbox() {
  const { sandbox } = state;
  const list = html("dl");
  const pair = (name, value) => list.append(html("dt", "", name), html("dd", "", value));
  if (sandbox.backend) {
    pair("backend", sandbox.backend);
    pair("isolation", sandbox.isolation_class);
    pair("machines used", integer(sandbox.num_vms));
    pair("boot, median", milliseconds(sandbox.boot_ms_p50));
  }
  const isOver = state.run.phase === "finished";
  for (const [name, value] of Object.entries(sandbox.gauges)) {
    if (name === "boot_ms_p50" || (isOver && MOMENTARY.includes(name))) continue;
    if (name === "boot_ms_p99") pair("boot, 99th percentile", milliseconds(value));
    else pair(name.replaceAll("_", " "), Number.isInteger(value) ? integer(value) : trim(value));
  }
  fill("sandbox", list.children.length ? list : empty("No machine has been used yet."));
}

function drawLive() {
  const { live } = state;
  if (!live.num_requests && !live.num_external) { fill("live", empty("No user has sent a request yet.")); return; }
  const list = html("dl");
  const rows = [["requests answered", live.num_requests], ["with training consent", live.num_consented], ["feedback signals", live.num_feedback],
    ["signals retracted", live.num_retracted], ["samples joined", live.num_joined], ["samples trained", live.num_trained]];
  if (live.num_external) rows.push(["imported sessions", live.num_external]);
  for (const [name, value] of rows) list.append(html("dt", "", name), html("dd", "", integer(value)));
  if (live.num_joined) list.append(html("dt", "", "mean reward"), html("dd", "", live.reward_mean.toFixed(2)));
  fill("live", list);
}

function drawLog() {
  const items = state.log.slice(-60).reverse().map((line) => html("li", line.level, html("time", "mono", clock(line.at)), html("span", "", line.text)));
  fill("log", items.length ? html("ul", "lines", ...items) : empty("Nothing has happened yet."));
}

// numeric: columns to align right; optional: columns that narrow screens hide; long: one that wraps.
function table(head, rows, numeric, { long = -1, optional = [] } = {}) {
  const kind = (i) => [numeric.includes(i) ? "n" : i === long ? "long" : "", optional.includes(i) ? "optional" : ""].join(" ").trim();
  const top = html("tr", "", ...head.map((name, i) => html("th", kind(i), name)));
  const body = rows.map((row) => html("tr", "", ...row.map((cell, i) => html("td", kind(i), cell))));
  return html("div", "scroll", html("table", "", html("thead", "", top), html("tbody", "", ...body)));
}

const SECTIONS = {
  header: [["run", "stall"], drawHeader], tiles: [["evals", "steps", "staleness", "ledger", "live", "sandbox", "run"], drawTiles],
  reward: [["steps", "evals"], drawReward], midtrain: [["midtrain"], drawMidtrain], staleness: [["staleness"], drawStaleness],
  mismatch: [["steps"], drawMismatch], ess: [["steps"], drawEss], deltas: [["regions"], drawDeltas],
  lag: [["regions"], drawLag], steptime: [["steps"], drawStepTime],
  loss: [["steps"], drawLoss], exploration: [["steps"], drawExploration],
  behavior: [["behavior"], drawBehavior], tasks: [["tasks"], drawTasks],
  compute: [["compute"], drawCompute],
  ledger: [["ledger"], drawLedger], outcomes: [["rollouts"], drawOutcomes], actors: [["actors", "run", "stall"], drawActors],
  sandbox: [["sandbox"], drawSandbox], live: [["live"], drawLive], log: [["log"], drawLog], charges: [["charges"], drawCharges], judges: [["judges"], drawJudges], gates: [["gates"], drawGates],
};

function draw(changed) {
  for (const [needs, render] of Object.values(SECTIONS)) {
    if (!changed || needs.some((name) => changed.includes(name))) render();
  }
}

function setLink(words, color) {
  const link = document.getElementById("link");
  link.textContent = words;
  link.style.setProperty("--dot", `var(--${color})`);
}

function follow() {
  const source = new EventSource("/v1/monitor/events");
  source.onmessage = (event) => {
    const changed = JSON.parse(event.data);
    state = { ...state, ...changed };
    setLink("live", "good");
    draw(Object.keys(changed));
  };
  source.onerror = () => setLink("connection lost, reconnecting", "bad");
}

if (EMBEDDED) {
  state = EMBEDDED;
  setLink(`report of ${new Date(state.run.now * 1000).toLocaleString("en-GB")}`, "c6");
} else {
  setLink("connecting", "c6");
  follow();
}
draw();
route();
let resizing;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => draw(), 120); });
