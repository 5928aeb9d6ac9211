// The runs of the folder: rows by step, and what else the server tells while a run goes on.

export class Run {
  constructor(entry) {
    this.name = entry.name;
    this.update(entry);
    this.rows = new Map();
    this.evals = new Map();
    this.steps = { evaluations: [], completions: [], tokens: [] };
    this.source = null;
  }

  update(entry) {
    this.config = entry.config ?? {};
    this.sessions = entry.sessions ?? [];
    this.status = entry.status;
    this.results = entry.results;
  }

  follow(onChange) {
    if (this.source) return;
    this.source = new EventSource(`/api/runs/${encodeURIComponent(this.name)}/events`);
    this.source.onmessage = (event) => { this.take(JSON.parse(event.data)); onChange(this); };
    this.source.onopen = () => { this.isLost = false; onChange(this); };
    this.source.onerror = () => { this.isLost = true; onChange(this); };
    // A new connection begins with everything again.
    this.source.addEventListener("open", () => { this.rows.clear(); this.evals.clear(); });
  }

  leave() {
    this.source?.close();
    this.source = null;
  }

  take(changes) {
    if (changes.reset) { this.rows.clear(); this.evals.clear(); }
    for (const row of changes.rows ?? []) (row.kind === "eval" ? this.evals : this.rows).set(row.step, row);
    if ("status" in changes) this.status = changes.status;
    for (const name of Object.keys(this.steps)) if (name in changes) this.steps[name] = changes[name];
  }

  // [[x, y]] of a metric; over minutes the steps and evaluations before are added up.
  points(key, xName) {
    const points = [];
    let minutes = 0;
    for (const row of [...this.rows.values()].sort((a, b) => a.step - b.step)) {
      minutes += ((row.step_time ?? 0) + (row["time/eval"] ?? 0)) / 60;
      row.minutes = minutes;
      if (typeof row[key] === "number") points.push([xName === "minute" ? minutes : row.step, row[key]]);
    }
    return points;
  }

  evalPoints(key, xName) {
    return [...this.evals.values()].sort((a, b) => a.step - b.step)
      .filter((row) => typeof row[key] === "number")
      .map((row) => [xName === "minute" ? this.rows.get(row.step)?.minutes ?? 0 : row.step, row[key]]);
  }

  get last() { return [...this.rows.values()].reduce((a, b) => (a && a.step > b.step ? a : b), null); }

  get state() {
    const status = this.status, isFresh = status && Date.now() / 1000 - status.time < 20;
    if (status && (status.state !== "running" || isFresh)) return status.state;
    return this.results ? "ended" : status ? "silent" : "unknown";
  }

  async fetch(what, step) {
    const answer = await fetch(`/api/runs/${encodeURIComponent(this.name)}/${what}${step === undefined ? "" : `/${step}`}`);
    return answer.ok ? answer.json() : null;
  }
}
