// Nodes of the page, and numbers as text. What a model wrote passes `node`: it is set as text, never as markup.

// Control characters become visible; tab and line break stay.
export function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (c) => `\u27e8${c.codePointAt(0).toString(16).padStart(2, "0")}\u27e9`);
}

export function node(name, properties = {}, ...children) {
  const { dataset, attributes, ...rest } = properties;
  if (typeof rest.textContent === "string") rest.textContent = visible(rest.textContent);
  const result = Object.assign(document.createElement(name), rest);
  Object.assign(result.dataset, dataset);
  for (const [key, value] of Object.entries(attributes ?? {})) result.setAttribute(key, value);
  const contents = children.filter((child) => child !== null && child !== undefined);
  result.append(...contents.map((child) => (typeof child === "string" ? visible(child) : child)));
  return result;
}

const MAX_TEXT = 20000;

// Long text is cut, with a button for the rest.
export function textNode(text, className = "") {
  const whole = String(text ?? ""), result = node("pre", { className, textContent: whole.slice(0, MAX_TEXT) });
  if (whole.length > MAX_TEXT) {
    result.append(button(`show ${(whole.length - MAX_TEXT).toLocaleString("en")} more characters`, () => {
      result.replaceChildren(node("span", { textContent: whole }));
    }));
  }
  return result;
}

// Prompt and completion in lower case, for a search.
export const textOf = (row) => [row.problem, ...[...(row.messages ?? []), ...(row.turns ?? [])].map((message) => message.content), row.completion]
  .join("\n").toLowerCase();

export function button(text, onclick, attributes = {}) {
  return node("button", { type: "button", textContent: text, onclick, attributes });
}

// options: [[value, text, isDisabled]]
export function select(label, options, chosen, onChoice) {
  const box = node("select", { ariaLabel: label, onchange: () => onChoice(box.value) },
    ...options.map(([value, textContent, disabled = false]) =>
      node("option", { value, textContent, disabled, selected: String(value) === String(chosen) })));
  return box;
}

// rows: lists of cells; a number is set to the right, the first cell of a row is its head.
export function table(caption, heads, rows) {
  const kind = (value) => (typeof value === "number" ? "number" : "");
  const text = (value) => (typeof value === "number" ? format(value) : value);
  const columns = heads.map((_, n) => (rows.some((row) => typeof row[n] === "number") ? "number" : ""));
  return node("table", {}, node("caption", { className: "hidden", textContent: caption }),
    node("thead", {}, node("tr", {}, ...heads.map((head, n) =>
      node("th", { className: columns[n], scope: "col", textContent: head })))),
    node("tbody", {}, ...rows.map((row) => node("tr", {}, ...row.map((cell, n) =>
      n ? node("td", { className: kind(cell) }, text(cell)) : node("th", { scope: "row" }, text(cell)))))));
}

// Put new content into a node. The focus and the scroll position of what has the same label stay.
export function replace(parent, ...children) {
  const label = (element) => element?.getAttribute?.("aria-label") || element?.textContent;
  const active = parent.contains(document.activeElement) ? document.activeElement : null;
  const focus = active && active !== parent ? [active.tagName, label(active)] : null;
  const scrolled = [...parent.querySelectorAll(".list, .tokens")].map((element) => element.scrollTop);
  parent.replaceChildren(...children);
  parent.querySelectorAll(".list, .tokens").forEach((element, n) => { element.scrollTop = scrolled[n] ?? 0; });
  if (focus === null) return;
  const same = [...parent.querySelectorAll(focus[0])].find((element) => label(element) === focus[1]);
  same?.focus({ preventScroll: true });
}

export function format(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}

export const percent = (x) => (typeof x === "number" ? `${(100 * x).toFixed(1)} %` : "");

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return parts[0] ? `${parts[0]}:${pad(parts[1])}:${pad(parts[2])}` : `${parts[1]}:${pad(parts[2])}`;
}

export const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
export const counted = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;
