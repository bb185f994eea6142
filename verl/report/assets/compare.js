// Several runs on one page. Lines of one letter and color are runs that differ in the seed alone.
const lines = data.lines.map((line, number) => ({ ...line, number }));

function buildLegend() {
  for (const line of lines) {
    const button = element("button", { type: "button", title: "Show or hide" }, element("b", { style: `color: ${color(line.number)}` }, "■ "), `${line.key} ${line.label}`);
    const show = () => button.classList.toggle("off", hiddenLines.has(line.key));
    button.addEventListener("click", () => {
      if (!hiddenLines.delete(line.key)) hiddenLines.add(line.key);
      view.set("hidden lines", [...hiddenLines]);
      show();
      drawAll();
    });
    show();
    byId("legend").append(button);
  }
}

function buildAnswers() {
  if (data.answers.runs.length < 2) {
    byId("answers").querySelector(".head").replaceChildren(element("h2", {}, "Answers"), element("p", { class: "none" }, "Fewer than two of the runs have recorded answers of an evaluation."));
    return;
  }
  const side = (id) => data.answers.runs[byId(id).value];
  for (const id of ["left", "right"]) {
    data.answers.runs.forEach((run, index) => byId(id).append(element("option", { value: index }, run.label)));
    byId(id).value = id === "left" ? 0 : 1;
  }
  const pairs = () => {
    const right = new Map(side("right").rows.map((row) => [`${row[0]} ${row[1]}`, row]));
    return side("left").rows.filter((row) => right.has(`${row[0]} ${row[1]}`)).map((row) => ({
      prompt: data.answers.prompts[row[0]], left: row.slice(2), right: right.get(`${row[0]} ${row[1]}`).slice(2),
    }));
  };
  const note = () => (side("left").of + side("right").of > side("left").rows.length + side("right").rows.length ? "; all are in completions/step-*.parquet of the runs" : "");
  buildPairs(["left", "right"], pairs, () => ["left", "right"].map((id) => `${side(id).label}, step ${side(id).step}`), note);
}

// A click on the head of a column sorts by its numbers, or by its texts; another click the other way round.
function sortResults() {
  document.querySelectorAll(".results th").forEach((head, column) => {
    const key = (row) => {
      const text = row.cells[column].textContent, number = text.match(/[-+]?\d[\d,.]*/);
      return number ? Number(number[0].replaceAll(",", "")) : text;
    };
    let sign = 1;
    head.addEventListener("click", () => {
      sign = -sign; // the highest first
      const body = document.querySelector(".results tbody");
      body.append(...[...body.rows].sort((a, b) => sign * (key(a) > key(b) ? 1 : key(a) < key(b) ? -1 : 0)));
    });
  });
}

buildLegend();
sortResults();
// Each curve once: metrics of equal values share a chart.
const plots = new Map();
for (const [name, drawn] of Object.entries(data.curves)) {
  const text = JSON.stringify(drawn);
  if (plots.has(text)) plots.get(text).names.push(name);
  else plots.set(text, { name, names: [name], lines: drawn.map(([number, points]) => ({ ...lines[number], points })) });
}
buildCurves([...plots.values()]);
buildAnswers();
