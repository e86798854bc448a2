// Training tasks by source, evaluations by set, and judges in addition to tests.
function drawTasks() {
  const { num_groups, num_fresh, num_revisits, num_skipped, sources, sets, num_eval_attempts, eval_s } = state.tasks;
  const rows = Object.entries(sources).map(([name, source]) => [name || "tasks", integer(source.num_groups), integer(source.num_judged), source.num_judged ? percent(source.num_solved / source.num_judged) : "–"]);
  const left = num_fresh ? `${integer(num_fresh)} tasks have not been tried yet` : "Every task was tried; groups revisit tasks with an uncertain solve rate";
  const words = num_groups ? `${left}; ${percent(num_revisits / num_groups)} of groups revisit a task, ${integer(num_skipped)} tasks are skipped.` : "";
  fill("sources", note(words), rows.length ? table(["source", "groups", "rollouts", "pass rate"], rows, [1, 2, 3]) : empty("No group has been granted yet."));
  const newest = Object.entries(sets).filter(([, points]) => points.length).map(([name, points]) => [name || "held out", points[0], points[points.length - 1]]);
  const between = ([low, high], words = percent) => `[${words(low)}, ${words(high)}]`;
  const signed = (share) => (share < 0 ? "−" : "+") + percent(Math.abs(share));
  const against = ({ policy_version, difference, num_better, num_worse, p_value }) =>
    `${signed(difference.value)} ${between([difference.low, difference.high], signed)} against v${policy_version}: ${num_better} tasks better, ${num_worse} worse, p ${p_value.toPrecision(2)}`;
  const evals = newest.map(([name, first, last]) => [
    name, `${integer(last.num_tasks)}`, percent(passRate(first)), percent(passRate(last)),
    Object.entries(last.pass_at_k).map(([k, value]) => `@${k} ${percent(value)} ${k in last.intervals ? between(last.intervals[k]) : ""}`).join("  "),
  ]);
  // Below the table: a card is too narrow for one more column.
  const compared = newest.filter(([, , last]) => last.comparison).map(([name, , last]) => note(`${name}: ${against(last.comparison)}.`));
  const [main] = newest.filter(([, first]) => Object.keys(first.by_category).length);
  const categories = main && Object.keys(main[2].by_category).map((name) => [name, ...main.slice(1).map((point) => (name in point.by_category ? percent(point.by_category[name]) : "–"))]);
  fill("sets", ...(evals.length ? [
    table(["set", "attempts", "first", "newest", "pass@k, 95% interval"], evals, [1, 2, 3], { optional: [1] }),
    ...compared,
    categories && table([`category, ${main[0]}`, "first", "newest"], categories, [1, 2]),
    note(`Cost of all evaluations, in parallel with training: ${integer(num_eval_attempts)} attempts, ${seconds(eval_s)}.`),
  ] : [empty("Nothing has been evaluated yet.")]));
}

// The card is hidden in runs whose only judge is the tests.
function drawJudges() {
  const judges = Object.entries(state.judges).sort();
  document.getElementById("judges").hidden = !judges.length;
  const mean = (sum, judge) => judge.num_scored ? (sum / judge.num_scored).toFixed(3) : "–";
  const rows = judges.map(([name, judge]) => [
    name, integer(judge.num_scored), mean(judge.score_sum, judge), mean(judge.disagreement_sum, judge), integer(judge.num_failed), integer(judge.num_prompt_tokens + judge.num_reply_tokens),
    html("span", judge.is_failing ? "bad-text" : "muted", judge.is_failing ? `not scoring: ${judge.note}` : judge.note || "–"),
  ]);
  const head = ["judge/criterion", "scored", "mean", "disagreement", "failed", "tokens", "note"];
  fill("judges", note("Scores of training rollouts, from 0 to 1, and the mean disagreement of repeats"), table(head, rows, [1, 2, 3, 4, 5], { long: 6, optional: [3, 5] }));
}
