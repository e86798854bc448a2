// Small SVG charts. Functions create elements and set text: data never becomes markup, so that no
// string of a run can inject a script.
const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, className = "", ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// Returns about `count` round tick values within low..high.
function ticks(low, high, count = 5) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

function powers(low, high) {
  const found = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) found.push(10 ** p);
  return found;
}

function extent(values, fallback) {
  const finite = values.filter((v) => Number.isFinite(v));
  return finite.length ? [Math.min(...finite), Math.max(...finite)] : fallback;
}

// Returns a function from a value to its position on low..high, 0..1, linear or logarithmic.
function scale(low, high, log) {
  const f = log ? Math.log10 : (v) => v;
  const a = f(low), b = f(high);
  return (v) => (b === a ? 0.5 : (f(v) - a) / (b - a));
}

function legend(series) {
  const entries = series.map((s, i) => {
    const color = `var(--c${s.color})`;
    const mark = s.kind === "dots"
      ? svg("circle", { cx: 10, cy: 4, r: 4, fill: color })
      : s.kind === "bars" ? svg("rect", { x: 5, y: 0, width: 10, height: 8, fill: color })
      : svg("line", { x1: 0, x2: 20, y1: 4, y2: 4, stroke: color, "stroke-width": s.thin ? 1.25 : 2.5, opacity: s.thin ? 0.55 : 1, "stroke-dasharray": s.dash ?? DASHES[i] ?? "" });
    return html("span", "", svg("svg", { viewBox: "0 0 20 8", "aria-hidden": "true" }, mark), s.name);
  });
  return html("div", "legend", ...entries);
}

// options: series [{name, color 1..6, kind line|dots|bars, points [[x, y]]}], x and y {label, format,
// min, max, log}, marks [{y, name}], height, stacked. Returns an element, or null if no series has
// points.
function chart(width, options) {
  const all = options.series.flatMap((s) => s.points);
  if (!all.length) return null;
  const box = frame(width, options, all);
  const root = svg("svg", { viewBox: `0 0 ${box.width} ${box.height}`, role: "img", "aria-label": summary(options) });
  drawAxes(root, box, options);
  if (options.series.some((s) => s.kind === "bars")) drawBars(root, box, options);
  options.series.forEach((s, i) => {
    if (s.kind === "dots") drawDots(root, box, s);
    else if (s.kind !== "bars") drawLine(root, box, s, i);
  });
  const holder = html("div", "chart", root);
  addTip(holder, root, box, options);
  return html("div", "", options.series.length > 1 ? legend(options.series) : null, holder);
}

function frame(width, options, all) {
  const { x = {}, y = {} } = options;
  const bars = options.series.some((s) => s.kind === "bars");
  let [x0, x1] = extent(all.map((p) => p[0]), [0, 1]);
  if (bars) { x0 -= 0.5; x1 += 0.5; }
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  const tops = options.stacked ? stackTops(options.series) : all.map((p) => p[1]);
  let [y0, y1] = extent([...tops, ...(options.marks ?? []).map((m) => m.y)], [0, 1]);
  y0 = y.min ?? (y.log ? y0 : Math.min(y0, y0 - (y1 - y0) * 0.05));
  y1 = y.max ?? (y.log ? y1 : y1 + (y1 - y0) * 0.06);
  if (y.log) { y0 = 10 ** Math.floor(Math.log10(y0)); y1 = 10 ** Math.ceil(Math.log10(y1)); }
  if (y0 >= y1) y1 = y0 + (Math.abs(y0) || 1);
  const format = y.format ?? String;
  const marks = y.log ? powers(y0, y1) : ticks(y0, y1);
  const left = 10 + 6.3 * Math.max(...marks.map((t) => format(t).length));
  const height = options.height ?? 190, right = 10, top = 8, bottom = 32;
  const sx = scale(x0, x1, false), sy = scale(y0, y1, y.log);
  return {
    width, height, left, right, top, bottom, x0, x1, marks, format,
    px: (v) => left + sx(v) * (width - left - right),
    py: (v) => height - bottom - sy(v) * (height - top - bottom),
  };
}

function stackTops(series) {
  const sums = new Map([[null, 0]]);
  for (const s of series) for (const [x, y] of s.points) sums.set(x, (sums.get(x) ?? 0) + y);
  return [...sums.values()];
}

function drawAxes(root, box, options) {
  const { left, right, width, height, bottom } = box;
  for (const value of box.marks) {
    const y = box.py(value);
    root.append(svg("line", { x1: left, x2: width - right, y1: y, y2: y, stroke: "var(--grid)" }));
    root.append(text(left - 6, y + 3.5, box.format(value), "end"));
  }
  const format = options.x?.format ?? String;
  const whole = options.x?.whole ?? true;
  for (const value of ticks(box.x0, box.x1, Math.max(2, Math.floor(width / 90)))) {
    if (whole && !Number.isInteger(value)) continue;
    root.append(text(box.px(value), height - bottom + 15, format(value), "middle"));
  }
  root.append(svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, stroke: "var(--line)" }));
  if (options.x?.label) root.append(text((left + width - right) / 2, height - 3, options.x.label, "middle"));
  for (const mark of options.marks ?? []) {
    const y = box.py(mark.y);
    root.append(svg("line", { x1: left, x2: width - right, y1: y, y2: y, stroke: "var(--bad)", "stroke-dasharray": "3 3" }));
    root.append(text(width - right, y - 4, mark.name, "end"));
  }
}

function text(x, y, content, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, document.createTextNode(content));
}

function drawLine(root, box, series, index) {
  const points = series.points.filter((p) => Number.isFinite(p[1]));
  const path = points.map((p, i) => `${i ? "L" : "M"}${box.px(p[0]).toFixed(1)} ${box.py(p[1]).toFixed(1)}`).join("");
  const color = `var(--c${series.color})`;
  root.append(svg("path", {
    d: path, fill: "none", stroke: color, "stroke-width": series.thin ? 1.25 : 2, "stroke-linejoin": "round",
    "stroke-dasharray": series.dash ?? DASHES[index] ?? "", opacity: series.thin ? 0.55 : 1,
  }));
  if (points.length === 1) drawDots(root, box, { ...series, points });
}

function drawDots(root, box, series) {
  const color = `var(--c${series.color})`;
  if (series.joined && series.points.length > 1) drawLine(root, box, { ...series, dash: "1 4", kind: "line" }, 0);
  for (const [x, y] of series.points) {
    root.append(svg("circle", { cx: box.px(x), cy: box.py(y), r: 4.5, fill: color, stroke: "var(--card)", "stroke-width": 1.5 }));
  }
}

function drawBars(root, box, options) {
  const bars = options.series.filter((s) => s.kind === "bars");
  const count = Math.max(1, box.x1 - box.x0);
  const slot = (box.width - box.left - box.right) / count;
  const barWidth = options.stacked ? slot * 0.74 : (slot * 0.74) / bars.length;
  const base = new Map();
  bars.forEach((s, i) => {
    for (const [x, y] of s.points) {
      const from = options.stacked ? base.get(x) ?? 0 : 0;
      base.set(x, from + y);
      const left = box.px(x) - slot * 0.37 + (options.stacked ? 0 : i * barWidth);
      const top = box.py(from + y), bottom = Math.min(box.py(from), box.height - box.bottom);
      root.append(svg("rect", {
        x: left, y: top, width: Math.max(1, barWidth - 0.5), height: Math.max(0, bottom - top),
        fill: `var(--c${s.color})`, rx: Math.min(2, barWidth / 4),
      }));
    }
  });
}

function summary(options) {
  const parts = options.series.filter((s) => s.points.length).map((s) => {
    const [x, y] = s.points[s.points.length - 1];
    return `${s.name}: ${(options.y?.format ?? String)(y)} at ${options.x?.label ?? "x"} ${x}`;
  });
  return parts.join("; ");
}

// Adds a tooltip with the values at the x nearest to the pointer.
function addTip(holder, root, box, options) {
  const xs = [...new Set(options.series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const line = svg("line", { y1: box.top, y2: box.height - box.bottom, stroke: "var(--muted)", visibility: "hidden" });
  root.append(line);
  const tip = html("div", "tip");
  tip.hidden = true;
  holder.append(tip);
  const tipFormat = options.y?.tip ?? options.y?.format ?? String;
  root.addEventListener("pointermove", (event) => {
    const bounds = root.getBoundingClientRect();
    const at = ((event.clientX - bounds.left) / bounds.width) * box.width;
    const x = xs.reduce((best, v) => (Math.abs(box.px(v) - at) < Math.abs(box.px(best) - at) ? v : best));
    const rows = options.series.flatMap((s) => {
      const point = s.points.find((p) => p[0] === x);
      return point ? [html("div", "", `${s.name} ${tipFormat(point[1])}`)] : [];
    });
    tip.replaceChildren(html("div", "muted", `${options.x?.label ?? "x"} ${(options.x?.format ?? String)(x)}`), ...rows);
    tip.hidden = false;
    line.setAttribute("visibility", "visible");
    line.setAttribute("x1", box.px(x));
    line.setAttribute("x2", box.px(x));
    const left = (box.px(x) / box.width) * bounds.width + 10;
    tip.style.left = `${left + tip.offsetWidth > bounds.width ? left - tip.offsetWidth - 20 : left}px`;
  });
  root.addEventListener("pointerleave", () => { tip.hidden = true; line.setAttribute("visibility", "hidden"); });
}

// Returns one bar divided in proportion to parts [{name, value, color}].
function stackedBar(parts) {
  const total = parts.reduce((sum, p) => sum + p.value, 0) || 1;
  const cells = parts.filter((p) => p.value > 0).map((p) => {
    const cell = html("div");
    cell.style.flex = `${p.value / total} 1 0`;
    cell.style.background = `var(--c${p.color})`;
    cell.title = `${p.name} ${p.value}`;
    return cell;
  });
  return html("div", "stack", ...cells);
}
