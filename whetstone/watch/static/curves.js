// The view of curves: every metric of the chosen runs, evaluation with its intervals, tasks, and where time went.

import { LineChart, intervalChart } from "./chart.js";
import { button, node, percent, replace, table } from "./dom.js";
import { CURVES, isShare } from "./metrics.js";
import { redraw, state } from "./state.js";

const charts = new Map();
const LAYERS = 5;  // stages that get a color of their own

function chart(key, options = {}) {
  const id = `${state.xName} ${key}`;
  if (!charts.has(id)) {
    const onZoom = (range) => { state.range = range; redraw(); };
    charts.set(id, new LineChart(key, { xName: state.xName, isPercent: isShare(key), onZoom, ...options }));
  }
  return charts.get(id);
}

// [chart, series, options] of the accuracy (or the reward, where nothing is right or wrong) on the fixed problems.
function evaluationPlot(runs) {
  const key = runs.some((run) => run.evalPoints("accuracy", "step").length) ? "accuracy" : "reward";
  const name = (run, text) => (runs.length > 1 ? run.name : text);
  const series = runs.map((run, color) => {
    const [points, low, high] = [key, `${key}_low`, `${key}_high`].map((column) => run.evalPoints(column, state.xName));
    const band = low.length === points.length ? points.map(([x], n) => [x, low[n][1], high[n]?.[1] ?? low[n][1]]) : undefined;
    return { name: name(run, "fixed problems"), color, points, band, start: points[0]?.[1], hasMarks: true };
  });
  if (runs.length === 1 && key === "accuracy") {
    series.push({ name: "greedy", color: 1, points: runs[0].evalPoints("greedy_accuracy", state.xName), isDots: true });
    series.push({ name: "in training", color: 5, points: runs[0].points("accuracy", state.xName) });
  }
  const text = "On the fixed problems; the band is the 95 % interval, the dashed line step 0.";
  return [chart(`evaluation ${key}`, { title: `Evaluation: ${key}`, text, isPercent: key === "accuracy" }), series];
}

function rewardSeries(run) {
  const parts = [...run.keys].filter((key) => /^rewards\/.*\/mean$/.test(key) && key !== "rewards/correct/mean");
  const shown = parts.length > 1 ? parts.slice(0, 4) : [];
  return ["reward", ...shown].map((key, color) =>
    ({ name: key.replace(/^rewards\//, "").replace(/\/mean$/, ""), color, points: run.points(key, state.xName) }));
}

// Seconds of each step, stage upon stage; what no stage measured is `other`.
function timePlot(run) {
  const total = (key) => run.points(key, "step").reduce((sum, [, y]) => sum + y, 0);
  const stages = [...run.keys].filter((key) => key.startsWith("time/")).map((key) => [key, total(key)])
    .filter(([, seconds]) => seconds > 0.005 * total("step_time")).sort((a, b) => b[1] - a[1]).slice(0, LAYERS);
  if (!stages.length) return null;
  const series = stages.map(([key], color) => ({ name: key.slice(5), color, points: run.points(key, state.xName) }));
  const rest = run.ordered.map((row) => [state.xName === "minute" ? row.minutes : row.step,
    Math.max(0, (row.step_time ?? 0) - stages.reduce((sum, [key]) => sum + (row[key] ?? 0), 0))]);
  const other = rest.reduce((sum, [, y]) => sum + y, 0);
  if (other > 0.01 * total("step_time")) series.push({ name: "other", color: LAYERS, points: rest });
  const whole = total("step_time") || 1;
  const shares = [...stages, ["time/other", other]].map(([key, seconds]) => `${key.slice(5)} ${Math.round((100 * seconds) / whole)} %`);
  const plot = chart("time", { title: "Where the time went", isStack: true });
  plot.figure.querySelector("figcaption span").textContent = `Seconds of each step. In all: ${shares.join(", ")}.`;
  return [plot, series];
}

// Accuracy of each task at the first and the last evaluation, with intervals and the paired change.
async function drawTasks(target, run) {
  const steps = run.steps.evaluations, ends = [...new Set([steps[0], steps.at(-1)])].filter((step) => step !== undefined);
  const documents = await Promise.all(ends.map((step) => run.cached("tasks", step)));
  const newest = documents.at(-1);
  if (!newest || !Object.keys(newest).length) return target.replaceChildren();
  const rows = Object.entries(newest).map(([name, task]) => {
    const versus = task.delta_vs_step0;
    const lengths = documents.map((document) => document?.[name]?.mean_length).filter(Number.isFinite).map((x) => x.toFixed(0));
    return {
      name: task.constant ? `${name} (a constant earns ${percent(task.constant)})` : name,
      values: ends.map((step, n) => ({ name: `step ${step}`, ...documents[n]?.[name]?.accuracy })).filter((value) => "mean" in value),
      cells: [String(task.accuracy?.num_problems ?? ""), versus ? `${versus.difference >= 0 ? "+" : ""}${(100 * versus.difference).toFixed(1)}` : "",
        versus ? (versus.p_value < 0.001 ? "< 0.001" : versus.p_value.toFixed(3)) : "", lengths.join(" \u2192 ")],
    };
  });
  target.replaceChildren(node("figcaption", {}, node("b", { textContent: "Accuracy by task" }),
    node("span", { textContent: "Bars are 95 % intervals. Change in points and p: paired over problems." })),
    intervalChart(rows, "Accuracy by task", ["problems", "change", "p", "tokens"]));
}

function controls(keys) {
  const slider = node("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, ariaLabel: "smoothing",
    oninput: () => { state.smoothing = Number(slider.value); redraw(); },
  });
  const axis = (name) => button(`by ${name}`, () => { state.xName = name; state.range = null; redraw(); },
    { "aria-pressed": String(state.xName === name) });
  return node("div", { className: "controls" }, axis("step"), axis("minute"), node("label", {}, "smoothing ", slider),
    ...(state.range ? [button("whole run", () => { state.range = null; redraw(); }, { id: "whole" })] : []),
    button(state.showAll ? "fewer curves" : `all ${keys.size} metrics`, () => { state.showAll = !state.showAll; redraw(); }));
}

// Every plot of the view, as [chart, series].
function plots(runs, keys) {
  const has = (key) => runs.some((run) => run.points(key, "step").some(([, y]) => y !== 0));
  const list = [];
  if (runs.some((run) => run.evals.size)) list.push(evaluationPlot(runs));
  const others = [...keys].filter((key) => !(key in CURVES) && !["step", "kind", "minutes"].includes(key)).sort();
  for (const key of [...Object.keys(CURVES).filter(has), ...(state.showAll ? others : [])]) {
    const [title, text] = CURVES[key] ?? [key, ""];
    const series = key === "reward" && runs.length === 1 ? rewardSeries(runs[0])
      : runs.map((run, color) => ({ name: run.name, color, points: run.points(key, state.xName) }));
    list.push([chart(key, { title, text }), series]);
  }
  const levels = runs.length === 1 ? [...keys].filter((key) => key.startsWith("curriculum/")) : [];
  if (levels.length) {
    const series = levels.map((key, color) => ({ name: key.split("/")[1], color, points: runs[0].points(key, state.xName) }));
    list.push([chart("curriculum", { title: "Curriculum", text: "Level of difficulty of the training problems, by task." }), series]);
  }
  const times = runs.length === 1 ? timePlot(runs[0]) : null;
  return times ? [...list, times] : list;
}

export function drawCurves(main, runs) {
  const keys = new Set(runs.flatMap((run) => [...run.keys]));
  const list = plots(runs, keys);
  const wide = list.filter(([plot]) => plot.isStack || plot.key.startsWith("evaluation"));
  for (const [plot] of wide) plot.figure.classList.add("wide");
  const figures = list.map(([plot]) => plot.figure);
  const old = main.querySelector("#curves .charts");
  // The charts stay in the page, so that the pointer and the focus do.
  if (old && figures.length === old.children.length && figures.every((figure, n) => figure === old.children[n])) {
    const bar = main.querySelector(".controls");
    if (!bar.contains(document.activeElement) || document.activeElement.type !== "range") replace(bar, ...controls(keys).childNodes);
  } else {
    const tasks = node("figure", { id: "tasks" });
    const values = node("details", {}, node("summary", { textContent: "Last values as a table" }), node("div", { className: "scroll", id: "last" }));
    replace(main, node("div", { id: "curves" }, controls(keys), node("div", { className: "charts" }, ...figures), tasks, values));
  }
  for (const [plot, series] of list) {
    const isEvaluation = plot.key.startsWith("evaluation");
    plot.draw(series, { range: state.range, smoothing: isEvaluation || plot.isStack ? 0 : state.smoothing });
  }
  if (runs.length === 1) drawTasks(main.querySelector("#tasks"), runs[0]);
  const last = [...keys].filter((key) => key !== "kind").sort().map((key) => [key, ...runs.map((run) => run.last?.[key] ?? "")]);
  main.querySelector("#last").replaceChildren(table("Last values", ["metric", ...runs.map((run) => run.name)], last));
}

addEventListener("resize", () => { if (charts.size) redraw(); });
