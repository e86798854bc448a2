// Release of versions to users: channels, the candidate with its gates, and the arms of its test.
const TONES = { passed: "good-text", waiting: "warn-text", failed: "bad-text", rejected: "bad-text" };
const PHASES = { offline: "before any user", arms: "split between users", rolled_back: "rolled back" };
const four = (v) => v.toFixed(4);
const signed = (v) => `${v < 0 ? "−" : "+"}${Math.abs(v).toFixed(4)}`;

function drawGates() {
  const { channels, candidate, decided } = state.gates;
  const points = Object.entries(channels).sort().map(([name, version]) => `${name} serves version ${version}`).join(", ");
  document.getElementById("gates").style.display = points || candidate ? "" : "none";
  fill("gates", note(points || "No channel has been moved yet."), ...(candidate ? candidateOf(candidate) : [empty("No version has been a candidate yet.")]), decided.length ? decidedOf(decided) : null);
}

function candidateOf(view) {
  const head = html("p", "", html("strong", "", `Version ${view.policy_version}`), ` against ${view.stable_version}: ${PHASES[view.phase] ?? view.phase}`,
    view.share ? `, ${percent(view.share)} of users on the candidate` : "");
  const blocked = view.blocked_by ? html("p", "warn-text", `Promotion is blocked by ${view.blocked_by}`) : null;
  const gates = table(["gate", "state", "stable", "candidate", "found / expected"],
    view.gates.map((gate) => [gate.name.replaceAll("_", " "), html("span", TONES[gate.state], gate.state), trim(gate.baseline ?? 0), trim(gate.value ?? 0), gate.words]),
    [2, 3], { long: 4 });
  if (!view.arms.length) return [head, blocked, view.gates.length ? gates : null];
  const arms = table(["arm", "version", "users", "sessions", "reward", "IPS", "SNIPS", "doubly robust"],
    view.arms.map((arm) => [arm.arm, integer(arm.policy_version), integer(arm.num_users), integer(arm.num_sessions), ...[arm.reward_mean, arm.ips, arm.snips, arm.doubly_robust].map(four)]),
    [1, 2, 3, 4, 5, 6, 7], { optional: [5, 6] });
  const wait = view.seconds_missing < 0 ? "there is no traffic yet" : `${view.seconds_missing > 172800 ? `${trim(view.seconds_missing / 86400)} days` : duration(view.seconds_missing)} at the current traffic`;
  const test = note(`Difference ${signed(view.difference)}, anytime-valid interval ${signed(view.difference_low)} to ${signed(view.difference_high)}; e-values: better ${trim(view.evidence_better)}, worse ${trim(view.evidence_worse)}`);
  const missing = note(view.num_sessions_missing ? `Detecting the stated effect takes ${integer(view.num_sessions_missing)} more rated sessions per arm: ${wait}` : "There are enough sessions to detect the stated effect.");
  return [head, blocked, arms, test, missing, gates];
}

function decidedOf(decided) {
  const rows = decided.slice(-6).reverse().map((past) => [clock(past.at), `${past.policy_version}`, `${past.stable_version}`, PHASES[past.decision] ?? past.decision, past.reason]);
  return table(["decided", "version", "against", "decision", "reason"], rows, [1, 2], { long: 4 });
}
