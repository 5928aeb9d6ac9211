// The entry of the page of `whet watch`: the list of runs, the views, and events from the server.

import { drawCurves } from "./curves.js";
import { button, node, replace, visible } from "./dom.js";
import { drawEvaluation } from "./evaluation.js";
import { chosenGrid, drawGrids, grids } from "./grids.js";
import { drawGroups, updateSteps } from "./groups.js";
import { drawNow } from "./now.js";
import { Run, Stream } from "./runs.js";
import { current, onRedraw, redraw, state } from "./state.js";
import { drawTalk } from "./talk.js";
import { COLORINGS } from "./tokens.js";

const VIEWS = { now: "Now", curves: "Curves", groups: "Groups", evaluation: "Before and after", talk: "Talk", compare: "Compare" };
// What must change in a run folder before a view is drawn again.
const SHOWS = { now: ["rows", "status", "reset"], curves: ["rows", "reset", "evaluations"], evaluation: ["evaluations", "reset"], compare: ["rows", "reset"], groups: ["reset"], talk: [] };
const LIST_MS = 5000;
const main = document.getElementById("main");
const stream = new Stream(state.runs, onEvent);

// The address remembers what is shown, so that it can be sent to somebody.
function writeAddress() {
  const { view, step, problem, coloring, grid } = state;
  const parts = { runs: state.chosen.join("\n"), view, step, problem, coloring, grid };
  const known = Object.entries(parts).filter(([, value]) => value !== null && value !== "");
  history.replaceState(null, "", `#${new URLSearchParams(known)}`);
}
function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  state.chosen = (parts.get("runs") ?? "").split("\n").filter((name) => state.runs.has(name));
  if (Object.hasOwn(VIEWS, parts.get("view") ?? "")) state.view = parts.get("view");
  state.step = parts.get("step") ? Number(parts.get("step")) : null;
  state.problem = parts.get("problem");
  const coloring = parts.get("coloring") ?? "";
  if (coloring === "rule" || Object.hasOwn(COLORINGS, coloring)) state.coloring = coloring;
  state.grid = parts.get("grid");
}

async function loadRuns() {
  const answer = await (await fetch("/api/runs")).json();
  for (const entry of answer.runs) {
    const known = state.runs.get(entry.name);
    if (known) known.update(entry); else state.runs.set(entry.name, new Run(entry));
  }
  grids.list = answer.grids;
  return answer.runs.length;
}

function choose(names) {
  state.chosen = names;
  redraw();
}

function onEvent(name, changes) {
  drawState();
  if (name !== null && state.view === "groups" && name === state.chosen[0] && ("completions" in changes || "tokens" in changes)) updateSteps(main);
  if (SHOWS[state.view].some((part) => part in changes)) redraw();
}

function drawRuns() {
  const head = node("thead", {}, node("tr", {}, ...["", "run", "state", "model", "started"].map((text) => node("th", { textContent: text, scope: "col" }))));
  const body = node("tbody", {}, ...[...state.runs.values()].map((run) => {
    const position = state.chosen.indexOf(run.name), key = node("span", { className: "key" });
    const box = node("input", { type: "checkbox", checked: position >= 0, ariaLabel: `show ${run.name}` });
    box.onchange = () => choose(box.checked ? [...state.chosen, run.name] : state.chosen.filter((name) => name !== run.name));
    if (position >= 0) key.style.background = `var(--series-${position % 6})`;
    const only = button(run.name, () => choose([run.name]), { "aria-label": `show only ${run.name}` });
    const started = String(run.sessions[0]?.started ?? "").replace("T", " ").slice(0, 16);
    const cells = [box, node("span", {}, key, only), run.state, String(run.config.model_name_or_path ?? ""), started];
    return node("tr", {}, ...cells.map((cell) => node("td", {}, cell)));
  }));
  const list = document.getElementById("runs");
  if (!list.tBodies[0]?.isEqualNode(body) || state.chosen.length !== list.querySelectorAll(":checked").length) replace(list, list.caption, head, body);
}

function drawViews() {
  const shown = Object.entries(VIEWS).filter(([view]) => view !== "compare" || grids.list.length);
  replace(document.getElementById("views"), ...shown.map(([view, title]) =>
    button(title, () => { state.view = view; redraw(); }, view === state.view ? { "aria-current": "page" } : {})));
}

function drawState() {
  const run = current(), lost = stream.isLost ? "The server does not answer. " : "";
  const text = run ? visible(`${lost}${run.name}: ${run.state}, step ${run.last?.step ?? 0}`) : "Choose a run.";
  const target = document.getElementById("state");
  if (target.textContent !== text) target.textContent = text;
}

function draw() {
  const run = current();
  const inGrid = state.view === "compare" ? (chosenGrid()?.cells ?? []).map((cell) => cell.run).filter((name) => state.runs.has(name)) : [];
  stream.follow([...new Set([...state.chosen, ...inGrid])]);
  writeAddress();
  drawRuns();
  drawViews();
  drawState();
  main.setAttribute("aria-label", VIEWS[state.view]);
  if (state.view === "compare") return drawGrids(main, (names) => { state.view = "curves"; choose(names); });
  if (!run) return main.replaceChildren();
  if (state.view === "curves") return drawCurves(main, state.chosen.map((name) => state.runs.get(name)));
  ({ now: drawNow, groups: drawGroups, evaluation: drawEvaluation, talk: drawTalk })[state.view](main, run);
}

onRedraw(draw);
addEventListener("hashchange", () => { readAddress(); redraw(); });
const count = await loadRuns();
readAddress();
if (!state.chosen.length && count) state.chosen = [state.runs.keys().next().value];
document.getElementById("picker").open = count > 1 && innerWidth > 700;
if (count) draw(); else document.getElementById("state").textContent = "There is no run in this folder yet.";
setInterval(async () => {
  const known = state.runs.size, before = current()?.state;
  try {
    await loadRuns();
  } catch {
    return;  // the stream says that the server does not answer
  }
  if (current()?.state !== before) redraw();  // silent: no event tells that
  if (!state.chosen.length && !known && state.runs.size) choose([state.runs.keys().next().value]);
  if (["compare", "talk"].includes(state.view)) redraw();
  drawRuns();
  drawState();
}, LIST_MS);
