// The tokens of a completion, colored by one of their numbers. All text is set as text, never as markup.

// How a number becomes a color: from (blue) over nothing to (red); `value` computes it from the columns.
export const COLORINGS = {
  logprob: { title: "logprob (sampler)", value: (n, i) => n.sampler_logprob?.[i], low: -4, high: 0, ramp: "low" },
  entropy: { title: "entropy", value: (n, i) => n.entropy?.[i], low: 0, high: 3, ramp: "high" },
  difference: {
    title: "trainer minus sampler logprob",
    value: (n, i) => sub(n.old_logprob?.[i], n.sampler_logprob?.[i]), low: -0.2, high: 0.2, ramp: "both",
  },
  ratio: {
    title: "ratio of new to old policy",
    value: (n, i) => exp(sub(n.logprob?.[i], n.old_logprob?.[i])), low: 0.7, high: 1.3, ramp: "both",
  },
  kl: { title: "KL to the reference", value: (n, i) => n.kl?.[i], low: 0, high: 0.5, ramp: "high" },
  value: { title: "value of the critic", value: (n, i) => n.value?.[i], low: -1, high: 1, ramp: "both" },
  advantage: { title: "advantage", value: (n, i) => n.advantage?.[i], low: -2, high: 2, ramp: "both" },
  weight: { title: "weight in the loss", value: (n, i) => n.weight?.[i], low: 0, high: 2, ramp: "high" },
};
const RULES = {
  clipped: "clipped: the ratio left its bounds",
  importance_bound: "importance weight at its bound",
  off_policy: "off-policy mask",
  low_entropy: "entropy below the quantile",
  truncated_completion: "its completion was cut off, and those are masked",
  equal_rewards: "the whole group earned the same: no advantage, not in the update",
};

function sub(a, b) { return typeof a === "number" && typeof b === "number" ? a - b : undefined; }
function exp(x) { return x === undefined ? undefined : Math.exp(x); }

export function rulesOf(bits, names) { return names.filter((_, bit) => (bits >> bit) & 1); }
export function ruleText(name) { return RULES[name] ?? name; }

export function color(value, { low, high, ramp }) {
  if (typeof value !== "number") return "";
  const share = Math.min(1, Math.max(0, (value - low) / (high - low)));
  if (ramp === "low") return `rgb(220 60 40 / ${(0.75 * (1 - share)).toFixed(2)})`;
  if (ramp === "high") return `rgb(220 60 40 / ${(0.75 * share).toFixed(2)})`;
  return share < 0.5 ? `rgb(40 90 220 / ${(1.5 * (0.5 - share)).toFixed(2)})` : `rgb(220 60 40 / ${(1.5 * (share - 0.5)).toFixed(2)})`;
}

// part: {ids, rules, numbers}; returns a node with a span for each token, and calls `tell` with a sentence on hover.
export function tokenNode(part, texts, ruleNames, coloring, tell) {
  const node = document.createElement("div");
  node.className = "tokens";
  part.ids.forEach((id, i) => {
    const span = document.createElement("span");
    span.textContent = visible(texts[id] ?? `[${id}]`);
    span.dataset.token = i;
    const rules = rulesOf(part.rules[i], ruleNames);
    if (coloring === "rule") {
      if (rules.length) {
        span.classList.add("removed");
        span.style.background = `var(--rule-${ruleNames.indexOf(rules[0])}, rgb(220 60 40 / .4))`;
      }
    } else {
      span.style.background = color(COLORINGS[coloring].value(part.numbers, i), COLORINGS[coloring]);
    }
    node.append(span);
  });
  node.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.token;
    if (i !== undefined) tell(describe(part, texts, ruleNames, Number(i)));
  });
  return node;
}

// Control characters become visible; a line break stays one.
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g,
    (c) => `\u27e8${c.codePointAt(0).toString(16)}\u27e9`);
}

export function describe(part, texts, ruleNames, i) {
  const numbers = Object.entries(COLORINGS)
    .map(([, c]) => [c.title, c.value(part.numbers, i)])
    .filter(([, value]) => typeof value === "number")
    .map(([title, value]) => `${title} ${Number(value.toPrecision(3))}`);
  const rules = rulesOf(part.rules[i], ruleNames).map(ruleText);
  return [`token ${i} ${JSON.stringify(texts[part.ids[i]] ?? "")}`, ...numbers, ...rules].join("; ");
}
