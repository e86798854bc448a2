// The curves of a what-if beside the run's own. No data ever becomes markup.
const both = [["original", "the run", 1], ["what_if", "what if", 2]];
const small = (v) => (v !== 0 && Math.abs(v) < 0.001 ? v.toExponential(1) : Number(v.toPrecision(3)).toString());
const percent = (v) => `${(100 * v).toFixed(1)}%`;
const byId = (id) => document.getElementById(id);

function card(id, note, graph) {
  const section = byId(id);
  section.append(html("p", "sub", note), graph ?? html("p", "muted", "Nothing was measured."));
}

function tile(name, value, note) {
  return html("div", "tile", html("div", "name", name), html("div", "value", value), html("div", "note", note));
}

function curves(id, note, options = {}) {
  const series = both.map(([name, label, color]) => ({
    name: label, color, points: answer.steps[name].filter((s) => id in s).map((s) => [s.step, s[id]]),
  }));
  if (!series.some((s) => s.points.length)) return byId(id).remove();
  const graph = chart(byId(id).clientWidth - 30, { x: { label: "step" }, y: { format: small }, ...options, series });
  card(id, note, graph);
}

function main() {
  const { steps, heldout, ended } = answer;
  byId("run-id").textContent = answer.run_id;
  byId("given").textContent = answer.what_if.join("  ");
  const stall = byId("stall");
  stall.textContent = ended ? `Ended ${ended}.` : "The log has an answer to its end. Tasks, rollouts and batches are the run's.";
  if (answer.first_difference) stall.append(` The log does not follow from itself: ${answer.first_difference}.`);
  stall.classList.add(ended ? "bad" : "good");
  const last = (name) => heldout[name].filter((e) => e.is_main).at(-1);
  const rate = (found) => [found ? percent(found.pass_rate) : "–", found ? `version ${found.version}, ${found.num_solved} of ${found.num_tasks}` : "not evaluated"];
  const lowest = steps.what_if.length ? Math.min(...steps.what_if.map((s) => s.ess)) : 1;
  byId("tiles").append(
    tile("Held-out, the run", ...rate(last("original"))),
    tile("Held-out, what if", ...rate(last("what_if"))),
    tile("Steps", `${steps.what_if.length}`, `of ${steps.original.length}`),
    tile("Lowest ESS", small(lowest), `ends below ${answer.ess_min}`),
  );
  const points = (name) => heldout[name].filter((e) => e.is_main).map((e) => [e.version, e.pass_rate]);
  card("heldout", "On the run's held-out tasks, by version", chart(byId("heldout").clientWidth - 30, {
    x: { label: "version" }, y: { format: (v) => v.toFixed(2), min: 0, max: 1 },
    series: both.map(([name, label, color]) => ({ name: label, color, kind: "dots", joined: true, points: points(name) })),
  }));
  curves("ess", "Of the ratios to the policy that sampled, before any correction", {
    y: { format: (v) => v.toFixed(2), min: 0, max: 1.05 }, marks: [{ y: answer.ess_min, name: "ends below" }],
  });
  curves("kl_behavior", "Mean of r - 1 - log r over a step's tokens, nats");
  curves("loss", "Of different objectives the values cannot be compared");
  curves("grad_norm", "Before clipping");
  curves("entropy", "Nats per token");
  curves("kl_reference", "k1, nats per token");
}

main();
