// What the page shows. Views change it and call `redraw`; the entry of the page says what that does.

export const state = {
  runs: new Map(), chosen: [], view: "now", xName: "step", smoothing: 0, range: null, showAll: false,
  step: null, problem: null, filter: "all", task: "", text: "", bin: null, coloring: "logprob", tokens: new Map(),
  change: "all", grid: null, prompt: null,
};

let draw = () => {}, isDue = false;
export function onRedraw(callback) { draw = callback; }

// Several changes at once are drawn once.
export function redraw() {
  if (isDue) return;
  isDue = true;
  setTimeout(() => { isDue = false; draw(); }, 50);
}

export const current = () => state.runs.get(state.chosen[0]) ?? null;
