// The view "now": what the run does at this moment, and what `whet explain` says of it so far.

import { duration, format, mean, node, percent, replace, textNode } from "./dom.js";
import { state } from "./state.js";

function tile(title, value) {
  return node("div", { className: "tile" }, node("dt", { textContent: title }), node("dd", { textContent: value }));
}

function tiles(run) {
  const row = run.last ?? {}, total = run.config.max_steps, isRunning = run.state === "running";
  const recent = run.points("step_time", "step").slice(-20).map(([, y]) => y);
  const left = isRunning && total > 0 && recent.length ? duration(mean(recent) * (total - row.step)) : "";
  const resumed = run.sessions.filter((session) => typeof session.resumed_from_step === "number");
  const values = [
    ["state", run.state], ["step", total > 0 ? `${row.step ?? 0} / ${total}` : String(row.step ?? 0)], ["time left", left],
    ["tokens/s", format(row.tokens_per_s)], ["reward", format(row.reward)], ["accuracy", percent(row.accuracy)],
    ["seconds a step", format(row.step_time)], ["peak memory", row.peak_memory_gb ? `${format(row.peak_memory_gb)} GB` : ""],
    ["GPU busy", percent(row["gpu/utilization_ratio"])],
    ["resumed", resumed.length ? `at step ${resumed.map((session) => session.resumed_from_step).join(", ")}` : ""],
  ];
  return node("dl", { className: "tiles" }, ...values.filter(([, value]) => value !== "").map(([title, value]) => tile(title, value)));
}

export async function drawNow(main, run) {
  const status = run.status ?? {};
  const findings = (await run.cached("findings", run.last?.step ?? 0)) ?? [];  // once for each step
  if (state.view !== "now") return;
  const stages = (status.stages ?? []).map((thread) => thread.join(": ")).join("; ");
  const doing = run.state === "silent" ? `No sign of life since ${new Date(status.time * 1000).toLocaleString()}: it was killed, or its machine is gone.` : stages || status.reason || "";
  const [question, completion] = status.newest ?? [];
  const newest = question === undefined ? [] : [node("h2", { textContent: "Sampled last" }), textNode(question, "quiet"), Object.assign(textNode(completion), { id: "newest" })];
  const content = node("div", {}, tiles(run), node("p", { id: "stage", textContent: doing }), ...newest,
    node("h2", { textContent: "What stands out" }), ...(findings.length ? [] : [node("p", { className: "quiet", textContent: "Nothing before the first step." })]),
    ...findings.map((finding) => node("div", { className: `finding ${finding.severity}` }, node("b", { textContent: finding.title }),
      node("div", { textContent: finding.evidence }), node("div", { className: "quiet", textContent: finding.remedy }))));
  if (!main.firstChild?.isEqualNode(content)) replace(main, content);  // selected text stays selected
}
