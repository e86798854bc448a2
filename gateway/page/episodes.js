// Episodes: the list with its filters, and single episodes turn by turn. Models wrote most of this
// text, so it is only ever set as text, never as markup.
const ROWS_SHOWN = 300, ROWS_MAX = 5000; // messages/requests/episodes.py
const FACTS = [["outcome", "outcome"], ["purpose", "purpose"], ["category", "category"], ["fate", "fate"]];
const episodes = { rows: null, views: null, shown: ROWS_SHOWN, filter: { text: "" }, coloring: "logprob", list: null, labeler: "operator", key: "", shownEpisode: null };
const TRAINED = ["solved", "failed", "policy_error", "timeout"]; // Outcome.is_trained
const fateOf = (row) => TRAINED.includes(row.fate) ? "trained" : words(row.fate ?? "");
const factOf = (row, key) => key === "fate" ? fateOf(row) : row[key] ?? "";
const words = (v) => String(v ?? "").replaceAll("_", " ");

async function unpack(name) {
  const encoded = document.querySelector(`script[data-name="${name}"]`).textContent;
  const packed = Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function getJson(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error?.message ?? `status ${response.status}`);
  return response.json();
}

// Rows and single episodes come from the report itself if this is one, else from the gateway.
async function loadRows() {
  if (!EMBEDDED) episodes.rows = await getJson("/v1/monitor/episodes");
  else episodes.rows ??= await unpack("rows");
}

async function loadEpisode(id) {
  if (!EMBEDDED) return getJson(`/v1/monitor/episodes/${encodeURIComponent(id)}`);
  await loadRows();
  episodes.views ??= await unpack("views");
  const view = episodes.views[id];
  if (!view) throw new Error("the report does not include this episode; `penstock show` prints it");
  const row = episodes.rows.find((candidate) => candidate.rollout_id === id);
  const group = episodes.rows.filter((other) => other.group_id === row.group_id && other.task_id === row.task_id).sort((a, b) => a.rollout_id.localeCompare(b.rollout_id));
  return { ...view, row, group };
}

function keeps(row) {
  const { text, ...exact } = episodes.filter;
  const ids = `${row.rollout_id} ${row.group_id ?? ""} ${row.task_id ?? ""} ${row.step ? `step ${row.step}` : ""}`.toLowerCase();
  return ids.includes(text.toLowerCase()) && Object.entries(exact).every(([key, value]) => !value || factOf(row, key) === value);
}

function rowCells(row) {
  const link = html("a", "", row.rollout_id);
  link.href = `#episode/${encodeURIComponent(row.rollout_id)}`;
  const outcome = html("span", row.outcome === "solved" ? "good-text" : row.outcome ? "" : "muted", words(row.outcome ?? "–"));
  return [link, row.task_id ?? "", words(row.end ?? "running"), outcome, row.reward === undefined ? "–" : row.reward.toFixed(2), integer(row.num_turns), integer(row.num_tokens),
    row.step ? `${row.step}` : "–", fateOf(row), row.advantage ? row.advantage.toFixed(2) : "", row.label === undefined ? "" : row.label.toFixed(2)];
}

const episodeTable = (rows) => table(["episode", "task", "end", "outcome", "reward", "turns", "tokens", "step", "fate", "advantage", "label"], rows.map(rowCells), [4, 5, 6, 7, 9, 10], { optional: [1, 2, 6, 7, 8, 9, 10] });

function drawRows() {
  const kept = episodes.rows.filter(keeps);
  const more = html("button", "", `Show more of ${integer(kept.length)}`);
  more.onclick = () => { episodes.shown += 1000; drawRows(); };
  const count = html("p", "sub", `${integer(kept.length)} of ${episodes.rows.length < ROWS_MAX ? "" : "the newest "}${integer(episodes.rows.length)} episodes, newest first`);
  episodes.list.replaceChildren(count, kept.length ? episodeTable(kept.slice(0, episodes.shown)) : empty("No episode matches the filter."), kept.length > episodes.shown ? more : "");
}

function choice(key, label) {
  const select = html("select");
  const values = [...new Set(episodes.rows.map((row) => factOf(row, key)))].filter(Boolean).sort();
  for (const value of ["", ...values]) {
    const option = html("option", "", value ? words(value) : `any ${label}`);
    option.value = value;
    select.append(option);
  }
  select.value = episodes.filter[key] ?? "";
  select.setAttribute("aria-label", label);
  select.onchange = () => { episodes.filter[key] = select.value; episodes.shown = ROWS_SHOWN; drawRows(); };
  return select;
}

async function showList(place) {
  await loadRows();
  const search = html("input");
  Object.assign(search, { type: "search", placeholder: "episode, group, task or step", value: episodes.filter.text });
  search.oninput = () => { episodes.filter.text = search.value; episodes.shown = ROWS_SHOWN; drawRows(); };
  const bar = html("div", "filters", search, ...FACTS.map(([key, label]) => choice(key, label)));
  episodes.list = html("div");
  place.replaceChildren(html("section", "card", html("h2", "", "Episodes"), bar, episodes.list));
  drawRows();
}

// Colors a token by how unlikely it was, by the version that sampled it, or by its advantage.
function shade(turn, i, advantage) {
  if (episodes.coloring === "logprob") return ["var(--c2)", Math.min(0.85, -turn.logprobs[i] / 4)];
  if (episodes.coloring === "advantage") return [advantage > 0 ? "var(--c3)" : "var(--bad)", Math.min(0.6, Math.abs(advantage) / 3)];
  const first = turn.version_spans[0]?.policy_version ?? 0;
  return [`var(--c${1 + ((versionOf(turn, i) - first) % 5 + 5) % 5})`, 0.3];
}

function versionOf(turn, i) {
  let end = 0;
  for (const span of turn.version_spans) if (i < (end += span.num_tokens)) return span.policy_version;
  return -1;
}

function drawTokens(turn, advantage) {
  const line = html("pre", "tokens");
  (turn.pieces ?? []).forEach((piece, i) => {
    const token = html("span", "", piece);
    const [color, share] = shade(turn, i, advantage);
    token.style.background = `color-mix(in srgb, ${color} ${Math.round(share * 100)}%, transparent)`;
    token.title = `logprob ${turn.logprobs[i].toFixed(3)} · version ${versionOf(turn, i)}`;
    line.append(token);
  });
  return line;
}

function drawTurn(turn, row) {
  const versions = (turn.version_spans ?? []).map((span) => span.policy_version).join(", ");
  const marks = [`turn ${turn.index}`, versions && `version ${versions}`, turn.starts_segment && "new segment", turn.is_summary && "summary",
    turn.is_withheld && "withheld", turn.stop_reason && turn.stop_reason !== "stop" && words(turn.stop_reason)].filter(Boolean);
  const parts = [html("p", "sub", marks.join(" · "))];
  if (turn.missing) parts.push(html("p", "sub warn-text", turn.missing));
  if (turn.context) parts.push(html("pre", "context", turn.context));
  if (turn.pieces?.length) parts.push(drawTokens(turn, row.advantage ?? 0));
  if (turn.parse_error) parts.push(html("p", "sub bad-text", `not parsed: ${turn.parse_error}`));
  return html("div", "turn", ...parts);
}

function drawDiff(diff) {
  const block = html("pre", "diff");
  for (const line of diff.split("\n")) block.append(html("span", { "+": "added", "-": "removed", "@": "place" }[line[0]] ?? "", `${line}\n`));
  return block;
}

function drawVerdict(verdict) {
  const list = html("dl");
  const pair = (name, value) => list.append(html("dt", "", name), html("dd", "", value));
  pair("judge", words(verdict.judge));
  pair("outcome", words(verdict.outcome));
  pair("reward", verdict.reward.toFixed(3));
  for (const [name, value] of Object.entries(verdict.components ?? {})) pair(words(name), value.toFixed(3));
  if (verdict.num_tests) pair("hidden tests", `${verdict.num_tests_passed ?? 0} of ${verdict.num_tests} pass`);
  for (const score of verdict.scores ?? []) pair(`${score.judge} ${score.criterion ?? ""}`, score.score === undefined ? "no reply" : score.score.toFixed(2));
  const findings = (verdict.findings ?? []).map((finding) => html("p", `sub ${finding.is_decisive ? "bad-text" : "warn-text"}`, `${words(finding.kind)} at ${finding.where}: ${finding.detail}`));
  return html("section", "card", html("h2", "", "Verdict"), list, ...findings, verdict.detail ? html("pre", "context", verdict.detail) : null);
}

// Labels that people gave the episode. A report is read-only, so it has no form.
function drawLabels(place, episode) {
  const labels = (episode.labels ?? []).map((label) => html("p", "label", html("b", "", html("bdi", "", label.labeler), ` · ${label.value.toFixed(2)}`), label.comment ? html("pre", "context", label.comment) : null));
  const card = html("section", "card", html("h2", "", "Labels"), ...(labels.length ? labels : [empty("There are no labels yet.")]));
  if (!EMBEDDED) card.append(labelForm(place, episode.row.rollout_id));
  return card;
}

function field(tag, label, settings) {
  const input = html(tag);
  Object.assign(input, settings);
  input.setAttribute("aria-label", label);
  input.placeholder = label;
  return input;
}

function labelForm(place, id) {
  const value = field("input", "score, 0 to 1", { type: "number", min: 0, max: 1, step: 0.01, required: true });
  const labeler = field("input", "your name", { value: episodes.labeler, maxLength: 64, required: true });
  const comment = field("textarea", "why (up to 2000 characters)", { maxLength: 2000, rows: 2 });
  const key = field("input", "operator key (runs/<id>/gateway_key)", { type: "password", value: episodes.key, autocomplete: "off" });
  const result = html("p", "sub");
  const preset = (text, score) => {
    const button = html("button", "", text);
    button.type = "button";
    button.onclick = () => { value.value = score; };
    return button;
  };
  const form = html("form", "labeling", html("div", "filters", preset("Good", 1), preset("Bad", 0), value, labeler), comment, html("div", "filters", key, html("button", "", "Label")), result);
  form.onsubmit = async (event) => {
    event.preventDefault();
    episodes.labeler = labeler.value;
    episodes.key = key.value;
    const headers = { "Content-Type": "application/json" };
    if (key.value) headers.Authorization = `Bearer ${key.value.trim()}`;
    const body = JSON.stringify({ value: Number(value.value), labeler: labeler.value, comment: comment.value });
    try {
      const response = await fetch(`/v1/monitor/episodes/${encodeURIComponent(id)}/labels`, { method: "POST", headers, body });
      if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error?.message ?? `status ${response.status}`);
      // The label comes back by way of the log: ask for up to 5 s, unless another episode is opened.
      const before = episodes.shownEpisode;
      for (let i = 0; i < 20 && before === episodes.shownEpisode; i++) {
        const found = await loadEpisode(id);
        if ((found.labels ?? []).some((label) => label.labeler === labeler.value && (label.comment ?? "") === comment.value && label.value === Number(value.value))) return drawEpisode(place, found);
        await new Promise((resolve) => setTimeout(resolve, 250));
      }
      result.textContent = "Stored, but not visible yet.";
    } catch (error) {
      result.textContent = error.message;
    }
  };
  return form;
}

async function compareGroup(place, rows) {
  place.replaceChildren(empty("Loading the group …"));
  const found = await Promise.allSettled(rows.map((row) => loadEpisode(row.rollout_id)));
  const columns = found.map((result, i) => {
    const head = html("p", "sub", `${rows[i].rollout_id} · ${words(rows[i].outcome ?? "–")} · ${rows[i].reward?.toFixed(2) ?? "–"}`);
    if (result.status === "rejected") return html("div", "side", head, empty(result.reason.message));
    const turns = result.value.turns ?? [];
    return html("div", "side", head, ...turns.map((turn) => (turn.missing ? html("p", "sub", turn.missing) : drawTokens(turn, rows[i].advantage ?? 0))));
  });
  place.replaceChildren(html("div", "sides", ...columns));
}

function drawEpisode(place, episode) {
  const { row } = episode;
  episodes.shownEpisode = episode;
  const back = html("a", "", "All episodes");
  back.href = "#episodes";
  const facts = [`task ${row.task_id} (${row.category ?? ""})`, row.purpose ?? "train", `group ${row.group_id}`, `ended: ${words(row.end)}`, `${integer(row.num_turns)} turns`,
    `${integer(row.num_tokens)} tokens`, seconds(row.wall_s ?? 0), row.step ? `step ${row.step}: ${fateOf(row)}, advantage ${(row.advantage ?? 0).toFixed(3)}` : "not trained in any step"];
  const coloring = html("select");
  for (const [value, label] of [["logprob", "color: unlikely tokens"], ["version", "color: policy version"], ["advantage", "color: advantage"]]) {
    const option = html("option", "", label);
    option.value = value;
    coloring.append(option);
  }
  coloring.value = episodes.coloring;
  coloring.onchange = () => { episodes.coloring = coloring.value; drawEpisode(place, episode); };
  const turns = html("section", "card", html("div", "filters", html("h2", "", "Turns"), coloring), ...(episode.turns ?? []).map((turn) => drawTurn(turn, row)));
  const sides = html("div");
  const compare = html("button", "", "Side by side");
  compare.onclick = () => compareGroup(sides, episode.group);
  const group = episode.group ?? [];
  const right = html("div", "column",
    episode.verdict ? drawVerdict(episode.verdict) : html("section", "card", html("h2", "", "Verdict"), empty("There is no verdict.")),
    html("section", "card", html("h2", "", "Changes"), episode.files_missing ? empty(episode.files_missing) : episode.diff ? drawDiff(episode.diff) : empty("No file was changed.")),
    drawLabels(place, episode),
  );
  place.replaceChildren(
    html("section", "card", html("h2", "", row.rollout_id), html("p", "sub", facts.join(" · ")), episode.instruction ? html("pre", "context", episode.instruction) : null, episode.error ? html("p", "bad-text", episode.error) : null, back),
    html("div", "episode", turns, right),
    html("section", "card", html("div", "filters", html("h2", "", "Episodes of the group"), group.length > 1 ? compare : null), episodeTable(group), sides),
  );
}

async function route() {
  const place = document.getElementById("episodes");
  const [name, id] = location.hash.slice(1).split("/");
  const isEpisodes = name === "episodes" || name === "episode";
  const overview = document.getElementById("overview"), wasHidden = overview.hidden;
  overview.hidden = isEpisodes;
  place.hidden = !isEpisodes;
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("here", (link.hash === "#episodes") === isEpisodes);
  if (!isEpisodes) { if (wasHidden) draw(); return; }
  place.replaceChildren(empty("Loading …"));
  try {
    if (name === "episode") drawEpisode(place, await loadEpisode(decodeURIComponent(id)));
    else await showList(place);
  } catch (error) {
    place.replaceChildren(empty(error.message));
  }
  scrollTo(0, 0);
}
addEventListener("hashchange", route);
