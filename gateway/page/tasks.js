// Where training tasks come from and how they go; the sets of evaluations; judges beside the tests.
function drawTasks() {
  const { num_groups, num_fresh, num_revisits, num_skipped, sources, sets, num_eval_attempts, eval_s } = state.tasks;
  const rows = Object.entries(sources).map(([name, of]) => [name || "tasks", integer(of.num_groups), integer(of.num_judged), of.num_judged ? percent(of.num_solved / of.num_judged) : "–"]);
  const left = num_fresh ? `${integer(num_fresh)} tasks are fresh` : "Every task was attempted; groups revisit those whose solve rate is uncertain";
  const words = num_groups ? `${left}; ${percent(num_revisits / num_groups)} of the groups revisit one, ${integer(num_skipped)} are skipped.` : "";
  fill("sources", note(words), rows.length ? table(["source", "groups", "rollouts", "pass rate"], rows, [1, 2, 3]) : empty("No group has been granted yet."));
  const newest = Object.entries(sets).filter(([, points]) => points.length).map(([name, points]) => [name || "held out", points[0], points[points.length - 1]]);
  const evals = newest.map(([name, first, last]) => [
    name, `${integer(last.num_tasks)}`, percent(passRate(first)), percent(passRate(last)),
    Object.entries(last.pass_at_k).filter(([k]) => k !== "1").map(([k, value]) => `@${k} ${percent(value)}`).join(" "),
  ]);
  const [main] = newest.filter(([, first]) => Object.keys(first.by_category).length);
  const categories = main && Object.keys(main[2].by_category).map((name) => [name, ...main.slice(1).map((point) => (name in point.by_category ? percent(point.by_category[name]) : "–"))]);
  fill("sets", ...(evals.length ? [
    table(["set", "attempts", "first", "newest", "pass@k"], evals, [1, 2, 3], { optional: [1] }),
    categories && table([`category, ${main[0]}`, "first", "newest"], categories, [1, 2]),
    note(`Cost of all evaluations: ${integer(num_eval_attempts)} attempts, ${seconds(eval_s)}, beside training.`),
  ] : [empty("Nothing has been evaluated yet.")]));
}

// Judges beside the tests; a run without any has no such card.
function drawJudges() {
  const judges = Object.entries(state.judges).sort();
  document.getElementById("judges").hidden = !judges.length;
  const mean = (sum, one) => one.num_scored ? (sum / one.num_scored).toFixed(3) : "–";
  const rows = judges.map(([name, one]) => [
    name, integer(one.num_scored), mean(one.score_sum, one), mean(one.disagreement_sum, one), integer(one.num_failed), integer(one.num_prompt_tokens + one.num_reply_tokens),
    html("span", one.is_failing ? "bad-text" : "muted", one.is_failing ? `not scoring: ${one.note}` : one.note || "–"),
  ]);
  const head = ["judge/criterion", "scored", "mean", "disagreement", "failed", "tokens", "note"];
  fill("judges", note("Scores of training rollouts, from 0 to 1, and how far repeats disagreed"), table(head, rows, [1, 2, 3, 4, 5], { long: 6, optional: [3, 5] }));
}
