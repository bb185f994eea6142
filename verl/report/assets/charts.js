"use strict";
// What every page has: elements, the reader's choices, and curves. A page's own script follows.
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

// What the reader has chosen, kept by the browser: a page that is loaded anew, as that of a live run is, looks as before.
// A browser that keeps nothing for a file forgets it.
function keeper(storage, name) {
  let kept = {};
  try { kept = JSON.parse(window[storage].getItem(name)) || {}; } catch { /* not allowed here */ }
  return {
    get: (key, otherwise) => (key in kept ? kept[key] : otherwise),
    set: (key, value) => {
      kept[key] = value;
      try { window[storage].setItem(name, JSON.stringify(kept)); } catch { /* likewise */ }
    },
    toggle(key, entry) {
      const entries = this.get(key, []);
      this.set(key, entries.includes(entry) ? entries.filter((other) => other !== entry) : [...entries, entry]);
    },
  };
}

const view = keeper("sessionStorage", `verl ${location.pathname}`);

// Fields as they were left; `changed` is called when one is changed.
function keepFields(ids, changed) {
  for (const id of ids) {
    const field = byId(id), property = field.type === "checkbox" ? "checked" : "value";
    const before = field[property];
    field[property] = view.get(id, before);
    if (field.tagName === "SELECT" && field.selectedIndex < 0) field.value = before; // the option is gone
    field.addEventListener("input", () => { view.set(id, field[property]); changed(id); });
  }
}

// Round values that span [low, high] in about `count` steps.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step);
  return ticks;
}

// The exponential mean, corrected for its start (as Adam's moments are), so that a curve begins at its first value.
function smooth(points, weight) {
  let mean = 0, norm = 0;
  return points.map(([x, value, ...rest]) => {
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return [x, mean / norm, ...rest];
  });
}

function bounds(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

function scale(places, values, height, width, isLog = false) {
  const level = isLog ? Math.log10 : (value) => value;
  let [left, right] = bounds(places), [low, high] = bounds(values).map(level);
  if (left === right) { left -= 1; right += 1; }
  if (high - low <= 1e-12 * Math.max(Math.abs(high), Math.abs(low))) { const pad = Math.abs(high) * 0.1 || 1; low -= pad; high += pad; }
  const pad = (high - low) * 0.06;
  low -= pad; high += pad;
  const margin = { left: 50, right: 8, top: 8, bottom: 20 };
  return {
    left, right, low, high, margin, width, height, isLog,
    x: (place) => margin.left + ((place - left) / (right - left)) * (width - margin.left - margin.right),
    y: (value) => height - margin.bottom - ((level(value) - low) / (high - low)) * (height - margin.top - margin.bottom),
  };
}

// What curves are drawn over: steps, hours (or minutes or seconds), tokens.
const UNITS = [[7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];

function drawAxes(svg, s, kind = "step", label = format) {
  for (const level of ticks(s.low, s.high, 4)) {
    const value = s.isLog ? 10 ** level : level;
    svg.append(shape("line", { class: "rule", x1: s.margin.left, x2: s.width - s.margin.right, y1: s.y(value), y2: s.y(value) }));
    svg.append(shape("text", { x: s.margin.left - 6, y: s.y(value) + 4, "text-anchor": "end" }, label(value)));
  }
  const [, size, unit] = kind === "time" ? UNITS.find(([least]) => s.right >= least) : [0, 1, ""];
  const short = new Intl.NumberFormat("en-US", { notation: "compact" });
  for (const place of ticks(s.left / size, s.right / size, Math.max(2, s.width / 110))) {
    if (kind === "step" && (place < 0 || !Number.isInteger(place))) continue;
    const text = kind === "tokens" ? short.format(place) : format(place) + (unit && ` ${unit}`);
    svg.append(shape("text", { x: s.x(place * size), y: s.height - 4, "text-anchor": "middle" }, text));
  }
}

const path = (points, s) => points.map(([x, value], i) => `${i ? "L" : "M"}${s.x(x).toFixed(1)} ${s.y(value).toFixed(1)}`).join("");

function nearestIndex(points, place) {
  let [low, high] = [0, points.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < place) low = middle + 1; else high = middle;
  }
  return low > 0 && place - points[low - 1][0] < points[low][0] - place ? low - 1 : low;
}

// Where a step is on the axis, by rows [step, seconds, tokens] of what the run had taken by its end.
function placeOf(step, clock, kind) {
  const column = ["step", "time", "tokens"].indexOf(kind);
  if (!column || !clock.length) return step;
  const next = clock.findIndex((row) => row[0] >= step);
  if (next <= 0) return clock.at(next)[column];
  const [a, b] = [clock[next - 1], clock[next]];
  return a[column] + ((step - a[0]) / (b[0] - a[0])) * (b[column] - a[column]);
}

const charts = [];
const hiddenLines = new Set(view.get("hidden lines", []));
const color = (number) => (number === 0 ? "var(--accent)" : `var(--line-${number % 8})`);

// Lines: { key, label, number (of its color), clock, points: [[step, value, lowest, highest]] }, the last two where it is
// a mean of several.
class Chart {
  constructor({ name, label, names, lines }) {
    Object.assign(this, { name, names, lines });
    const meanings = names.filter((each) => each in data.meanings).map((each) => data.meanings[each]);
    const about = [names.join(", "), ...new Set(meanings)].join("\n");
    this.value = element("span");
    this.head = element("header", {}, element("span", { title: about }, label), this.value);
    this.svg = shape("svg", { role: "img", "aria-label": name });
    this.legend = element("div", { class: "legend" });
    this.panel = element("div", { class: "panel chart" }, this.head, element("p", { class: "about" }, about), this.svg, this.legend);
    this.panel.classList.toggle("wide", view.get("wide", []).includes(name));
    this.head.addEventListener("click", () => { this.panel.classList.toggle("wide"); view.toggle("wide", name); this.draw(); });
    this.svg.addEventListener("pointermove", (event) => { this.showStretch(event); pointAt(this.placeAt(event)); });
    this.svg.addEventListener("pointerleave", () => { this.start = null; this.stretch.setAttribute("width", 0); pointAt(null); });
    this.svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") this.start = event; });
    this.svg.addEventListener("pointerup", (event) => this.zoomTo(event));
    charts.push(this);
  }

  placeAt(event) {
    const box = this.svg.getBoundingClientRect(), { left, right } = this.scale.margin;
    const share = (event.clientX - box.left - left) / (box.width - left - right);
    return this.scale.left + Math.min(1, Math.max(0, share)) * (this.scale.right - this.scale.left);
  }

  showStretch(event) {
    if (!this.start) return;
    const edges = [this.start, event].map((each) => this.scale.x(this.placeAt(each))).sort((a, b) => a - b);
    this.stretch.setAttribute("x", edges[0]);
    this.stretch.setAttribute("width", edges[1] - edges[0]);
  }

  zoomTo(event) {
    const start = this.start;
    this.start = null;
    if (!start || Math.abs(event.clientX - start.clientX) < 8) return this.stretch.setAttribute("width", 0);
    view.set("zoom", [start, event].map((each) => this.placeAt(each)).sort((a, b) => a - b));
    drawAll();
  }

  draw() {
    const width = this.svg.clientWidth || 330, height = this.panel.classList.contains("wide") ? 320 : 150;
    const kind = byId("axis").value, zoom = view.get("zoom", null);
    const within = ([x]) => !zoom || (x >= zoom[0] && x <= zoom[1]);
    this.drawn = this.lines.filter(({ key }) => !hiddenLines.has(key)).map((line) => {
      const raw = line.points.map(([step, ...values]) => [placeOf(step, line.clock, kind), ...values, step]);
      const weight = raw.length < 10 ? 0 : Number(byId("smoothing").value); // few points: evaluations
      const kept = raw.map(within);
      return { ...line, weight, raw: raw.filter(within), smoothed: smooth(raw, weight).filter((_, i) => kept[i]) };
    }).filter((line) => line.raw.length);
    const points = this.drawn.flatMap((line) => line.raw), values = points.flatMap((point) => point.slice(1, -1));
    const isLog = byId("log").checked && values.every((value) => value > 0);
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.style.height = `${height}px`;
    const s = this.scale = scale(zoom || (points.length ? points.map(([x]) => x) : [0, 1]), points.length ? values : [0, 1], height, width, isLog);
    drawAxes(this.svg, s, kind);
    for (const line of this.drawn) this.drawLine(line, s);
    this.cursor = shape("line", { class: "cursor", y1: s.margin.top, y2: height - s.margin.bottom, visibility: "hidden" });
    this.stretch = shape("rect", { class: "stretch", y: s.margin.top, height: height - s.margin.top - s.margin.bottom, width: 0 });
    this.svg.append(this.stretch, this.cursor);
    this.point(null);
  }

  drawLine(line, s) {
    const style = `--color: ${color(line.number)}`;
    if (line.raw.some((point) => point.length > 3)) { // [place, mean, lowest, highest, step]
      const edge = [...line.raw.map((point) => [point[0], point[3]]), ...line.raw.map((point) => [point[0], point[2]]).reverse()];
      this.svg.append(shape("path", { class: "band", style, d: path(edge, s) + "Z" }));
    } else if (line.weight > 0) this.svg.append(shape("path", { class: "raw", style, d: path(line.raw, s) }));
    this.svg.append(shape("path", { class: "line", style, d: path(line.smoothed, s) }));
    line.dot = shape("circle", { class: "dot", style, r: 4, visibility: "hidden" });
    if (line.raw.length === 1) this.svg.append(shape("circle", { class: "dot", style, r: 4, cx: s.x(line.raw[0][0]), cy: s.y(line.raw[0][1]) }));
    this.svg.append(line.dot);
  }

  point(place) {
    if (!this.drawn) return;
    const nearest = this.drawn.map((line) => line.raw[place === null ? line.raw.length - 1 : nearestIndex(line.raw, place)]);
    const step = nearest.length && place !== null ? `step ${format(nearest[0].at(-1))}` : "";
    const several = this.lines.length > 1;
    this.value.textContent = several || !nearest.length ? step : (step && `${step}: `) + format(nearest[0][1]);
    this.legend.replaceChildren(...(several ? this.drawn.map((line, i) => entry(line, format(nearest[i][1]))) : []));
    this.drawn.forEach((line, i) => {
      line.dot.setAttribute("visibility", place === null ? "hidden" : "visible");
      line.dot.setAttribute("cx", this.scale.x(nearest[i][0]));
      line.dot.setAttribute("cy", this.scale.y(line.smoothed[line.raw.indexOf(nearest[i])][1]));
    });
    this.cursor.setAttribute("visibility", nearest.length && place !== null ? "visible" : "hidden");
    for (const end of nearest.length ? ["x1", "x2"] : []) this.cursor.setAttribute(end, this.scale.x(nearest[0][0]));
  }
}

const entry = (line, value) => element("span", { title: line.label }, element("b", { style: `color: ${color(line.number)}` }, "■ "), `${line.key} `, element("b", {}, value));
const pointAt = (place) => charts.forEach((chart) => chart.panel.offsetParent && chart.point(place));

function drawAll() {
  byId("unzoom").hidden = !view.get("zoom", null);
  charts.forEach((chart) => chart.panel.offsetParent && chart.draw());
}

// What people look at first comes first; timing and memory last.
const ORDER = ["headlines", "reward", "eval", "", "response", "rollout", "actor", "loss", "kl", "critic", "update", "train", "time", "memory"];
const rank = (group) => (ORDER.includes(group) ? ORDER.indexOf(group) : ORDER.indexOf("time") - 0.5);
const HEADLINES = "headlines";

const isFirst = (plot) => plot.names.some((name) => data.first.includes(name));

// Plots, as charts take them, by the first part of their name; those that people look at first in a group of their own.
function buildCurves(plots) {
  const groups = new Map();
  for (const plot of plots) {
    const group = isFirst(plot) ? HEADLINES : plot.name.includes("/") ? plot.name.slice(0, plot.name.indexOf("/")) : "";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(plot);
  }
  for (const group of [...groups.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))) {
    const grid = element("div", { class: "grid" }), title = group || "overall";
    for (const plot of groups.get(group)) {
      const label = group === HEADLINES ? plot.name : plot.name.slice(plot.name.indexOf("/") + 1);
      grid.append(new Chart({ label, ...plot }).panel);
    }
    const fold = element("button", { type: "button", class: "fold", title: "Fold" }, title);
    const node = element("div", { class: `group span-${Math.min(3, groups.get(group).length)}` }, element("h3", {}, fold), grid);
    node.classList.toggle("folded", view.get("folded", []).includes(title));
    fold.addEventListener("click", () => { node.classList.toggle("folded"); view.toggle("folded", title); drawAll(); });
    byId("groups").append(node);
  }
  if (!charts.length) byId("groups").append(element("p", { class: "none" }, "No metrics yet."));
  for (const kind of ["time", "tokens"]) {
    const column = ["step", "time", "tokens"].indexOf(kind);
    byId("axis").options[column].hidden = !plots.some((plot) => plot.lines.every((line) => line.clock.some((row) => row[column] > 0)));
  }
  keepFields(["smoothing", "log"], () => { showSmoothing(); drawAll(); });
  keepFields(["axis"], () => { view.set("zoom", null); drawAll(); });
  keepFields(["filter"], filterCurves);
  showSmoothing();
  filterCurves();
}

function filterCurves() {
  const wanted = byId("filter").value.toLowerCase();
  for (const chart of charts) chart.panel.hidden = !chart.names.some((name) => name.toLowerCase().includes(wanted));
  for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector(".chart:not([hidden])");
  drawAll();
}

function showSmoothing() {
  byId("smoothing-value").textContent = Number(byId("smoothing").value) > 0 ? byId("smoothing").value : "off";
}

function mark(reward) {
  if (reward === null) return element("span", { class: "mark" }, "no score");
  return element("span", { class: "mark" + (reward > 0 ? " good" : " bad") }, format(reward));
}

function answer(label, text, reward) {
  const body = text === "" ? element("div", { class: "text empty" }, "(nothing)") : element("div", { class: "text" }, text);
  return element("article", {}, element("header", {}, element("span", {}, label), mark(reward)), body);
}

const PAGE = 20;

// Two answers to a prompt beside each other: pairs {prompt, left, right}, sides as [text, reward], from `pairs()`.
function buildPairs(ids, pairs, labels, note) {
  let shown = view.get("pairs shown", PAGE);
  const show = () => {
    const wanted = byId("search").value.toLowerCase(), change = byId("change").value;
    const chosen = pairs().filter(({ prompt, left, right }) => {
      const difference = (right[1] ?? 0) - (left[1] ?? 0);
      const kind = difference > 0 ? "better" : difference < 0 ? "worse" : "same";
      return (change === "all" || change === kind) && [prompt, left[0], right[0]].some((text) => text.toLowerCase().includes(wanted));
    });
    const [first, second] = labels();
    byId("pairs").replaceChildren(...chosen.slice(0, shown).map(({ prompt, left, right }) => element("div", { class: "pair" },
      element("div", { class: "prompt" }, element("div", { class: "text" }, prompt)),
      element("div", {}, answer(first, ...left), answer(second, ...right)))));
    byId("count").textContent = `${chosen.length} problems${note()}`;
    byId("more").hidden = chosen.length <= shown;
  };
  const showFrom = (count) => { shown = count; view.set("pairs shown", shown); show(); };
  keepFields([...ids, "change", "search"], () => showFrom(PAGE));
  byId("more").addEventListener("click", () => showFrom(shown + PAGE));
  show();
}

const themes = keeper("localStorage", "verl");
if (themes.get("theme")) document.documentElement.dataset.theme = themes.get("theme");
byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  themes.set("theme", root.dataset.theme);
});
byId("unzoom").addEventListener("click", () => { view.set("zoom", null); drawAll(); });
addEventListener("resize", drawAll);
