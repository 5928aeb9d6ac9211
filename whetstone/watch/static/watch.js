import { LineChart, format } from "./chart.js";
import { Run } from "./runs.js";
import { COLORINGS, ruleText, tokenNode, visible } from "./tokens.js";

const VIEWS = { now: "Now", curves: "Curves", groups: "Groups", evaluation: "Before and after" };
const FIRST = ["reward", "accuracy", "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio",
  "entropy", "kl", "grad_norm", "loss", "sampling/sampling_logp_difference/mean", "tokens_per_s", "step_time"];
const state = { runs: new Map(), chosen: [], view: "now", xName: "step", smoothing: 0, range: null, step: null,
  problem: null, filter: "all", text: "", bin: null, coloring: "logprob", showAll: false,
  change: "all" };
const MOST_ROWS = 200;
const main = document.getElementById("main");
let redrawDue = false;

// All text of the page passes here: it is set as text, and control characters become visible.
function node(name, properties = {}, ...children) {
  if (typeof properties.textContent === "string") properties = { ...properties, textContent: visible(properties.textContent) };
  const result = Object.assign(document.createElement(name), properties);
  const contents = children.filter((child) => child !== null && child !== undefined);
  result.append(...contents.map((child) => (typeof child === "string" ? visible(child) : child)));
  return result;
}
function button(text, onclick, attributes = {}) {
  const result = node("button", { type: "button", textContent: text, onclick });
  for (const [key, value] of Object.entries(attributes)) result.setAttribute(key, value);
  return result;
}
const current = () => state.runs.get(state.chosen[0]) ?? null;
const percent = (x) => (typeof x === "number" ? `${(100 * x).toFixed(1)} %` : "");
function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return parts[0] ? `${parts[0]}:${pad(parts[1])}:${pad(parts[2])}` : `${parts[1]}:${pad(parts[2])}`;
}

// The address remembers what is shown, so that it can be sent to somebody.
function writeAddress() {
  const parts = { runs: state.chosen.join("\n"), view: state.view, step: state.step ?? "", problem: state.problem ?? "" };
  history.replaceState(null, "", `#${new URLSearchParams(parts)}`);
}
function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  state.chosen = (parts.get("runs") ?? "").split("\n").filter((name) => state.runs.has(name));
  if (parts.get("view") in VIEWS) state.view = parts.get("view");
  state.step = parts.get("step") ? Number(parts.get("step")) : null;
  state.problem = parts.get("problem") || null;
}

async function loadRuns() {
  const entries = await (await fetch("/api/runs")).json();
  for (const entry of entries) {
    const known = state.runs.get(entry.name);
    if (known) known.update(entry); else state.runs.set(entry.name, new Run(entry));
  }
  return entries.length;
}

function choose(names) {
  for (const [name, run] of state.runs) if (!names.includes(name)) run.leave();
  state.chosen = names;
  for (const name of names) state.runs.get(name).follow(redraw);
  redraw();
}

function drawRuns() {
  const head = node("thead", {}, node("tr", {}, ...["", "run", "state", "model", "started"].map((t) => node("th", { textContent: t, scope: "col" }))));
  const body = node("tbody");
  for (const run of state.runs.values()) {
    const box = node("input", { type: "checkbox", checked: state.chosen.includes(run.name), ariaLabel: `show ${run.name}` });
    box.onchange = () => choose(box.checked ? [...state.chosen, run.name] : state.chosen.filter((name) => name !== run.name));
    const position = state.chosen.indexOf(run.name);
    const key = node("span", { className: "key" });
    if (position >= 0) key.style.background = `var(--series-${position % 6})`;
    const cells = [box, node("span", {}, key, run.name), run.state, String(run.config.model_name_or_path ?? ""), String(run.sessions[0]?.started ?? "").replace("T", " ").slice(0, 16)];
    body.append(node("tr", {}, ...cells.map((cell) => node("td", {}, cell))));
  }
  const table = document.getElementById("runs");
  table.replaceChildren(table.caption, head, body);
}

function drawViews() {
  document.getElementById("views").replaceChildren(...Object.entries(VIEWS).map(([view, title]) =>
    button(title, () => { state.view = view; redraw(); }, view === state.view ? { "aria-current": "page" } : {})));
}

function redraw() {
  if (redrawDue) return;
  redrawDue = true;
  setTimeout(() => { redrawDue = false; draw(); }, 100);
}

function draw() {
  const run = current();
  writeAddress();
  drawRuns();
  drawViews();
  const lost = run?.isLost ? "The server does not answer. " : "";
  document.getElementById("state").textContent = run ? visible(`${lost}${run.name}: ${run.state}, step ${run.last?.step ?? 0}`) : "Choose a run.";
  if (!run) return main.replaceChildren();
  ({ now: drawNow, curves: drawCurves, groups: drawGroups, evaluation: drawEvaluation })[state.view](run);
}

function tile(title, value) { return node("div", { className: "tile" }, node("span", { className: "quiet", textContent: title }), node("b", { textContent: value })); }

async function drawNow(run) {
  const row = run.last ?? {}, status = run.status ?? {};
  const total = run.config.max_steps, recent = run.points("step_time", "step").slice(-20).map(([, y]) => y);
  const mean = recent.reduce((a, b) => a + b, 0) / recent.length;
  const stages = (status.stages ?? []).map((thread) => thread.join(": ")).join("; ");
  const tiles = node("div", { className: "tiles" },
    tile("state", run.state), tile("step", total > 0 ? `${row.step ?? 0} / ${total}` : String(row.step ?? 0)),
    tile("time left", run.state === "running" && total > 0 && recent.length ? duration(mean * (total - row.step)) : ""),
    tile("tokens/s", format(row.tokens_per_s)), tile("reward", format(row.reward)), tile("accuracy", percent(row.accuracy)),
    tile("peak memory", row.peak_memory_gb ? `${format(row.peak_memory_gb)} GB` : ""),
    tile("GPU busy", percent(row["gpu/utilization_ratio"])));
  for (const empty of tiles.querySelectorAll("b:empty")) empty.parentElement.remove();
  const findings = (await run.fetch("findings")) ?? [];
  const doing = run.state === "silent" ? `No sign of life since ${new Date(status.time * 1000).toLocaleTimeString()}.` : stages || status.reason || "";
  if (state.view !== "now") return;
  const [question, completion] = status.newest ?? [];
  const newest = question === undefined ? [] : [node("h2", { textContent: "Sampled last" }), node("pre", { className: "quiet", textContent: question }), node("pre", { id: "newest", textContent: completion })];
  main.replaceChildren(tiles, node("p", { id: "stage", textContent: doing }), ...newest, node("h2", { textContent: "What stands out" }),
    ...findings.map((f) => node("div", { className: `finding ${f.severity}` }, node("b", { textContent: f.title }), node("div", { textContent: f.evidence }), node("div", { className: "quiet", textContent: f.remedy }))));
}

const charts = new Map();
function drawCurves() {
  const runs = state.chosen.map((name) => state.runs.get(name));
  const keys = new Set(runs.flatMap((run) => Object.keys(run.last ?? {})));
  const others = [...keys].filter((key) => !FIRST.includes(key) && !["step", "kind", "minutes"].includes(key)).sort();
  const shown = [...FIRST.filter((key) => keys.has(key)), ...(state.showAll ? others : [])];
  const slider = node("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, ariaLabel: "smoothing", oninput: () => { state.smoothing = Number(slider.value); redraw(); } });
  const controls = node("div", { className: "controls" },
    ...["step", "minute"].map((name) => button(`by ${name}`, () => { state.xName = name; state.range = null; charts.clear(); redraw(); }, { "aria-pressed": String(state.xName === name) })),
    node("label", {}, "smoothing ", slider),
    button("whole run", () => { state.range = null; redraw(); }),
    button(state.showAll ? "fewer curves" : `all ${keys.size} metrics`, () => { state.showAll = !state.showAll; redraw(); }));
  const chart = (title) => {
    if (!charts.has(title)) charts.set(title, new LineChart(title, { xName: state.xName, onZoom: (range) => { state.range = range; redraw(); } }));
    return charts.get(title);
  };
  const drawn = [];
  if (runs.some((run) => run.evals.size)) {
    const plot = chart("evaluation accuracy");
    plot.draw(runs.map((run, color) => {
      const points = run.evalPoints("accuracy", state.xName), high = run.evalPoints("accuracy_high", state.xName);
      return { name: run.name, color, points, start: points[0]?.[1], band: run.evalPoints("accuracy_low", state.xName).map(([x, low], n) => [x, low, high[n]?.[1] ?? low]) };
    }), { range: state.range });
    drawn.push(plot.figure);
  }
  for (const key of shown) {
    const plot = chart(key);
    plot.draw(runs.map((run, color) => ({ name: run.name, color, points: run.points(key, state.xName) })), { range: state.range, smoothing: state.smoothing });
    drawn.push(plot.figure);
  }
  const table = node("table", {}, node("caption", { className: "hidden", textContent: "Last values" }),
    node("thead", {}, node("tr", {}, node("th", { textContent: "metric" }), ...runs.map((run) => node("th", { className: "number", textContent: run.name })))),
    node("tbody", {}, ...[...keys].filter((key) => key !== "kind").sort().map((key) => node("tr", {}, node("th", { scope: "row", textContent: key }), ...runs.map((run) => node("td", { className: "number", textContent: format(run.last?.[key]) }))))));
  if (main.firstChild?.id === "curves" && document.activeElement === main.querySelector("input[type=range]")) {
    main.querySelector(".charts").replaceChildren(...drawn);  // the slider keeps the pointer
    return;
  }
  main.replaceChildren(node("div", { id: "curves" }, controls, node("div", { className: "charts" }, ...drawn), node("details", {}, node("summary", { textContent: "Last values as a table" }), node("div", { className: "scroll" }, table))));
}

const cache = new Map();
async function cached(run, what, step) {
  const key = JSON.stringify([run.name, what, step]);
  if (!cache.has(key)) {
    if (cache.size > 20) cache.delete(cache.keys().next().value);
    cache.set(key, await run.fetch(what, step));
  }
  return cache.get(key);
}

function byProblem(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.problem, [...(groups.get(row.problem) ?? []), row]);
  return groups;
}
const KINDS = {
  all: () => true,
  "all right": (rows) => rows.every((row) => row.parts?.correct === 1),
  "all wrong": (rows) => rows.every((row) => row.parts?.correct === 0),
  mixed: (rows) => new Set(rows.map((row) => row.reward)).size > 1,
  truncated: (rows) => rows.some((row) => row.finish === "length"),
  failed: (rows) => rows.some((row) => row.failure),
};

async function drawGroups(run) {
  const steps = [...new Set([...run.steps.completions, ...run.steps.tokens])].sort((a, b) => a - b);
  if (!steps.length) return main.replaceChildren(node("p", { textContent: "No completions are written yet: log_completions_steps says when." }));
  if (!steps.includes(state.step)) state.step = run.steps.completions.at(-1) ?? steps.at(-1);
  const step = state.step, tokens = run.steps.tokens.includes(step) ? await cached(run, "tokens", step) : null;
  const written = run.steps.completions.includes(step) ? await cached(run, "completions", step) : null;
  const rows = written?.length ? written : (tokens?.parts ?? []).map((part) => part.row);
  const withTokens = new Set((tokens?.parts ?? []).map((part) => part.row.problem));
  if (state.view !== "groups" || state.step !== step) return;
  const matches = (list) => KINDS[state.filter](list) && (!state.text || list.some((row) => JSON.stringify([row.messages, row.completion]).toLowerCase().includes(state.text.toLowerCase())))
    && (state.bin === null || list.some((row) => binOf(row.reward, bins) === state.bin));
  const bins = rewardBins(rows);
  const groups = [...byProblem(rows)].filter(([, list]) => matches(list)).sort(([a], [b]) => withTokens.has(b) - withTokens.has(a));
  const picked = groups.find(([problem]) => problem === state.problem) ?? groups[0];
  const stepBox = node("select", { ariaLabel: "step", onchange: () => { state.step = Number(stepBox.value); redraw(); } }, ...steps.map((s) => node("option", { value: s, textContent: `step ${s}${run.steps.tokens.includes(s) ? " (tokens)" : ""}`, selected: s === step })));
  const filter = node("select", { ariaLabel: "filter", onchange: () => { state.filter = filter.value; redraw(); } }, ...Object.keys(KINDS).map((kind) => node("option", { textContent: kind, selected: kind === state.filter })));
  const search = node("input", { type: "search", placeholder: "text", value: state.text, ariaLabel: "text of prompt or completion", onchange: () => { state.text = search.value; redraw(); } });
  const coloring = node("select", { ariaLabel: "color tokens by", onchange: () => { state.coloring = coloring.value; redraw(); } }, ...[...Object.entries(COLORINGS).map(([name, c]) => [name, c.title]), ["rule", "the rule that removed it"]].map(([value, textContent]) => node("option", { value, textContent, selected: value === state.coloring })));
  const list = node("div", { className: "list" }, ...groups.map(([problem, rowsOf]) => {
    const rewards = rowsOf.map((row) => format(row.reward)).join(" ");
    return button(`${withTokens.has(problem) ? "\u25cf " : ""}${problem}  ${rewards}`, () => { state.problem = problem; redraw(); }, problem === picked?.[0] ? { "aria-current": "true" } : {});
  }));
  main.replaceChildren(node("div", { className: "controls" }, stepBox, filter, search, node("label", {}, "color tokens by ", coloring), node("span", { className: "quiet", textContent: `${groups.length} of ${byProblem(rows).size} groups${withTokens.size ? "; \u25cf has tokens" : ""}` })),
    histogram(rows, bins), node("div", { className: "groups" }, list, picked ? groupNode(picked, tokens) : node("p", { textContent: "No group matches." })));
}

function rewardBins(rows) {
  const rewards = rows.map((row) => row.reward).filter(Number.isFinite);
  const low = Math.min(...rewards, 0), high = Math.max(...rewards, 1);
  return { low, width: (high - low) / 10 || 1 };
}
function binOf(reward, { low, width }) { return Math.min(9, Math.floor((reward - low) / width)); }
function histogram(rows, bins) {
  const counts = Array(10).fill(0);
  for (const row of rows) if (Number.isFinite(row.reward)) counts[binOf(row.reward, bins)]++;
  const highest = Math.max(...counts, 1);
  const bars = counts.map((count, bin) => {
    const range = `${format(bins.low + bin * bins.width)} to ${format(bins.low + (bin + 1) * bins.width)}`;
    const result = button("", () => { state.bin = state.bin === bin ? null : bin; redraw(); }, { "aria-label": `reward ${range}: ${count} completions`, "aria-pressed": String(state.bin === null || state.bin === bin), title: `${range}: ${count}` });
    result.style.height = `${(100 * count) / highest}%`;
    return result;
  });
  return node("details", { open: true }, node("summary", { textContent: "Rewards of the step" }), node("div", { className: "bars" }, ...bars));
}

function groupNode([problem, rows], tokens) {
  const result = node("section", { ariaLabel: problem }, node("h2", { textContent: problem }));
  for (const message of rows[0].messages ?? []) result.append(node("div", { className: "quiet", textContent: message.role }), node("pre", { textContent: String(message.content) }));
  const mean = rows.reduce((a, row) => a + row.reward, 0) / rows.length;
  for (const row of rows) {
    const part = tokens?.parts.find((p) => p.row.problem === problem && p.row.sample === row.sample);
    const parts = Object.entries(row.parts ?? {}).map(([name, value]) => `${name} ${format(value)}`).join(", ");
    const facts = [`reward ${format(row.reward)} (${row.reward >= mean ? "+" : ""}${format(row.reward - mean)} to the mean)`, parts, `${row.length} tokens`, row.finish === "length" ? "cut off" : "", row.answer === null ? "no answer found" : `answer: ${row.answer}`, row.failure ? `scoring failed: ${row.failure}` : ""].filter(Boolean);
    const readout = node("div", { className: "readout" });
    const removed = part ? [...new Set(part.rules.flatMap((bits) => tokens.rules.filter((_, bit) => (bits >> bit) & 1)))].map(ruleText) : [];
    result.append(node("div", { className: `completion ${row.parts?.correct === 1 ? "right" : row.parts?.correct === 0 ? "wrong" : ""}` },
      node("div", { textContent: facts.join("; ") }), ...removed.map((text) => node("div", { className: "quiet", textContent: text })),
      part ? tokenNode(part, tokens.texts, tokens.rules, state.coloring, (text) => { readout.textContent = text; }) : node("pre", { textContent: String(row.completion) }), readout));
  }
  return result;
}

const isRight = (row) => Boolean(row && (row.correct ?? row.parts?.correct));
const CHANGES = {
  all: () => true,
  "became right": (before, after) => !isRight(before) && isRight(after),
  "became wrong": (before, after) => isRight(before) && !isRight(after),
  "wrong at both": (before, after) => !isRight(before) && !isRight(after),
};

async function drawEvaluation(run) {
  const steps = run.steps.evaluations;
  if (!steps.length) return main.replaceChildren(node("p", { textContent: "No evaluation yet." }));
  const ends = [steps[0], steps.at(-1)];
  const [before, after] = await Promise.all(ends.map((step) => cached(run, "evaluations", step)));
  const later = new Map((after?.completions ?? []).map((row) => [row.problem, row]));
  const pairs = (before?.completions ?? []).map((row) => [row, later.get(row.problem)]).filter((pair) => CHANGES[state.change](...pair));
  const over = state.problem && steps.length ? await Promise.all(steps.slice(-12).map(async (step) => [step, (await cached(run, "evaluations", step))?.completions.find((row) => row.problem === state.problem)])) : [];
  if (state.view !== "evaluation") return;
  const filter = node("select", { ariaLabel: "change", onchange: () => { state.change = filter.value; redraw(); } }, ...Object.keys(CHANGES).map((kind) => node("option", { textContent: kind, selected: kind === state.change })));
  const cell = (row) => node("td", {}, node("div", { textContent: row ? (isRight(row) ? "right" : "wrong") : "" }), node("pre", { textContent: row ? String(row.completion ?? "") : "" }));
  const rows = pairs.slice(0, MOST_ROWS).map(([first, last]) => node("tr", {},
    node("td", {}, button(String(first.problem), () => { state.problem = first.problem; redraw(); }), node("pre", { textContent: String(first.messages?.at(-1)?.content ?? "") }), node("div", { className: "quiet", textContent: `gold: ${first.gold ?? ""}` })),
    cell(first), cell(steps.length > 1 ? last : null)));
  const known = over.filter(([, row]) => row);
  const detail = known.length ? node("section", { id: "problem" }, node("h2", { textContent: `${state.problem} at each evaluation` }), ...known.map(([step, row]) => node("div", { className: `completion ${isRight(row) ? "right" : "wrong"}` }, node("b", { textContent: `step ${step}` }), node("pre", { textContent: String(row.completion) })))) : null;
  main.replaceChildren(node("div", { className: "controls" }, filter, node("span", { className: "quiet", textContent: `${pairs.length} of ${before?.completions.length ?? 0} problems${pairs.length > MOST_ROWS ? `, the first ${MOST_ROWS} shown` : ""}` })),
    ...(detail ? [detail] : []),
    node("div", { className: "wide" }, node("table", {}, node("thead", {}, node("tr", {}, ...["problem", `step ${ends[0]}`, steps.length > 1 ? `step ${ends[1]}` : ""].map((text) => node("th", { textContent: text })))), node("tbody", {}, ...rows))));
}

addEventListener("hashchange", () => { readAddress(); choose(state.chosen); });
const count = await loadRuns();
readAddress();
if (!state.chosen.length && count) state.chosen = [state.runs.keys().next().value];
choose(state.chosen);
document.getElementById("picker").open = count > 1;
if (!count) document.getElementById("state").textContent = "There is no run in this folder yet.";
setInterval(async () => { await loadRuns(); drawRuns(); }, 5000);
