// The training objective: mismatch of trainer and sampler, loss, entropy and KL.

function drawMismatch() {
  const graph = chart(widthOf("mismatch"), {
    x: { label: "step" }, y: { format: small },
    series: [
      { name: "k1", color: 1, points: metric("mismatch_k1") }, { name: "k3", color: 2, points: metric("mismatch_k3") },
      { name: "k3, engine", color: 3, points: metric("mismatch_engine_k3") },
      { name: "k3, staleness", color: 4, points: metric("mismatch_staleness_k3") },
    ],
  });
  fill("mismatch", note("KL of trainer and sampler, nats per token; 0 is exact. Engine: within one version; staleness: between versions"), graph ?? empty("No step has been taken yet."));
}

function drawEss() {
  const ess = metric("ess"), masked = metric("masked_fraction"), clipped = metric("clipped_fraction");
  const graph = chart(widthOf("ess"), {
    x: { label: "step" }, y: { format: percent, min: 0, max: 1 }, marks: [{ y: 0.3, name: "alarm 30%" }],
    series: [
      { name: "ESS / batch", color: 1, points: ess }, { name: "ratios only", color: 3, points: metric("ratio_ess") },
      { name: "tokens masked", color: 2, points: masked }, { name: "tokens clipped", color: 4, points: clipped },
    ],
  });
  fill("ess", note("Effective sample size of the importance weights; a low value means off-policy data"), ess.length ? graph : empty("No step has been taken yet."));
}

function drawLoss() {
  const graph = chart(widthOf("loss"), {
    height: 150, x: { label: "step" }, y: { format: small },
    series: [{ name: "loss", color: 1, points: metric("loss") }, { name: "gradient norm", color: 4, points: metric("grad_norm") }],
  });
  fill("loss", graph ?? empty("No step has been taken yet."));
}

function drawExploration() {
  const graph = chart(widthOf("exploration"), {
    height: 150, x: { label: "step" }, y: { format: small, min: 0 },
    series: [{ name: "entropy", color: 1, points: metric("entropy") }, { name: "KL to version 0", color: 2, points: metric("kl_reference") }],
  });
  fill("exploration", note("Nats per sampled token"), graph ?? empty("No step has been taken yet."));
}
