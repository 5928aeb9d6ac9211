// Controls that several views share: they change what is shown.

import { node, select } from "./dom.js";
import { redraw, state } from "./state.js";

export const set = (name) => (value) => { state[name] = value; redraw(); };

export function searchBox() {
  const box = node("input", { type: "search", placeholder: "text", value: state.text, ariaLabel: "text of prompt or completion", onchange: () => set("text")(box.value) });
  return box;
}

// The choice of a task, where there are several; otherwise nothing.
export function taskSelect(rows) {
  const tasks = [...new Set(rows.map((row) => String(row.task ?? "")))].sort();
  if (tasks.length < 2 && !state.task) return null;
  return select("task", [["", "all tasks"], ...tasks.map((task) => [task, task])], state.task, set("task"));
}
