// The view "talk": a conversation with a checkpoint of the run. The server samples in a process of its own.

import { button, node, replace, select } from "./dom.js";
import { state } from "./state.js";
import { COLORINGS, TokenView, color } from "./tokens.js";

const TALK_COLORINGS = {
  logprob: { ...COLORINGS.logprob, title: "logprob at temperature 1", value: (n, i) => n.logprob?.[i] },
  entropy: COLORINGS.entropy,
};
const FINISHES = { length: "cut off at the most tokens", stop: "" };
const views = new Map();  // by run: a conversation stays while others are looked at

async function* lines(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = body.getReader(); ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

const post = (path, body) => fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
const numberIn = (field) => (field.value.trim() === "" ? null : Number(field.value));

class TalkView {
  constructor(run) {
    Object.assign(this, { run, entries: [], seed: 0, coloring: "logprob", isBusy: false });
    const field = (label, properties) => node("input", { ariaLabel: label, ...properties });
    this.checkpoint = node("select", { ariaLabel: "checkpoint" });
    this.temperature = field("temperature", { type: "number", min: 0, step: 0.1, placeholder: "temperature" });
    this.maxTokens = field("tokens at most", { type: "number", min: 1, step: 1, placeholder: "tokens at most" });
    const colors = select("color tokens by", Object.entries(TALK_COLORINGS).map(([name, { title }]) => [name, title]), this.coloring, (value) => { this.coloring = value; this.draw(); });
    this.system = node("textarea", { ariaLabel: "system prompt", rows: 3, placeholder: "that of the run" });
    this.beside = node("input", { type: "checkbox", id: "beside" });
    this.besideLabel = node("label", { hidden: true }, this.beside, node("span"));
    this.list = node("div", { className: "talk", attributes: { role: "log", "aria-label": "conversation" } });
    this.status = node("p", { className: "quiet", id: "talk-state", attributes: { role: "status" } });
    this.draft = node("textarea", { ariaLabel: "message", rows: 4, placeholder: "A message. Ctrl-Enter sends it." });
    this.draft.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.send(); });
    this.sendButton = button("send", () => this.send(), { id: "send" });
    this.stopButton = button("stop", () => this.stop(), { id: "stop" });
    this.againButton = button("another answer", () => this.again(), { id: "again" });
    const clear = button("new conversation", () => this.begin([]));
    this.root = node("div", {}, node("div", { className: "controls" }, this.checkpoint, this.temperature, this.maxTokens, node("label", {}, "color tokens by ", colors)),
      node("details", {}, node("summary", { textContent: "System prompt" }), this.system), this.list, this.status, this.besideLabel, this.draft,
      node("div", { className: "controls" }, this.sendButton, this.stopButton, this.againButton, clear));
    this.draw();
  }

  // What can be asked now: checkpoints come while the run goes on, and it may hold the device.
  async refresh() {
    const answer = await fetch(`/api/talk/${encodeURIComponent(this.run.name)}`);
    if (!answer.ok) return;
    const { checkpoints, reason, training } = await answer.json();
    const chosen = this.checkpoint.value;
    this.checkpoint.replaceChildren(...checkpoints.map(({ name, step }) => node("option", { value: name, textContent: `${name} (step ${step})`, selected: name === chosen })));
    this.hasCheckpoint = checkpoints.length > 0;
    this.besideLabel.hidden = training === null || !this.hasCheckpoint;
    this.besideLabel.lastChild.textContent = ` sample beside the run ${training}, on the CPU: that slows it down`;
    const notice = reason ?? (training === null ? "" : `The run ${training} trains on this machine.`);
    if (!this.isBusy && notice !== this.notice) this.say(notice);
    this.notice = notice;
    this.setButtons();
  }

  say(text) { this.status.replaceChildren(...node("p", { textContent: text }).childNodes); }

  setButtons() {
    this.sendButton.disabled = this.isBusy || !this.hasCheckpoint;
    this.againButton.disabled = this.sendButton.disabled || this.entries.at(-1)?.role !== "assistant";
    this.stopButton.disabled = !this.isBusy;
  }

  // A new conversation, or the prompt of a problem: its last message is the one to send.
  begin(messages) {
    if (this.isBusy) this.stop();
    const others = messages.filter(({ role }) => role !== "system" && role !== "developer");
    const last = others.at(-1)?.role === "user" ? others.pop() : null;
    this.system.value = messages.find(({ role }) => role === "system" || role === "developer")?.content ?? "";
    this.draft.value = last?.content ?? "";
    this.entries = others.map(({ role, content }) => ({ role, content: String(content) }));
    this.draw();
  }

  send() {
    if (this.sendButton.disabled || !this.draft.value.trim()) return;
    this.entries.push({ role: "user", content: this.draft.value });
    this.draft.value = "";
    this.ask();
  }

  again() {
    this.entries.pop();
    this.ask();
  }

  stop() { post("/api/talk/stop", {}); }

  async ask() {
    const entries = this.entries, seed = this.seed++;
    const body = { run: this.run.name, checkpoint: this.checkpoint.value, messages: entries.map(({ role, content }) => ({ role, content })),
      system: this.system.value.trim() ? this.system.value : null, temperature: numberIn(this.temperature), max_tokens: numberIn(this.maxTokens), seed, beside: this.beside.checked };
    const text = node("div", { className: "tokens" });
    this.isBusy = true;
    this.draw(this.block("assistant", text));
    this.say("sampling");
    try {
      const answer = await post("/api/talk", body);
      if (!answer.ok) throw new Error(await answer.text());
      let isOver = false;
      for await (const event of lines(answer.body)) {
        isOver = isOver || "end" in event || "error" in event;
        this.take(event, entries, text);
      }
      if (!isOver) throw new Error("The answer broke off.");
    } catch (error) {
      this.say(String(error.message));
    }
    this.isBusy = false;
    // Without an answer the message can be sent again.
    if (entries === this.entries && entries.at(-1)?.role === "user" && !this.draft.value) this.draft.value = entries.pop().content;
    this.draw();
  }

  take(event, entries, text) {
    if ("stage" in event) this.say(event.stage);
    if ("opened" in event) this.open(event.opened);
    if ("text" in event) {
      const span = node("span", { textContent: event.text });
      span.style.background = color(Math.min(...event.logprobs), COLORINGS.logprob);
      text.append(span);
    }
    if ("end" in event) {
      const { finish, message, ids, texts, numbers, likeliest } = event.end;
      entries.push({ role: "assistant", content: message, texts, part: { ids, numbers, likeliest, rules: ids.map(() => 0) } });
      this.say(FINISHES[finish] ?? finish);
    }
    if ("error" in event) this.say(event.error);
  }

  open({ device, temperature, max_tokens: maxTokens, system }) {
    this.temperature.placeholder = `temperature (${temperature})`;
    this.maxTokens.placeholder = `tokens at most (${maxTokens})`;
    this.system.placeholder = system ?? "none";
    this.say(`sampling on ${device}`);
  }

  block(role, ...content) {
    return node("div", { className: `turn ${role === "assistant" ? "said" : "observed"}` }, node("div", { className: "turn-head" }, node("b", { textContent: role === "assistant" ? "policy" : role })), ...content);
  }

  draw(...unfinished) {
    this.list.replaceChildren(...this.entries.map(({ role, content, part, texts }) => this.block(role, part?.ids.length
      ? new TokenView(part, { texts, coloring: this.coloring, colorings: TALK_COLORINGS }).root : node("pre", { textContent: content }))), ...unfinished);
    this.setButtons();
  }
}

export async function drawTalk(main, run) {
  if (!views.has(run.name)) views.set(run.name, new TalkView(run));
  const view = views.get(run.name), { prompt } = state;
  if (main.firstChild !== view.root) replace(main, view.root);
  if (prompt !== null) {
    state.prompt = null;
    view.begin(prompt);
    view.draft.focus();
  }
  await view.refresh();
}
