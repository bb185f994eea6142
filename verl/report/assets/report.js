// The page of one run.
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
  const values = rows.flatMap((row) => [row[name], row.low, row.high]).filter((value) => typeof value === "number");
  const s = scale(points.map(([step]) => step), values, height, width);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  drawAxes(svg, s, "step", show);
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

// Metrics that are drawn over each other: those of tasks, the components of a reward, the shares and seconds of roles.
const TASK = /^(eval\/)?task\/([^/]+)\/(.+)$/;
const PARTS = [/^(reward\/)([^/]+)(\/mean)$/, /^(cost\/)([^/]+)(\/mean)$/, /^(busy\/)(.+)()$/];

// The chart that a metric is drawn in, and what its line is called there.
function familyOf(name) {
  const [, evaluation = "", task, rest] = name.match(TASK) ?? [null, "", "", name];
  const part = PARTS.map((pattern) => rest.match(pattern)).find(Boolean);
  const chart = part ? `${evaluation}${part[1]}*${part[3]}` : evaluation + rest;
  return [chart, [task, part && part[2]].filter(Boolean).join(", ")];
}

// Plots of the curves that move, each drawn once: names of equal values share a line. The others are a list of names.
function plotsOf(curves) {
  const families = new Map(), lines = new Map(), constant = [];
  const order = (name) => (data.first.includes(name) ? data.first.indexOf(name) : data.first.length);
  for (const name of Object.keys(curves).sort((a, b) => order(a) - order(b) || TASK.test(a) - TASK.test(b) || (a < b ? -1 : 1))) {
    const points = curves[name], text = JSON.stringify(points);
    if (points.length > 1 && points.every(([, value]) => value === points[0][1])) { constant.push(name); continue; }
    const same = points.length > 1 && lines.get(text);
    if (same) { same.names.push(name); continue; }
    const [family, key] = familyOf(name), chart = families.get(family) ?? [];
    const line = { names: [name], key: key || "all", points, clock: data.clock, number: chart.length };
    lines.set(text, line);
    families.set(family, [...chart, line]);
  }
  const plots = [...families].map(([family, lines]) => {
    const names = lines.flatMap((line) => line.names);
    return { name: lines.length > 1 ? family : lines[0].names[0], names, lines: lines.map((line) => ({ ...line, label: line.names.join(", ") })) };
  });
  return [plots, constant];
}

function buildRunCurves() {
  const [plots, constant] = plotsOf(data.curves);
  buildCurves(plots);
  if (!constant.length) return;
  const list = constant.map((name) => element("tr", {}, element("th", { title: data.meanings[name] ?? "" }, name), element("td", {}, format(data.curves[name][0][1]))));
  byId("groups").append(element("details", {}, element("summary", {}, `${constant.length} metrics that never changed`), element("table", {}, ...list)));
}

function buildCompletions() {
  if (!data.samples.length) {
    byId("completions").querySelector(".head").replaceChildren(element("h2", {}, "Evaluation samples"), element("p", { class: "none" }, "None recorded yet."));
    return;
  }
  for (const id of ["before", "after"]) {
    for (const sample of data.samples) byId(id).append(element("option", {}, String(sample.step)));
    byId(id).value = data.samples.at(id === "before" ? 0 : -1).step;
  }
  const chosen = (id) => data.samples.find((sample) => String(sample.step) === byId(id).value);
  const pairs = () => {
    const later = new Map(chosen("after").rows.map((row) => [row[0], row]));
    return chosen("before").rows.filter((row) => later.has(row[0])).map((row) => ({ prompt: row[1], left: row.slice(2), right: later.get(row[0]).slice(2) }));
  };
  buildPairs(["before", "after"], pairs, () => ["before", "after"].map((id) => `step ${byId(id).value}`), () => leftOut("step", chosen("after")));
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
  const whole = byId("histograms").clientWidth, sides = 30; // of the panel
  const values = numbers(name, rows), width = Math.max(60, (innerWidth > 760 ? (whole - 12) / 2 : whole) - sides), height = 110;
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
let rowsShown = view.get("rows shown", PAGE);
const trainingStep = () => data.training.find((sample) => String(sample.step) === byId("step").value);

// What is searched: of a conversation also what others said in it, which is not part of the policy's response.
const textsOf = (row) => [row.question, row.prompt, row.response, row.ground_truth, ...(row.turns ?? []).map(([, text]) => text)].map((text) => text ?? "");

// Groups of samples in the order that is chosen: those of a prompt, in the place of the first of them, or one a group.
function trainingGroups() {
  const wanted = byId("find").value.toLowerCase(), order = ORDERS[byId("sort").value];
  const rows = trainingStep().rows.filter((row) => WHICH[byId("which").value](row)
    && textsOf(row).some((text) => text.toLowerCase().includes(wanted)));
  if (order) { // samples without the number come last
    const [name, sign] = order;
    rows.sort((a, b) => (a[name] === null) - (b[name] === null) || sign * (a[name] - b[name]));
  }
  if (!byId("together").checked) return rows.map((row) => [row]);
  const groups = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.task ?? null, row.group ?? row.prompt]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return [...groups.values()];
}

// A token: [text, whether the policy wrote it, advantage, entropy, mismatch]; what a step has not is null.
const TOKEN = ["advantage", "entropy", "mismatch"];

function tokens(row) {
  const column = TOKEN.indexOf(byId("shade").value) + 2;
  const most = Math.max(...row.tokens.map((token) => Math.abs(token[column] ?? 0))) || 1;
  const facts = element("p", { class: "none facts" }, "Click on a token for its numbers.");
  const text = element("div", { class: "text tokens" }, ...row.tokens.map((token) => {
    const share = Math.round((Math.abs(token[column] ?? 0) / most) * 60);
    const tone = token[column] < 0 ? "--bad" : "--good";
    const node = element("span", token[1] ? { style: `background: color-mix(in srgb, var(${tone}) ${share}%, transparent)` } : { class: "masked" }, token[0]);
    const about = [token[1] ? "written by the policy" : "not the policy's: masked", ...TOKEN.map((name, i) => `${name} ${format(token[i + 2])}`)].join(", ");
    node.title = about;
    node.addEventListener("click", () => { facts.textContent = `${JSON.stringify(token[0])}: ${about}`; });
    return node;
  }));
  return [text, facts];
}

// What the policy read and what it wrote, in turn.
function conversation(row) {
  const named = (trained) => (trained ? { class: "trained", title: "written by the policy: trained" } : { class: "masked", title: "read by the policy: masked" });
  return element("div", { class: "text turns" }, ...row.turns.map(([trained, text]) => element("span", named(trained), text)));
}

// Why an episode counts for nothing, and which of its turns are not trained.
function leftOutOf(row) {
  const calls = Object.entries(JSON.parse(row.calls_left_out ?? "{}")).map(([reason, count]) => `${count} ${reason}`);
  const why = row.left_out && `left out: ${row.left_out}${row.abstain_reason ? ` (${row.abstain_reason})` : ""}`;
  return [why, calls.length && `calls left out: ${calls.join(", ")}`].filter(Boolean).map((text) => element("span", { class: "why" }, text));
}

function trainingRow(row, prompt) {
  const facts = ["trajectory", "trajectory_reward", "advantage", "length", "finish", ...Object.keys(row).filter((name) => name.startsWith("reward/"))]
    .filter((name) => row[name] !== null && row[name] !== undefined)
    .map((name) => element("span", {}, `${name} ${typeof row[name] === "number" ? format(row[name]) : row[name]}`));
  const plain = () => element("div", { class: "text" + (row.response ? "" : " empty") }, row.response || "(nothing)");
  const text = row.turns && row.turns.length ? conversation(row) : plain();
  const body = element("div", {}, text), head = element("header", {}, mark(row.reward), ...facts, ...leftOutOf(row));
  if (row.tokens) {
    const button = element("button", { type: "button", class: "fold" }, "tokens");
    button.addEventListener("click", () => {
      button.classList.toggle("pressed");
      body.replaceChildren(...(button.classList.contains("pressed") ? tokens(row) : [text]));
    });
    head.append(button);
  }
  if (row.prompt === prompt) return element("article", {}, head, body);
  return element("article", {}, head, element("details", { class: "read" }, element("summary", {}, "its prompt"), element("div", { class: "text turns masked" }, row.prompt ?? "")), body);
}

// The trajectories of each episode beside each other, under a line that says how many there are.
function episodes(rows, prompt) {
  const byEpisode = new Map();
  for (const row of rows) byEpisode.set(row.episode ?? row, [...(byEpisode.get(row.episode ?? row) ?? []), row]);
  return [...byEpisode.values()].flatMap((each) => (each.length > 1
    ? element("div", { class: "episode" }, element("p", { class: "none" }, `one episode, ${each.length} trajectories`), ...each.map((row) => trainingRow(row, prompt)))
    : trainingRow(each[0], prompt)));
}

function trainingGroup(rows) {
  const { question, prompt, ground_truth: truth, task } = rows.find((row) => !row.trajectory) ?? rows[0];
  const facts = [["task", task], ["ground truth", truth]].filter(([, value]) => value !== null && value !== undefined);
  const whole = element("details", {}, element("summary", {}, question ?? prompt ?? ""), element("div", { class: "text" }, prompt ?? ""));
  return element("div", { class: "pair row" }, element("div", { class: "prompt" }, whole, ...facts.map(([name, value]) => element("span", { class: "fact" }, `${name} ${value}`))),
    element("div", { class: rows.length > 1 ? "" : "one" }, ...episodes(rows, prompt)));
}

function showTraining() {
  const groups = trainingGroups(), rows = groups.flat(), shown = [];
  byId("histograms").replaceChildren(histogram("reward", rows), histogram("length", rows));
  let count = 0; // whole groups
  for (const group of groups) if (count < rowsShown) { shown.push(group); count += group.length; }
  byId("rows").replaceChildren(...shown.map(trainingGroup));
  byId("shades").hidden = !rows.some((row) => row.tokens);
  byId("found").textContent = `${rows.length} samples` + leftOut("train", trainingStep());
  byId("more-rows").hidden = rows.length <= count;
}

function buildTraining() {
  if (!data.training.length) {
    byId("training").querySelector(".head").replaceChildren(element("h2", {}, "Training samples"), element("p", { class: "none" }, "None recorded yet."));
    return;
  }
  for (const sample of data.training) byId("step").append(element("option", {}, String(sample.step)));
  byId("step").value = data.training.at(-1).step;
  for (const name of Object.keys(ORDERS)) byId("sort").append(element("option", {}, name));
  for (const name of TOKEN) byId("shade").append(element("option", {}, name));
  const showFrom = (count) => { rowsShown = count; view.set("rows shown", count); showTraining(); };
  keepFields(["step", "sort", "which", "find", "together", "shade"], () => showFrom(PAGE));
  byId("more-rows").addEventListener("click", () => showFrom(rowsShown + PAGE));
  showTraining();
}

addEventListener("resize", () => { drawHeadline(); if (data.training.length) showTraining(); });
buildRunCurves();
drawHeadline();
buildTraining();
buildCompletions();
