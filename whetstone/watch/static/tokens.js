// The tokens of a completion, colored by one of their numbers: the text, a strip over the whole sequence, and
// the numbers of the token under the pointer or the cursor.

import { button, counted, format, node, percent, table, visible } from "./dom.js";
import { NOT_TRAINED, UNSEEN, answerNodes, observedNode, saidNode } from "./turns.js";

// `value` computes a number from the columns; `low` to `high` is the range of the colors.
export const COLORINGS = {
  logprob: { title: "logprob (sampler)", value: (n, i) => n.sampler_logprob?.[i], low: -4, high: 0, ramp: "low" },
  entropy: { title: "entropy", value: (n, i) => n.entropy?.[i], low: 0, high: 2, ramp: "high" },
  difference: {
    title: "trainer minus sampler logprob",
    value: (n, i) => subtract(n.old_logprob?.[i], n.sampler_logprob?.[i]), low: -0.2, high: 0.2, ramp: "both",
  },
  ratio: {
    title: "ratio of new to old policy",
    value: (n, i) => exponential(subtract(n.logprob?.[i], n.old_logprob?.[i])), low: 0.7, high: 1.3, ramp: "both",
  },
  kl: { title: "KL to the reference", value: (n, i) => n.kl?.[i], low: 0, high: 0.5, ramp: "high" },
  value: { title: "value of the critic", value: (n, i) => n.value?.[i], low: -1, high: 1, ramp: "both" },
  advantage: { title: "advantage", value: (n, i) => n.advantage?.[i], low: -2, high: 2, ramp: "both" },
  weight: { title: "weight in the loss", value: (n, i) => n.weight?.[i], low: 0, high: 2, ramp: "high" },
};
// In the order in which they color a token that several apply to: what took it out of the loss comes first.
const RULES = {
  equal_rewards: { title: "equal rewards in the group: not in the update", color: "125 125 125" },
  truncated_completion: { title: "truncated completion, masked", color: "0 130 130" },
  off_policy: { title: "off-policy mask", color: "140 70 200" },
  low_entropy: { title: "below the top-entropy quantile", color: "30 110 210" },
  clipped: { title: "clipped: the ratio left its bounds", color: "200 60 40" },
  importance_bound: { title: "importance weight at its bound", color: "205 125 0" },
};
const WINDOW = 2000;  // tokens that are shown as text at once
const STRIP_HEIGHT = 22, OBSERVED_HEIGHT = 4;

function subtract(a, b) { return typeof a === "number" && typeof b === "number" ? a - b : undefined; }
function exponential(x) { return x === undefined ? undefined : Math.exp(x); }

const order = (name) => (Object.keys(RULES).indexOf(name) + 99) % 99;  // unknown ones come last
export function rulesOf(bits, names) {
  return names.filter((_, bit) => (bits >> bit) & 1).sort((a, b) => order(a) - order(b));
}
export function ruleText(name) { return RULES[name]?.title ?? name; }

// A share of 0 to 1 of the color; no number has none.
export function color(value, { low, high, ramp }) {
  if (typeof value !== "number") return "";
  const share = Math.min(1, Math.max(0, (value - low) / (high - low)));
  if (ramp === "low") return `rgb(220 60 40 / ${(0.75 * (1 - share)).toFixed(2)})`;
  if (ramp === "high") return `rgb(220 60 40 / ${(0.75 * share).toFixed(2)})`;
  if (share < 0.5) return `rgb(40 90 220 / ${(1.5 * (0.5 - share)).toFixed(2)})`;
  return `rgb(220 60 40 / ${(1.5 * (share - 0.5)).toFixed(2)})`;
}

// The colorings for which a part has numbers.
export function hasNumbers(part, name, colorings = COLORINGS) {
  return name === "rule" || part.ids.some((_, i) => typeof colorings[name].value(part.numbers, i) === "number");
}

// Ranges of tokens: the turns of an episode and what was observed after each; otherwise one range of all.
function rangesOf(part) {
  let stop = 0;
  const next = (turn, length, isObserved) => ({ turn, isObserved, start: stop, stop: (stop += length) });
  return (part.turns ?? [[part.ids.length, 0]]).flatMap(([said, seen], turn) => [next(turn, said, false), next(turn, seen, true)])
    .filter(({ start, stop: end }) => end > start);
}

// part: {ids, rules, numbers}, of an episode also turns: [[sampled, observed]]; of Talk also likeliest.
// turns: those of the row. position: {cursor} is kept by the caller, so that a redraw does not lose it.
export class TokenView {
  constructor(part, { texts, ruleNames = [], coloring, position = {}, turns = [], colorings = COLORINGS }) {
    Object.assign(this, { part, texts, ruleNames, coloring, position, turns, colorings, ranges: rangesOf(part) });
    this.strip = node("canvas", {
      className: "strip", tabIndex: 0, height: STRIP_HEIGHT,
      attributes: { role: "slider", "aria-label": "tokens", "aria-valuemin": 0, "aria-valuemax": part.ids.length - 1 },
    });
    this.text = node("div", { className: "tokens" });
    this.range = node("div", { className: "quiet" });
    this.readout = node("div", { className: "numbers", attributes: { "aria-live": "off" } });
    const count = this.ranges.reduce((sum, range) => sum + (range.isObserved ? range.stop - range.start : 0), 0);
    const observed = count ? node("div", { className: "quiet", textContent: `Marked by a line: ${counted(count, "token")} observed, ${NOT_TRAINED}` }) : null;
    this.root = node("div", { className: "token-view" }, this.strip, this.legend(), observed, this.range, this.text, this.readout);
    this.strip.addEventListener("keydown", (event) => this.key(event));
    this.strip.addEventListener("pointermove", (event) => this.show(this.indexAt(event), { scroll: false }));
    this.strip.addEventListener("pointerdown", (event) => this.show(this.indexAt(event)));
    this.text.addEventListener("pointerover", (event) => {
      const i = event.target.dataset?.token;
      if (i !== undefined) this.show(Number(i), { scroll: false });
    });
    this.fill(0);
    new ResizeObserver(() => this.paint()).observe(this.strip);
    if (position.cursor !== undefined) this.show(position.cursor, { scroll: false });
  }

  colorOf(i) {
    if (this.coloring !== "rule") return color(this.colorings[this.coloring].value(this.part.numbers, i), this.colorings[this.coloring]);
    const [first] = rulesOf(this.part.rules[i], this.ruleNames);
    return first === undefined ? "" : `rgb(${RULES[first]?.color ?? "200 60 40"} / .55)`;
  }

  // Whether the token moved nothing; a bounded importance weight still counts.
  isRemoved(i) {
    return this.part.numbers.weight?.[i] === 0 || rulesOf(this.part.rules[i], this.ruleNames).includes("clipped");
  }

  // Tokens from `start` as text; the strip has all of them.
  fill(start) {
    this.start = start;
    const stop = Math.min(this.part.ids.length, start + WINDOW);
    this.spans = new Map();
    this.text.replaceChildren(...this.ranges.filter((range) => range.start < stop && range.stop > start)
      .flatMap((range) => this.rangeNodes(range, Math.max(start, range.start), Math.min(stop, range.stop))));
    const last = this.turns.at(-1);
    if (this.part.turns && last?.answers.length && stop === this.part.ids.length) this.text.append(observedNode(last, UNSEEN, ...answerNodes(last)));
    const all = this.part.ids.length;
    if (all > WINDOW) {
      this.range.replaceChildren(`tokens ${start} to ${stop - 1} of ${all} `,
        button("before", () => this.fill(Math.max(0, start - WINDOW))),
        button("after", () => this.fill(Math.min(Math.max(0, all - WINDOW), start + WINDOW))));
    }
  }

  // The tokens of a range as spans; those of an episode in a block with what is known of the turn.
  rangeNodes({ turn, isObserved }, start, stop) {
    const spans = [];
    for (let i = start; i < stop; i++) {
      const span = node("span", { textContent: this.texts[this.part.ids[i]] ?? `[${this.part.ids[i]}]`, dataset: { token: i } });
      span.style.background = this.colorOf(i);
      if (this.coloring === "rule" && this.part.rules[i]) span.className = this.isRemoved(i) ? "ruled removed" : "ruled";
      this.spans.set(i, span);
      spans.push(span);
    }
    if (!this.part.turns) return spans;
    const known = this.turns[turn] ?? { number: turn + 1, calls: [], answers: [] };
    return [isObserved ? observedNode(known, NOT_TRAINED, ...spans) : saidNode(known, ...spans)];
  }

  isObserved(i) {
    return this.ranges.some((range) => range.isObserved && range.start <= i && i < range.stop);
  }

  // The strip: a column for each token, or several tokens in one, of which the strongest color shows.
  paint() {
    const scale = window.devicePixelRatio || 1, count = this.part.ids.length;
    const width = Math.max(1, Math.round(this.strip.clientWidth * scale)), height = Math.round(STRIP_HEIGHT * scale);
    if (this.strip.width !== width) this.strip.width = width;
    if (this.strip.height !== height) this.strip.height = height;
    const context = this.strip.getContext("2d");
    context.clearRect(0, 0, width, height);
    for (let i = 0; i < count; i++) {
      const left = Math.floor((i * width) / count), right = Math.max(left + 1, Math.floor(((i + 1) * width) / count));
      context.fillStyle = this.colorOf(i) || "transparent";
      context.fillRect(left, 0, right - left, height);
    }
    context.fillStyle = getComputedStyle(this.strip).color;
    for (const { start, stop } of this.ranges.filter((range) => range.isObserved)) {
      context.fillRect((start * width) / count, height - OBSERVED_HEIGHT * scale, ((stop - start) * width) / count, OBSERVED_HEIGHT * scale);
    }
    const cursor = this.position.cursor;
    if (cursor !== undefined) {
      context.fillRect(Math.floor(((cursor + 0.5) * width) / count) - scale, 0, 2 * scale, height);
    }
  }

  indexAt(event) {
    const box = this.strip.getBoundingClientRect(), count = this.part.ids.length;
    return Math.min(count - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * count)));
  }

  key(event) {
    const last = this.part.ids.length - 1, here = this.position.cursor ?? -1;
    const moves = {
      ArrowRight: here + 1, ArrowLeft: here - 1, PageDown: here + 10, PageUp: here - 10, Home: 0, End: last,
      n: this.part.rules.findIndex((bits, i) => i > here && bits), p: this.part.rules.findLastIndex((bits, i) => i < here && bits),
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (moves[event.key] < 0 && "np".includes(event.key)) return;
    this.show(Math.min(last, Math.max(0, moves[event.key])));
  }

  // Move the cursor to a token, and show its numbers.
  show(i, { scroll = true } = {}) {
    this.position.cursor = i;
    if (i < this.start || i >= this.start + WINDOW) this.fill(Math.floor(i / WINDOW) * WINDOW);
    this.text.querySelector(".cursor")?.classList.remove("cursor");
    const span = this.spans.get(i);
    span?.classList.add("cursor");
    if (scroll && span) this.text.scrollTop += span.getBoundingClientRect().top - this.text.getBoundingClientRect().top - 40;
    const facts = this.facts(i);
    this.strip.setAttribute("aria-valuenow", i);
    this.strip.setAttribute("aria-valuetext", visible(facts.map((pair) => pair.join(" ")).join("; ")));
    this.readout.replaceChildren(node("dl", {}, ...facts.map(([title, value]) =>
      node("div", {}, node("dt", { textContent: title }), node("dd", { textContent: value })))));
    this.paint();
  }

  facts(i) {
    const numbers = Object.values(this.colorings)
      .map(({ title, value }) => [title, value(this.part.numbers, i)])
      .filter(([, value]) => typeof value === "number")
      .map(([title, value]) => [title, String(Number(value.toPrecision(4)))]);
    const rules = rulesOf(this.part.rules[i], this.ruleNames).map((name) => ["rule", ruleText(name)]);
    const observed = this.isObserved(i) ? [["observed", NOT_TRAINED]] : [];
    const likeliest = (this.part.likeliest?.[i] ?? []).map(([text, logprob]) => `${JSON.stringify(text)} ${percent(Math.exp(logprob))}`);
    return [[`token ${i}`, JSON.stringify(this.texts[this.part.ids[i]] ?? "")], ...observed, ...numbers, ...rules,
      ...(likeliest.length ? [["likeliest", likeliest.join(", ")]] : [])];
  }

  // What the colors mean; of the rules also how many tokens each concerns.
  legend() {
    if (this.coloring === "rule") {
      const counts = this.ruleNames.map((name, bit) => [name, this.part.rules.filter((bits) => (bits >> bit) & 1).length]);
      const shown = counts.filter(([, count]) => count);
      return node("div", { className: "legend" }, ...(shown.length ? shown.map(([name, count]) => {
        const key = node("span", { className: "key" });
        key.style.background = `rgb(${RULES[name]?.color ?? "200 60 40"} / .55)`;
        return node("span", { dataset: { rule: name } }, key, `${ruleText(name)}: ${counted(count, "token")}`);
      }) : ["No rule removed or bounded a token here."]));
    }
    const coloring = this.colorings[this.coloring], { low, high } = coloring;
    const steps = Array.from({ length: 9 }, (_, n) => {
      const cell = node("span", { className: "key" });
      cell.style.background = color(low + ((high - low) * n) / 8, coloring);
      return cell;
    });
    return node("div", { className: "legend scale" }, `\u2264 ${format(low)}`, node("span", { className: "ramp" }, ...steps), `\u2265 ${format(high)}`);
  }

  // All tokens with all their numbers; made when it is opened.
  table() {
    const { part, texts } = this;
    const shown = Object.entries(this.colorings).filter(([name]) => hasNumbers(part, name, this.colorings)).map(([, coloring]) => coloring);
    const rows = part.ids.slice(0, WINDOW).map((id, i) => [String(i), visible(JSON.stringify(texts[id] ?? "")),
      ...shown.map(({ value }) => value(part.numbers, i)), this.isObserved(i) ? `observed, ${NOT_TRAINED}` : rulesOf(part.rules[i], this.ruleNames).join(", ")]);
    return table("Tokens", ["#", "token", ...shown.map(({ title }) => title), "rules"], rows);
  }
}
