// The view of `whet compare`: every variant and seed of a grid while it fills, and the means over seeds.

import { LineChart } from "./chart.js";
import { button, mean, node, percent, replace, select, table } from "./dom.js";
import { redraw, state } from "./state.js";

export const grids = { list: [] };

export const chosenGrid = () => grids.list.find((grid) => grid.name === state.grid) ?? grids.list[0] ?? null;

const chart = new LineChart("grid accuracy", { title: "Evaluation: accuracy", text: "Mean over the seeds that have reached the step.", isPercent: true });

function points(value) { return `${value >= 0 ? "+" : ""}${(100 * value).toFixed(1)}`; }

function change(value) {
  if (!value) return "";
  return points(value.mean) + (value.low === null ? "" : ` [${points(value.low)}, ${points(value.high)}]`);
}

function cellNode(cell, onOpen) {
  const run = state.runs.get(cell.run), total = run?.config.max_steps;
  const step = run?.last?.step ?? 0;
  const text = cell.after !== null ? `${percent(cell.before)} \u2192 ${percent(cell.after)}`
    : !run ? "waiting" : `${run.state}, step ${step}${total > 0 ? ` / ${total}` : ""}`;
  if (!run) return text;
  const bar = node("progress", { max: total > 0 ? total : 1, value: cell.after !== null ? (total > 0 ? total : 1) : step, ariaLabel: `progress of ${cell.name}` });
  return node("span", { dataset: { cell: cell.name } }, button(text, () => onOpen([cell.run]), { title: cell.name }), cell.after === null ? bar : null);
}

// Accuracy of a variant: the mean over its runs at each step that has an evaluation.
function series(grid, variant, color) {
  const runs = grid.cells.filter((cell) => cell.variant === variant).map((cell) => state.runs.get(cell.run)).filter(Boolean);
  const values = new Map();
  for (const run of runs) for (const [x, y] of run.evalPoints("accuracy", "step")) values.set(x, [...(values.get(x) ?? []), y]);
  return { name: variant, color, hasMarks: true, points: [...values].sort((a, b) => a[0] - b[0]).map(([x, list]) => [x, mean(list)]) };
}

export function drawGrids(main, onOpen) {
  const grid = chosenGrid();
  if (!grid) return replace(main, node("p", { textContent: "There is no comparison in this folder: whet compare makes one." }));
  const variants = [...new Set(grid.cells.map((cell) => cell.variant))], seeds = [...new Set(grid.cells.map((cell) => cell.seed))];
  const results = new Map(grid.variants.map((variant) => [variant.name, variant]));
  const ended = grid.cells.filter((cell) => cell.after !== null).length;
  const rows = variants.map((variant) => {
    const result = results.get(variant), versus = result?.versus;
    const cells = seeds.map((seed) => {
      const cell = grid.cells.find((entry) => entry.variant === variant && entry.seed === seed);
      return cell ? cellNode(cell, onOpen) : "";
    });
    return [variant, ...cells, result ? percent(result.accuracy_after.mean) : "", change(result?.gain),
      versus ? `${change(versus)}, p ${versus.p_value < 0.001 ? "< 0.001" : `= ${versus.p_value.toFixed(3)}`}` : ""];
  });
  const heads = ["variant", ...seeds.map((seed) => `seed ${seed}`), "mean after", "gain [95 %]", `against ${variants[0]}`];
  const runs = grid.cells.map((cell) => cell.run).filter((name) => state.runs.has(name));
  replace(main, node("div", { className: "controls" },
    ...(grids.list.length > 1 ? [select("comparison", grids.list.map(({ name }) => [name, name]), grid.name, (name) => { state.grid = name; redraw(); })] : [node("b", { textContent: grid.name })]),
    button("all curves", () => onOpen(runs)),
    node("span", { className: "quiet", id: "matches", textContent: `${ended} of ${grid.cells.length} runs have ended; ${grid.source}` })),
    node("div", { className: "scroll tall", id: "grid" }, table("Variants and seeds", heads, rows)), node("div", { className: "charts" }, chart.figure));
  chart.figure.classList.add("wide");
  chart.draw(variants.map((variant, color) => series(grid, variant, color)));
}
