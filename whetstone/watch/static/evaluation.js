// The view "before and after": the fixed problems at the first and at the last evaluation, and at each between.

import { button, counted, node, replace, select, textNode, textOf } from "./dom.js";
import { searchBox, set, taskSelect } from "./filters.js";
import { drawHistory } from "./groups.js";
import { redraw, state } from "./state.js";
import { conversation } from "./turns.js";

const MAX_ROWS = 100;
const isRight = (row) => Boolean(row && (row.correct ?? row.parts?.correct));
const CHANGES = {
  all: () => true,
  "became right": (before, after) => !isRight(before) && isRight(after),
  "became wrong": (before, after) => isRight(before) && !isRight(after),
  "wrong at both": (before, after) => !isRight(before) && !isRight(after),
  "right at both": (before, after) => isRight(before) && isRight(after),
};
const firstSamples = (document) => (document?.completions ?? []).filter((row) => (row.sample ?? 0) === 0);

function cell(step, row) {
  if (!row) return node("td");
  const verdict = "correct" in (row.parts ?? { correct: 0 }) ? (isRight(row) ? "right" : "wrong") : `reward ${row.reward}`;
  const cut = row.finish === "length" ? ", cut off" : "";
  return node("td", {}, node("span", { className: "quiet step", textContent: `step ${step} ` }), node("span", { className: `chip ${verdict}`, textContent: verdict }),
    node("span", { className: "quiet", textContent: ` ${row.length ?? ""} tokens${cut}` }),
    row.turns?.length ? conversation(row, "") : textNode(row.completion));
}

export async function drawEvaluation(main, run) {
  const steps = run.steps.evaluations;
  if (!steps.length) return replace(main, node("p", { textContent: "No evaluation yet." }));
  const ends = [steps[0], steps.at(-1)];
  const [before, after] = await Promise.all(ends.map((step) => run.cached("evaluations", step)));
  if (state.view !== "evaluation") return;
  const text = state.text.toLowerCase(), all = firstSamples(before);
  const later = new Map(firstSamples(after).map((row) => [row.problem, row]));
  const pairs = all.map((row) => [row, later.get(row.problem)])
    .filter((pair) => CHANGES[state.change](...pair) && (!state.task || pair[0].task === state.task)
      && (!text || pair.some((row) => row && textOf(row).includes(text))));
  const history = node("div", { id: "problem" });
  const isChosen = all.some((row) => row.problem === state.problem);
  if (isChosen) drawHistory(history, run, state.problem);
  const rows = pairs.slice(0, MAX_ROWS).map(([first, last]) => node("tr", {},
    node("td", {}, button(String(first.problem), () => { state.problem = first.problem; redraw(); scrollTo(0, 0); }),
      textNode(first.messages?.at(-1)?.content), node("div", { className: "quiet", textContent: first.gold === null || first.gold === undefined ? "" : `right answer: ${first.gold}` })),
    cell(ends[0], first), steps.length > 1 ? cell(ends[1], last) : null));
  const heads = ["problem", `step ${ends[0]}`, ...(steps.length > 1 ? [`step ${ends[1]}`] : [])];
  replace(main, node("div", { className: "controls" },
    select("change", Object.keys(CHANGES).map((kind) => [kind, kind]), state.change, set("change")),
    taskSelect(all), searchBox(),
    node("span", { className: "quiet", id: "matches", textContent: `${pairs.length} of ${counted(all.length, "problem")}${pairs.length > MAX_ROWS ? `, the first ${MAX_ROWS} shown` : ""}` })),
    ...(isChosen ? [node("h2", { textContent: `${state.problem} over steps` }), history] : []),
    node("table", { className: "pairs" }, node("caption", { className: "hidden", textContent: "Problems before and after" }),
      node("thead", {}, node("tr", {}, ...heads.map((head) => node("th", { scope: "col", textContent: head })))), node("tbody", {}, ...rows)));
}
