// The entry of report.html: the same views as in `whet watch`, of one run, with the data in the page.

import { drawCurves } from "./curves.js";
import { drawEvaluation } from "./evaluation.js";
import { drawGroups } from "./groups.js";
import { Run } from "./runs.js";
import { onRedraw, state } from "./state.js";

const data = JSON.parse(document.getElementById("data").textContent);
const run = new Run(data.run, data.documents);
const { columns, ...changes } = data.changes;
// Metrics come as columns: name -> values by row.
const names = Object.keys(columns), size = names.length ? columns[names[0]].length : 0;
changes.rows = Array.from({ length: size }, (_, n) => Object.fromEntries(
  names.map((name) => [name, columns[name][n]]).filter(([, value]) => value !== null)));
run.take(changes);
state.runs.set(run.name, run);
state.chosen = [run.name];

const targets = { curves: drawCurves, groups: drawGroups, evaluation: drawEvaluation };
async function draw() {
  for (const [view, drawView] of Object.entries(targets)) {
    state.view = view;  // a view checks that it is still the one to show
    const target = document.getElementById(`${view}-view`);
    if (target) await drawView(target, view === "curves" ? [run] : run);
  }
}
let last = Promise.resolve();
onRedraw(() => { last = last.then(draw); });
await draw();
document.documentElement.dataset.ready = "true";
