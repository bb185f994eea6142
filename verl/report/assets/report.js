"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shape(tag, attributes = {}, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}

// Round values that span [low, high] in about `count` steps.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// The exponential mean, corrected for its start (as Adam's moments are), so that a curve begins at its first value.
function smooth(points, weight) {
  let mean = 0, norm = 0;
  return points.map(([step, value]) => {
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return [step, mean / norm];
  });
}

function scale(points, height, width, extra = []) {
  const steps = points.map((p) => p[0]), values = points.map((p) => p[1]).concat(extra);
  let [left, right] = [Math.min(...steps), Math.max(...steps)];
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (left === right) { left -= 1; right += 1; }
  if (high - low <= 1e-12 * Math.max(Math.abs(high), Math.abs(low))) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
  const pad = (high - low) * 0.06;
  low -= pad; high += pad;
  const margin = { left: 46, right: 8, top: 8, bottom: 20 };
  return {
    left, right, low, high, margin, width, height,
    x: (step) => margin.left + ((step - left) / (right - left)) * (width - margin.left - margin.right),
    y: (value) => height - margin.bottom - ((value - low) / (high - low)) * (height - margin.top - margin.bottom),
  };
}

function axes(svg, s, label = format) {
  for (const value of ticks(s.low, s.high, 4)) {
    svg.append(shape("line", { class: "rule", x1: s.margin.left, x2: s.width - s.margin.right, y1: s.y(value), y2: s.y(value) }));
    svg.append(shape("text", { x: s.margin.left - 6, y: s.y(value) + 4, "text-anchor": "end" }, label(value)));
  }
  for (const step of ticks(s.left, s.right, Math.max(2, s.width / 110)).filter(Number.isInteger))
    svg.append(shape("text", { x: s.x(step), y: s.height - 4, "text-anchor": "middle" }, format(step)));
}

const path = (points, s) => points.map(([step, value], i) => `${i ? "L" : "M"}${s.x(step).toFixed(1)} ${s.y(value).toFixed(1)}`).join("");

function nearestIndex(points, step) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - points[low - 1][0] < points[low][0] - step ? low - 1 : low;
}

const charts = [];

class Chart {
  constructor(name, points, label) {
    this.name = name;
    this.points = points;
    this.value = element("span");
    this.head = element("header", { title: "Click to enlarge" }, element("span", { title: name }, label), this.value);
    this.svg = shape("svg", { role: "img", "aria-label": name });
    this.panel = element("div", { class: "panel chart" }, this.head, this.svg);
    this.head.addEventListener("click", () => { this.panel.classList.toggle("wide"); this.draw(); });
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect(), { left, right } = this.scale.margin;
      const share = (event.clientX - box.left - left) / (box.width - left - right);
      pointAt(this.scale.left + Math.min(1, Math.max(0, share)) * (this.scale.right - this.scale.left));
    });
    this.svg.addEventListener("pointerleave", () => pointAt(null));
    charts.push(this);
  }

  draw() {
    const width = this.svg.clientWidth || 330, height = this.panel.classList.contains("wide") ? 320 : 150;
    const weight = this.points.length < 10 ? 0 : Number(byId("smoothing").value); // few points: evaluations
    this.smoothed = weight > 0 ? smooth(this.points, weight) : this.points;
    const s = this.scale = scale(this.points, height, width);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.style.height = `${height}px`;
    axes(this.svg, s);
    if (weight > 0) this.svg.append(shape("path", { class: "raw", d: path(this.points, s) }));
    this.svg.append(shape("path", { class: "line", d: path(this.smoothed, s) }));
    this.cursor = shape("line", { class: "cursor", y1: s.margin.top, y2: height - s.margin.bottom, visibility: "hidden" });
    this.dot = shape("circle", { class: "dot", r: 4, visibility: "hidden" });
    if (this.points.length === 1) this.svg.append(shape("circle", { class: "dot", r: 4, cx: s.x(this.points[0][0]), cy: s.y(this.points[0][1]) }));
    this.svg.append(this.cursor, this.dot);
    this.point(null);
  }

  point(step) {
    const index = step === null ? this.points.length - 1 : nearestIndex(this.points, step);
    const [at, value] = this.points[index];
    this.value.textContent = step === null ? format(value) : `step ${format(at)}: ${format(value)}`;
    if (!this.cursor) return;
    const visibility = step === null ? "hidden" : "visible";
    for (const node of [this.cursor, this.dot]) node.setAttribute("visibility", visibility);
    const x = this.scale.x(at);
    this.cursor.setAttribute("x1", x); this.cursor.setAttribute("x2", x);
    this.dot.setAttribute("cx", x); this.dot.setAttribute("cy", this.scale.y(this.smoothed[index][1]));
  }
}

const pointAt = (step) => charts.forEach((chart) => chart.panel.offsetParent && chart.point(step));
const drawAll = () => charts.forEach((chart) => chart.panel.offsetParent && chart.draw());

const SHARES = ["accuracy", "pairs/accuracy"];

function drawHeadline() {
  const name = data.evals.length && data.evals[0].headline || "accuracy";
  const show = (value) => (SHARES.includes(name) ? `${format(value * 100)} %` : format(value));
  const rows = data.evals.filter((row) => typeof row[name] === "number");
  const panel = byId("headline");
  if (rows.length < 2) return;
  panel.hidden = false;
  const svg = shape("svg", { role: "img", "aria-label": `${name} by step` });
  panel.replaceChildren(element("div", { class: "none" }, `${name} by step` + (rows.some((row) => "low" in row) ? ", with 95 % intervals" : "")), svg);
  const width = svg.clientWidth || 600, height = 190;
  const points = rows.map((row) => [row.step, row[name]]);
  const bounds = rows.flatMap((row) => [row.low, row.high]).filter((value) => typeof value === "number");
  const s = scale(points, height, width, bounds);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  axes(svg, s, show);
  const banded = rows.filter((row) => typeof row.low === "number" && typeof row.high === "number");
  if (banded.length > 1) {
    const edge = [...banded.map((row) => [row.step, row.high]), ...banded.map((row) => [row.step, row.low]).reverse()];
    svg.append(shape("path", { class: "band", d: path(edge, s) + "Z" }));
  }
  svg.append(shape("path", { class: "line", d: path(points, s) }));
  for (const row of rows) {
    const dot = shape("circle", { class: "dot", r: 5, cx: s.x(row.step), cy: s.y(row[name]) });
    dot.append(shape("title", {}, `step ${row.step}: ${show(row[name])}`));
    svg.append(dot);
  }
}

// What people look at first comes first; timing and memory last.
const ORDER = ["headlines", "reward", "eval", "", "response", "rollout", "actor", "loss", "kl", "critic", "update", "train", "time", "memory"];
const rank = (group) => (ORDER.includes(group) ? ORDER.indexOf(group) : ORDER.indexOf("time") - 0.5);

const HEADLINES = "headlines";

function buildCurves() {
  const groups = new Map();
  const moves = (name) => data.curves[name].some(([, value]) => value !== data.curves[name][0][1]);
  const first = data.first.filter((name) => name in data.curves && moves(name));
  for (const name of [...first, ...Object.keys(data.curves).filter((name) => !first.includes(name)).sort()]) {
    const group = first.includes(name) ? HEADLINES : name.includes("/") ? name.slice(0, name.indexOf("/")) : "";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(name);
  }
  const constant = [];
  const order = [...groups.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  for (const group of order) {
    const grid = element("div", { class: "grid" });
    for (const name of groups.get(group)) {
      const points = data.curves[name];
      if (points.length > 1 && points.every(([, value]) => value === points[0][1])) constant.push(name);
      else grid.append(new Chart(name, points, group === HEADLINES ? name : name.slice(name.indexOf("/") + 1)).panel);
    }
    if (!grid.childElementCount) continue;
    const span = `group span-${Math.min(3, groups.get(group).length)}`;
    byId("groups").append(element("div", { class: span }, element("h3", {}, group || "overall"), grid));
  }
  if (constant.length) {
    const list = constant.map((name) => element("tr", {}, element("th", {}, name), element("td", {}, format(data.curves[name][0][1]))));
    byId("groups").append(element("details", {}, element("summary", {}, `${constant.length} metrics that never changed`), element("table", {}, ...list)));
  }
  if (!charts.length) byId("groups").append(element("p", { class: "none" }, "No metrics yet."));
}

function filterCurves() {
  const wanted = byId("filter").value.toLowerCase();
  for (const chart of charts) chart.panel.hidden = !chart.name.toLowerCase().includes(wanted);
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".chart:not([hidden])");
  drawAll();
}

function mark(reward) {
  if (reward === null) return element("span", { class: "mark" }, "no score");
  return element("span", { class: "mark" + (reward > 0 ? " good" : " bad") }, format(reward));
}

function completion(label, row) {
  const text = row[2] === "" ? element("div", { class: "text empty" }, "(nothing)") : element("div", { class: "text" }, row[2]);
  return element("article", {}, element("header", {}, element("span", {}, label), mark(row[3])), text);
}

const PAGE = 20;
let shown = PAGE;

function pairs() {
  const [first, second] = ["before", "after"].map((id) => data.samples[byId(id).value]);
  const later = new Map(second.rows.map((row) => [row[0], row]));
  const wanted = byId("search").value.toLowerCase(), change = byId("change").value;
  return first.rows.filter((row) => later.has(row[0])).map((row) => [row, later.get(row[0])]).filter(([a, b]) => {
    const difference = (b[3] ?? 0) - (a[3] ?? 0);
    const kind = difference > 0 ? "better" : difference < 0 ? "worse" : "same";
    return (change === "all" || change === kind) && [a[1], a[2], b[2]].some((text) => text.toLowerCase().includes(wanted));
  });
}

function showPairs() {
  const found = pairs();
  const [first, second] = ["before", "after"].map((id) => data.samples[byId(id).value].step);
  byId("pairs").replaceChildren(...found.slice(0, shown).map(([a, b]) => element("div", { class: "pair" },
    element("div", { class: "prompt" }, element("div", { class: "text" }, a[1])),
    element("div", {}, completion(`step ${first}`, a), completion(`step ${second}`, b)))));
  byId("count").textContent = `${found.length} problems` + leftOut("step", data.samples[byId("after").value]);
  byId("more").hidden = found.length <= shown;
}

function buildCompletions() {
  if (!data.samples.length) {
    byId("completions").querySelector(".head").replaceChildren(element("h2", {}, "Evaluation samples"), element("p", { class: "none" }, "None recorded yet."));
    return;
  }
  for (const id of ["before", "after"]) {
    data.samples.forEach((sample, index) => byId(id).append(element("option", { value: index }, String(sample.step))));
    byId(id).value = id === "before" ? 0 : data.samples.length - 1;
  }
  for (const id of ["before", "after", "change", "search"]) byId(id).addEventListener("input", () => { shown = PAGE; showPairs(); });
  byId("more").addEventListener("click", () => { shown += PAGE; showPairs(); });
  showPairs();
}

// What the page leaves out, and where it is.
const PLACES = { step: ["evaluations", "samples"], train: ["steps", "training"] };

function leftOut(kind, sample) {
  const [what, name] = PLACES[kind], shown = data[name].length, notes = [];
  if (sample.files > shown) notes.push(`${shown} of ${sample.files} ${what}`);
  if (sample.of > sample.rows.length) notes.push(`the first ${sample.rows.length} of ${sample.of} samples of step ${sample.step}`);
  return notes.length ? `; this page has ${notes.join(", and ")}: all are in completions/${kind}-*.parquet` : "";
}

const numbers = (name, rows) => rows.map((row) => row[name]).filter((value) => typeof value === "number");

// Counts of values in at most 20 bins of one width; whole numbers have bins of whole width.
function histogram(name, rows) {
  const values = numbers(name, rows), width = innerWidth > 760 ? 580 : 330, height = 110;
  const svg = shape("svg", { role: "img", "aria-label": `histogram of ${name}`, viewBox: `0 0 ${width} ${height}` });
  const panel = element("div", { class: "panel chart" }, element("header", {}, element("span", {}, name), element("span", {}, `${values.length} samples`)), svg);
  if (!values.length) return panel;
  const low = Math.min(...values), high = Math.max(...values);
  const isWhole = values.every(Number.isInteger);
  const size = isWhole ? Math.max(1, Math.ceil((high - low + 1) / 20)) : (high - low) / 20 || 1;
  const count = isWhole ? Math.floor((high - low) / size) + 1 : high > low ? 20 : 1;
  const bins = Array(count).fill(0);
  for (const value of values) bins[Math.min(count - 1, Math.floor((value - low) / size))]++;
  const most = Math.max(...bins), bar = (width - 16) / count;
  bins.forEach((found, i) => {
    const tall = (found / most) * (height - 34);
    const rect = shape("rect", { class: "bar-of", x: 8 + i * bar + 1, y: height - 20 - tall, width: Math.max(1, bar - 2), height: tall });
    rect.append(shape("title", {}, `${format(low + i * size)}: ${found}`));
    svg.append(rect);
  });
  svg.append(shape("text", { x: 8, y: height - 4 }, format(low)), shape("text", { x: width - 8, y: height - 4, "text-anchor": "end" }, format(high)),
    shape("text", { x: 8, y: 10 }, `most: ${most}`));
  return panel;
}

const ORDERS = { "as sampled": null, "reward, best first": ["reward", -1], "reward, worst first": ["reward", 1], "advantage, highest first": ["advantage", -1],
  "advantage, lowest first": ["advantage", 1], "length, longest first": ["length", -1], "length, shortest first": ["length", 1] };
const WHICH = { all: () => true, rewarded: (row) => row.reward > 0, others: (row) => row.reward !== null && row.reward <= 0, none: (row) => row.reward === null };
let rowsShown = PAGE;

function trainingRows() {
  const wanted = byId("find").value.toLowerCase(), order = ORDERS[byId("sort").value];
  const rows = data.training[byId("step").value].rows.filter((row) => WHICH[byId("which").value](row)
    && ["question", "prompt", "response", "ground_truth"].some((name) => (row[name] ?? "").toLowerCase().includes(wanted)));
  if (!order) return rows;
  const [name, sign] = order; // samples without the number come last
  return rows.sort((a, b) => (a[name] === null) - (b[name] === null) || sign * (a[name] - b[name]));
}

function trainingRow(row) {
  const facts = ["advantage", "length", "finish", "ground_truth", "task", ...Object.keys(row).filter((name) => name.startsWith("reward/"))]
    .filter((name) => row[name] !== null && row[name] !== undefined)
    .map((name) => element("span", {}, `${name.replace("_", " ")} ${typeof row[name] === "number" ? format(row[name]) : row[name]}`));
  const prompt = element("details", {}, element("summary", {}, row.question ?? row.prompt ?? ""), element("div", { class: "text" }, row.prompt ?? ""));
  const text = row.response ? element("div", { class: "text" }, row.response) : element("div", { class: "text empty" }, "(nothing)");
  return element("article", { class: "pair row" }, element("header", {}, mark(row.reward), ...facts), prompt, text);
}

function showTraining() {
  const rows = trainingRows();
  byId("histograms").replaceChildren(histogram("reward", rows), histogram("length", rows));
  byId("rows").replaceChildren(...rows.slice(0, rowsShown).map(trainingRow));
  byId("found").textContent = `${rows.length} samples` + leftOut("train", data.training[byId("step").value]);
  byId("more-rows").hidden = rows.length <= rowsShown;
}

function buildTraining() {
  if (!data.training.length) {
    byId("training").querySelector(".head").replaceChildren(element("h2", {}, "Training samples"), element("p", { class: "none" }, "None recorded yet."));
    return;
  }
  data.training.forEach((sample, index) => byId("step").append(element("option", { value: index }, String(sample.step))));
  byId("step").value = data.training.length - 1;
  for (const name of Object.keys(ORDERS)) byId("sort").append(element("option", {}, name));
  for (const id of ["step", "sort", "which", "find"]) byId(id).addEventListener("input", () => { rowsShown = PAGE; showTraining(); });
  byId("more-rows").addEventListener("click", () => { rowsShown += PAGE; showTraining(); });
  showTraining();
}

function showSmoothing() {
  byId("smoothing-value").textContent = Number(byId("smoothing").value) > 0 ? byId("smoothing").value : "off";
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
byId("smoothing").addEventListener("input", () => { showSmoothing(); drawAll(); });
byId("filter").addEventListener("input", filterCurves);
addEventListener("resize", () => { drawAll(); drawHeadline(); });
showSmoothing();
buildCurves();
drawAll();
drawHeadline();
buildTraining();
buildCompletions();
