// The runs of the folder: rows by step, and what else the server tells while a run goes on.

const MAX_CACHED = 24, SILENT_S = 20;

export class Run {
  // `documents`: what "kind/step" holds where there is no server (report.html).
  constructor(entry, documents = null) {
    this.name = entry.name;
    this.documents = documents;
    this.rows = new Map();
    this.evals = new Map();
    this.steps = { evaluations: [], completions: [], tokens: [] };
    this.cache = new Map();
    this.update(entry);
  }

  update(entry) {
    this.config = entry.config ?? {};
    this.sessions = entry.sessions ?? [];
    this.hear(entry.status);
    this.results = entry.results;
  }

  // The clock of another machine can be off: a status that changes is a sign of life, whatever its time.
  hear(status) {
    if (this.status && status && status.time !== this.status.time) this.heardAt = Date.now() / 1000;
    this.status = status;
  }

  forget() {
    this.rows.clear();
    this.evals.clear();
    this.cache.clear();
    this.sorted = null;
  }

  take(changes) {
    if (changes.reset) this.forget();
    for (const row of changes.rows ?? []) (row.kind === "eval" ? this.evals : this.rows).set(row.step, row);
    if (changes.rows) this.sorted = null;
    if ("status" in changes) this.hear(changes.status);
    for (const name of Object.keys(this.steps)) if (name in changes) this.steps[name] = changes[name];
  }

  // The rows of training by step, with the minutes of all steps and evaluations up to each.
  get ordered() {
    if (!this.sorted) {
      let minutes = 0;
      this.sorted = [...this.rows.values()].sort((a, b) => a.step - b.step);
      for (const row of this.sorted) {
        minutes = row.minutes ?? minutes + (row.step_time ?? 0) / 60;  // the report knows them, and has not all rows
        row.minutes = minutes;
      }
    }
    return this.sorted;
  }

  // [[x, y]] of a metric.
  points(key, xName) {
    return this.ordered.filter((row) => typeof row[key] === "number")
      .map((row) => [xName === "minute" ? row.minutes : row.step, row[key]]);
  }

  evalPoints(key, xName) {
    this.ordered;  // for the minutes
    return [...this.evals.values()].sort((a, b) => a.step - b.step)
      .filter((row) => typeof row[key] === "number")
      .map((row) => [xName === "minute" ? this.rows.get(row.step)?.minutes ?? 0 : row.step, row[key]]);
  }

  get last() { return this.ordered.at(-1) ?? null; }
  get keys() { return new Set([...Object.keys(this.last ?? {}), ...Object.keys(this.ordered[0] ?? {})]); }

  get state() {
    const status = this.status, now = Date.now() / 1000;
    const isFresh = status && now - Math.max(status.time, this.heardAt ?? 0) < SILENT_S;
    if (status && (status.state !== "running" || isFresh)) return status.state;
    return this.results ? "ended" : status ? "silent" : "unknown";
  }

  // A document of the run folder; null where there is none.
  async fetch(what, name) {
    const key = name === undefined ? what : `${what}/${name}`;
    if (this.documents) return this.documents[key] ?? null;
    const path = [this.name, what, ...(name === undefined ? [] : [String(name)])].map(encodeURIComponent).join("/");
    const answer = await fetch(`/api/runs/${path}`);
    return answer.ok ? answer.json() : null;
  }

  async cached(what, name) {
    const key = `${what}/${name}`;
    if (!this.cache.has(key)) {
      if (this.cache.size >= MAX_CACHED) this.cache.delete(this.cache.keys().next().value);
      this.cache.set(key, this.fetch(what, name));
    }
    return this.cache.get(key);
  }
}

// One connection for all runs that are shown: a browser opens only six to one server.
export class Stream {
  constructor(runs, onChange) {
    this.runs = runs;
    this.onChange = onChange;
    this.names = "";
  }

  follow(names) {
    const query = new URLSearchParams([...names].sort().map((name) => ["run", name])).toString();
    if (query === this.names) return;
    this.names = query;
    this.source?.close();
    if (!names.length) return;
    this.source = new EventSource(`/api/events?${query}`);
    let repeated = new Set();
    this.source.onopen = () => {
      this.isLost = false;
      repeated = new Set(names);  // a new connection begins with everything again
    };
    this.source.onerror = () => { this.isLost = true; this.onChange(null, {}); };
    this.source.onmessage = (event) => {
      const { run, ...changes } = JSON.parse(event.data);
      if (repeated.delete(run)) this.runs.get(run)?.forget();
      this.runs.get(run)?.take(changes);
      this.onChange(run, changes);
    };
  }
}
