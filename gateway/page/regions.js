// Weight distribution by region: size, lag and swap pause of every version.
const ofRegions = (value) => Object.entries(state.regions).map(([name, r], i) => ({
  name, color: (i % 6) + 1, points: r.deltas.filter((d) => d.kind !== "full" && value(d) > 0).map((d) => [d.policy_version, value(d)]),
}));

function drawDeltas() {
  const regions = Object.entries(state.regions);
  const graph = chart(widthOf("deltas"), {
    height: 280, x: { label: "policy version" }, y: { format: bytes, log: true },
    series: regions.map(([name, r], i) => ({ name, color: (i % 6) + 1, points: r.deltas.filter((d) => d.num_bytes > 0).map((d) => [d.policy_version, d.num_bytes]) })),
  });
  const head = ["region", "serves", "behind head", "received", "last delta", "ratio, median", "swap pause, median", "full uploads after v0", "digests"];
  const rows = regions.map(([name, r]) => {
    const deltas = r.deltas.filter((d) => d.kind !== "full" && d.num_bytes > 0);
    const last = deltas[deltas.length - 1];
    const ratios = deltas.filter((d) => d.changed_fraction > 0).map((d) => d.full_bytes / d.num_bytes);
    const lost = state.run.phase === "finished" ? [] : r.lost; // All replicas stop with the run.
    const held = Object.entries(r.replicas).filter(([replica]) => !lost.includes(replica)).map(([, v]) => v);
    const versions = [...new Set(held)].sort((a, b) => a - b).map((v) => `v${v}`);
    const served = [...(held.length > 1 ? [`${held.length} replicas`] : []), ...versions, ...(lost.length ? [`${lost.length} lost`] : [])].join(", ");
    const bad = r.num_digest_mismatches;
    const behind = r.lag_versions ? `${integer(r.lag_versions)} versions, ${duration(r.lag_s)}` : "0";
    return [
      name, served || "–", behind, bytes(r.num_bytes), last ? bytes(last.num_bytes) : "–",
      ratios.length ? `${trim(median(ratios))}× smaller` : deltas.length ? "nothing changed" : "–",
      deltas.length ? milliseconds(median(deltas.map((d) => d.pause_ms))) : "–", integer(r.num_full_after_v0),
      html("span", bad ? "bad-text" : "good-text", bad ? `${bad} wrong` : "all correct"),
    ];
  });
  fill("deltas", note("Bytes sent per version, logarithmic scale"), graph ?? empty("No version has reached a region yet."), rows.length ? table(head, rows, [1, 2, 3, 4, 5, 6, 7], { optional: [3, 7] }) : null);
}

function drawLag() {
  const half = { height: 170, x: { label: "policy version" } };
  const lag = chart(widthOf("lag"), { ...half, y: { format: seconds, min: 0 }, series: ofRegions((d) => d.lag_s) });
  const pause = chart(widthOf("lag"), { ...half, y: { format: milliseconds, min: 0 }, series: ofRegions((d) => d.pause_ms) });
  fill("lag", note("Time from publication until the slowest replica of the region serves the version"), lag ?? empty("No replica has been updated yet."),
    pause && note("Pause of generation while weights are swapped"), pause);
}

