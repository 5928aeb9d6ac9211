// A rollout of several turns as a conversation: what the policy said, its tool calls, and what was answered.

import { duration, format, node, textNode } from "./dom.js";

// [{number, text, calls, reward, seconds, answers}]; numbers where the file has them.
export function turnsOf(row) {
  const turns = [];
  for (const message of row.turns ?? []) {
    const n = turns.length;
    if (message.role === "assistant") {
      turns.push({ number: n + 1, text: message.content, calls: message.tool_calls ?? [], reward: row.turn_rewards?.[n], seconds: row.turn_seconds?.[n], answers: [] });
    } else turns.at(-1)?.answers.push(message);
  }
  return turns;
}

function block(className, title, facts, ...content) {
  const head = node("div", { className: "turn-head" }, node("b", { textContent: title }), ` ${facts.filter(Boolean).join(", ")}`);
  return node("div", { className: `turn ${className}`, attributes: { role: "group", "aria-label": title } }, head, ...content);
}

function callNode(call) {
  const text = call.error ? `call that can't be read: ${call.error}` : `calls ${call.name}(${JSON.stringify(call.arguments ?? {})})`;
  return node("div", { className: "call", textContent: text });
}

// `content`: the text, or the nodes of its tokens.
export function saidNode(turn, ...content) {
  const reward = typeof turn.reward === "number" ? `reward ${format(turn.reward)}` : "";
  return block("said", `policy, turn ${turn.number}`, [reward], ...content, ...turn.calls.map(callNode));
}

const speaker = (message) => (message.role === "tool" ? `tool ${message.name ?? ""}`.trim() : "environment");

// What the policy saw next; `note` says what that means for training.
export function observedNode(turn, note, ...content) {
  const names = [...new Set(turn.answers.map(speaker))].join(", ") || "environment";
  const time = typeof turn.seconds === "number" ? seconds(turn.seconds) : "";
  return block("observed", `${names}, turn ${turn.number}`, [time, note], ...content);
}

function seconds(value) {
  return value < 60 ? `${format(Number(value.toPrecision(3)))} s` : duration(value);
}

export function answerNodes(turn) {
  return turn.answers.map((message) => node("div", {}, ...(turn.answers.length > 1 ? [node("div", { className: "turn-head", textContent: speaker(message) })] : []), textNode(message.content)));
}

export const NOT_TRAINED = "not trained on";
export const UNSEEN = "after the last turn: the policy did not see it";

// The whole conversation as text. Nothing is trained on in an evaluation: it has no note on that.
export function conversation(row, note = NOT_TRAINED) {
  const turns = turnsOf(row);
  return node("div", { className: "conversation" }, ...turns.flatMap((turn, n) => [
    saidNode(turn, textNode(turn.text)),
    ...(turn.answers.length ? [observedNode(turn, n === turns.length - 1 ? UNSEEN : note, ...answerNodes(turn))] : []),
  ]));
}
