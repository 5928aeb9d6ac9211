// The view of groups: the completions of a step by prompt, with filters, the rewards, and the tokens.

import { LineChart } from "./chart.js";
import { button, counted, format, mean, node, replace, select, table, textNode, textOf, visible } from "./dom.js";
import { searchBox, set, taskSelect } from "./filters.js";
import { redraw, state } from "./state.js";
import { COLORINGS, TokenView, hasNumbers, ruleText } from "./tokens.js";
import { conversation, turnsOf } from "./turns.js";

const BINS = 10, MAX_GROUPS = 500;
const isJudged = (rows) => rows.every((row) => "correct" in (row.parts ?? {}));
const isRight = (row) => row.parts?.correct === 1;
const KINDS = {
  all: () => true,
  "all right": (rows) => isJudged(rows) && rows.every(isRight),
  "all wrong": (rows) => isJudged(rows) && !rows.some(isRight),
  mixed: (rows) => (isJudged(rows) ? new Set(rows.map(isRight)).size > 1 : new Set(rows.map((row) => row.reward)).size > 1),
  truncated: (rows) => rows.some((row) => row.finish === "length"),
  failed: (rows) => rows.some((row) => row.failure),
};

function byProblem(rows) {
  const groups = new Map();
  for (const row of rows) {
    if (!groups.has(row.problem)) groups.set(row.problem, []);
    groups.get(row.problem).push(row);
  }
  return groups;
}

function rewardBins(rows) {
  const rewards = rows.map((row) => row.reward).filter(Number.isFinite);
  const low = rewards.reduce((a, b) => Math.min(a, b), 0), high = rewards.reduce((a, b) => Math.max(a, b), 1);
  return { low, width: (high - low) / BINS || 1 };
}
const binOf = (reward, { low, width }) => Math.min(BINS - 1, Math.floor((reward - low) / width + 1e-9));

function histogram(rows, bins) {
  const counts = Array(BINS).fill(0);
  for (const row of rows) if (Number.isFinite(row.reward)) counts[binOf(row.reward, bins)]++;
  const highest = Math.max(...counts, 1);
  const bars = counts.map((count, bin) => {
    const range = `${format(bins.low + bin * bins.width)} to ${format(bins.low + (bin + 1) * bins.width)}`;
    const choose = () => { state.bin = state.bin === bin ? null : bin; redraw(); };
    const bar = node("i");
    bar.style.height = `${(100 * count) / highest}%`;
    const result = button("", choose, {
      "aria-label": `reward ${range}: ${count} completions`, "aria-pressed": String(state.bin === bin),
      title: `reward ${range}: ${counted(count, "completion")}`, "data-count": count,
    });
    result.append(node("span", { textContent: count ? String(count) : "" }), bar, node("small", { textContent: format(bins.low + bin * bins.width) }));
    result.disabled = !count && state.bin !== bin;
    return result;
  });
  return node("figure", {}, node("figcaption", {}, node("b", { textContent: "Rewards of the step" }),
    node("span", { textContent: "Completions by reward. Choose a bar to see its groups." })),
    node("div", { className: `bars ${state.bin === null ? "" : "chosen"}` }, ...bars));
}

function matches(rows, bins) {
  const text = state.text.toLowerCase();
  return KINDS[state.filter](rows) && (!state.task || rows[0].task === state.task)
    && (!text || rows.some((row) => textOf(row).includes(text)))
    && (state.bin === null || rows.some((row) => binOf(row.reward, bins) === state.bin));
}

function controls(run, steps, rows, tokens, summary) {
  const known = (name) => !tokens || tokens.parts.some((part) => hasNumbers(part, name));
  const colorings = [...Object.entries(COLORINGS).map(([name, { title }]) => [name, title]), ["rule", "the rule that removed or clipped it"]]
    .map(([name, title]) => (known(name) ? [name, title] : [name, `${title} (not part of this run)`, true]));
  const newest = steps.at(-1);
  return node("div", { className: "controls" },
    select("step", steps.map((step) => [step, `step ${step}${run.steps.tokens.includes(step) ? " (tokens)" : ""}`]), state.step, (value) => { state.step = Number(value); redraw(); }),
    ...(newest === state.step ? [] : [button(`newest: step ${newest}`, () => { state.step = newest; redraw(); })]),
    select("filter", Object.keys(KINDS).map((kind) => [kind, kind]), state.filter, set("filter")),
    taskSelect(rows), searchBox(), node("label", {}, "color tokens by ", select("color tokens by", colorings, state.coloring, set("coloring"))),
    node("span", { className: "quiet", id: "matches", textContent: summary }));
}

function stepsOf(run) { return [...new Set([...run.steps.completions, ...run.steps.tokens])].sort((a, b) => a - b); }

let drawControls = () => {};

// Newer steps while one is shown: only the choice of steps changes.
export function updateSteps(main) {
  if (state.step === null || !main.querySelector("select[aria-label=step]")) return redraw();
  if (document.activeElement?.type !== "search") drawControls();
}

export async function drawGroups(main, run) {
  const steps = stepsOf(run);
  if (!steps.length) return replace(main, node("p", { textContent: "No completions are written yet: log_completions_steps says when." }));
  if (!steps.includes(state.step)) state.step = run.steps.completions.at(-1) ?? steps.at(-1);
  const step = state.step;
  const [tokens, written] = await Promise.all(["tokens", "completions"].map((what) => (run.steps[what].includes(step) ? run.cached(what, step) : null)));
  if (state.view !== "groups" || state.step !== step) return;
  const rows = written?.length ? written : (tokens?.parts ?? []).map((part) => part.row);
  const withTokens = new Set((tokens?.parts ?? []).map((part) => part.row.problem));
  const bins = rewardBins(rows), all = byProblem(rows);
  const groups = [...all].filter(([, list]) => matches(list, bins)).sort(([a], [b]) => withTokens.has(b) - withTokens.has(a));
  const picked = groups.find(([problem]) => problem === state.problem) ?? groups[0];
  const list = node("div", { className: "list", attributes: { role: "group", "aria-label": "groups" } }, ...groups.slice(0, MAX_GROUPS).map(([problem, own]) => {
    const average = format(mean(own.map((row) => row.reward))), right = isJudged(own) ? `, ${own.filter(isRight).length} of ${own.length} right` : "";
    const label = `${problem}${right}, mean reward ${average}${withTokens.has(problem) ? ", has tokens" : ""}`;
    const result = button("", () => { state.problem = problem; redraw(); },
      { "aria-label": visible(label), "data-problem": problem, ...(problem === picked?.[0] ? { "aria-current": "true" } : {}) });
    const marks = own.map((row) => node("i", { className: isJudged([row]) ? (isRight(row) ? "right" : "wrong") : "", title: format(row.reward) }));
    result.append(node("span", { textContent: `${withTokens.has(problem) ? "\u25cf " : ""}${problem}` }),
      node("span", { className: "marks" }, ...marks, ` ${average}`));
    return result;
  }));
  const summary = `${groups.length} of ${counted(all.size, "group")}${withTokens.size ? "; \u25cf has tokens" : ""}`;
  const bar = controls(run, steps, rows, tokens, summary);
  drawControls = () => replace(bar, ...controls(run, stepsOf(run), rows, tokens, summary).childNodes);
  replace(main, bar, histogram(rows, bins),
    node("div", { className: "groups" }, list, picked ? groupNode(run, picked, tokens, bins) : node("p", { textContent: "No group matches." })));
}

function facts(row, average, part) {
  const advantage = part?.numbers.advantage?.find((x) => typeof x === "number");
  const pairs = [
    ["reward", format(row.reward)],
    [advantage === undefined ? "to the mean" : "advantage", format(advantage ?? row.reward - average)],
    ...Object.entries(row.parts ?? {}).map(([name, value]) => [name, format(value)]),
    ["tokens", String(row.length ?? "")],
    ["finish", row.finish === "length" ? "cut off" : String(row.finish ?? "")],
    ["answer", row.answer === null || row.answer === undefined ? "none" : String(row.answer)],
    ["right answer", row.gold === null || row.gold === undefined ? "" : String(row.gold)],
    ["outcome", String(row.outcome ?? "")],
    ["tests", (row.tests ?? []).join(", ")],
    ["scoring failed", String(row.failure ?? "")],
    ...episodeFacts(row),
    ...Object.entries(row.extra ?? {}).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]),
  ];
  return node("dl", { className: "facts" }, ...pairs.filter(([, value]) => value !== "")
    .map(([name, value]) => node("div", {}, node("dt", { textContent: name }), node("dd", { textContent: value.slice(0, 2000) }))));
}

function episodeFacts(row) {
  if (!row.turns) return [];
  return [["turns", String(turnsOf(row).length)], ["waiting for the environment", typeof row.environment_s === "number" ? `${format(row.environment_s)} s` : ""],
    ["tool calls", String(row.tool_calls ?? "")], ["failed tool calls", String(row.tool_errors || "")], ["environment failed", String(row.environment_error ?? "")]];
}

// Why the reward is what it is, in a sentence.
function reason(row) {
  if (row.environment_error) return "Not paid: the environment failed.";
  if (row.failure) return "Not paid: the scorer failed.";
  if (row.outcome && !isRight(row)) return `Not right: ${row.outcome}.`;
  if (row.answer === null || row.answer === undefined) return "No answer was found in the text.";
  if (!isJudged([row])) return "";
  if (isRight(row)) return "Right.";
  return row.finish === "length" ? "Wrong, and cut off at max_completion_length." : row.reward > 0 ? "Wrong, and paid in part." : "Wrong.";
}

function completionNode(row, average, part, tokens, bins) {
  const removed = part && state.coloring !== "rule" ? tokens.rules.map((name, bit) => [name, part.rules.filter((bits) => (bits >> bit) & 1).length]).filter(([, count]) => count) : [];
  const key = JSON.stringify([state.step, row.problem, row.sample]);
  if (part && !state.tokens.has(key)) state.tokens.set(key, {});
  const coloring = part && hasNumbers(part, state.coloring) ? state.coloring : "logprob";
  const shown = { texts: tokens?.texts, ruleNames: tokens?.rules, coloring, position: state.tokens.get(key), turns: turnsOf(row) };
  const tokenView = part ? new TokenView(part, shown) : null;
  const view = tokenView?.root ?? (row.turns?.length ? conversation(row) : textNode(row.completion));
  const kind = isJudged([row]) ? (isRight(row) ? "right" : "wrong") : "";
  const isChosen = state.bin === null || binOf(row.reward, bins) === state.bin;
  const values = part ? node("details", { className: "values", ontoggle: (event) => {
    event.target.replaceChildren(event.target.firstChild, ...(event.target.open ? [node("div", { className: "scroll" }, tokenView.table())] : []));
  } }, node("summary", { textContent: "Tokens as a table" })) : null;
  return node("article", { className: `completion ${kind} ${isChosen ? "" : "faint"}`, ariaLabel: `sample ${row.sample}` },
    node("div", { className: "reason", textContent: reason(row) }), facts(row, average, part),
    ...removed.map(([name, count]) => node("div", { className: "quiet", textContent: `${ruleText(name)}: ${counted(count, "token")} of ${row.length ?? part.ids.length}` })), view, values);
}

function groupNode(run, [problem, rows], tokens, bins) {
  const average = mean(rows.map((row) => row.reward));
  const history = node("div", { id: "history" });
  // A report has no server that could sample.
  const talk = run.documents ? null : button("try this problem", () => { state.prompt = rows[0].messages ?? []; state.view = "talk"; redraw(); }, { id: "try" });
  const result = node("section", { ariaLabel: "group" }, node("div", { className: "group-head" }, node("h2", { textContent: problem }), talk));
  for (const message of rows[0].messages ?? []) result.append(node("div", { className: "quiet", textContent: String(message.role) }), textNode(message.content));
  const parts = new Map((tokens?.parts ?? []).filter((part) => part.row.problem === problem).map((part) => [part.row.sample, part]));
  result.append(history, node("div", { className: "samples" }, ...rows.map((row) => completionNode(row, average, parts.get(row.sample), tokens, bins))));
  drawHistory(history, run, problem);
  return result;
}

// The same problem at other steps: training problems come again, evaluation problems at each evaluation.
export async function drawHistory(target, run, problem) {
  const entries = (await run.cached("problems", problem))?.entries ?? [];
  if (entries.length < 2) return;
  const plot = new LineChart("problem", { title: "This problem over steps", text: "Mean reward of its completions at each step that has them." });
  const rows = entries.map((entry) => [
    button(`step ${entry.step}`, () => { state.step = entry.step; state.view = entry.kind === "evaluation" ? "evaluation" : "groups"; redraw(); }),
    entry.kind, entry.count, entry.reward, entry.right === null ? "" : `${entry.right} of ${entry.count}`, entry.length,
  ]);
  target.replaceChildren(plot.figure, node("details", { className: "values", open: entries.length < 8 }, node("summary", { textContent: "Steps" }),
    node("div", { className: "scroll" }, table("This problem over steps", ["step", "kind", "completions", "reward", "right", "tokens"], rows))));
  const kinds = ["training", "evaluation"].map((kind, color) => ({ name: kind, color, hasMarks: true, points: entries.filter((entry) => entry.kind === kind).map((entry) => [entry.step, entry.reward]) }));
  plot.draw(kinds);
}
