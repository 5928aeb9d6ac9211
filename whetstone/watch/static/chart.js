// Charts of our own: some hundred lines, so that the page and the report need no other file, work without a
// network, follow the colors of the page, and can be read by a screen reader through the table beside them.

import { format, node, percent, table } from "./dom.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const HEIGHT = 180, LEFT = 50, RIGHT = 10, TOP = 8, BOTTOM = 22;
const COLORS = 6, TABLE_ROWS = 100;

function element(name, attributes = {}, text = null) {
  const result = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) result.setAttribute(key, value);
  if (text !== null) result.textContent = text;
  return result;
}
const seriesColor = (number) => `var(--series-${number % COLORS})`;
const seriesDash = (number) => ["", "6 3", "2 3", "8 3 2 3"][Math.floor(number / COLORS) % 4];

// An exponential moving average that starts at the first value; weight 0 leaves the points alone.
export function smooth(points, weight) {
  let average = null;
  return points.map(([x, y]) => {
    average = average === null ? y : weight * average + (1 - weight) * y;
    return [x, average];
  });
}

// At most two points for each pixel column, the least and the greatest, so that no peak is lost.
export function thin(points, columns) {
  if (points.length <= 2 * columns) return points;
  const thinned = [], size = points.length / columns;
  for (let column = 0; column < columns; column++) {
    const part = points.slice(Math.floor(column * size), Math.floor((column + 1) * size));
    if (!part.length) continue;
    let low = part[0], high = part[0];
    for (const point of part) {
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
    thinned.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return thinned;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * (1 - 1e-9));
  const values = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) values.push(n * step);
  return values;
}

// Sums of the layers up to each; layers are thin where one has no number at an x.
function stack(series) {
  const sums = new Map();
  return series.map((curve) => {
    const band = curve.points.map(([x, y]) => {
      const below = sums.get(x) ?? 0;
      sums.set(x, below + y);
      return [x, below, below + y];
    });
    return { ...curve, band, top: band.map(([x, , high]) => [x, high]) };
  });
}

// series: [{name, color, points: [[x, y]], band: [[x, low, high]], start: y of step 0, isDots}]
export class LineChart {
  constructor(key, { title = key, text = "", xName = "step", isPercent = false, isStack = false, onZoom = () => {} } = {}) {
    Object.assign(this, { key, title, xName, isStack, onZoom, series: [] });
    this.number = isPercent ? percent : format;
    this.svg = element("svg", { class: "chart", role: "img", tabindex: "0" });
    this.readout = node("div", { className: "readout" });
    this.legend = node("div", { className: "legend" });
    this.values = node("details", { className: "values" }, node("summary", { textContent: "Table" }));
    this.values.addEventListener("toggle", () => this.fillTable());
    this.figure = node("figure", { dataset: { metric: key } },
      node("figcaption", {}, node("b", { textContent: title }), node("span", { textContent: text })),
      this.legend, this.svg, this.readout, this.values);
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerleave", () => { this.dragFrom = undefined; this.point(null); });
    this.svg.addEventListener("pointerdown", (event) => { this.dragFrom = this.xAt(event); });
    this.svg.addEventListener("pointerup", (event) => this.drop(this.xAt(event)));
    this.svg.addEventListener("dblclick", () => this.onZoom(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
  }

  xAt(event) {
    const box = this.svg.getBoundingClientRect();
    const position = ((event.clientX - box.left) / box.width) * this.width;
    return this.low + ((position - LEFT) / (this.width - LEFT - RIGHT)) * (this.high - this.low);
  }

  move(event) {
    const x = this.xAt(event);
    this.point(x);
    if (this.dragFrom === undefined) return;
    const [left, right] = [this.dragFrom, x].map((end) => this.pixelX(end)).sort((a, b) => a - b);
    this.zoom = element("rect", { class: "zoom", x: left, y: TOP, width: right - left, height: HEIGHT - TOP - BOTTOM });
    this.svg.append(this.zoom);
  }

  drop(x) {
    const from = this.dragFrom;
    this.dragFrom = undefined;
    this.zoom?.remove();
    if (from !== undefined && Math.abs(x - from) > (this.high - this.low) / 50) {
      this.onZoom([Math.min(from, x), Math.max(from, x)]);
    }
  }

  // Arrows read values, + and - change the range around the cursor, Escape shows all.
  onKey(event) {
    const all = this.series.flatMap((curve) => curve.points.map(([x]) => x)).filter((x) => x >= this.low && x <= this.high);
    if (!["ArrowLeft", "ArrowRight", "Escape", "+", "-"].includes(event.key) || !all.length) return;
    event.preventDefault();
    if (event.key === "Escape") return this.onZoom(null);
    if ("+-".includes(event.key)) {
      const middle = this.cursorX ?? (this.low + this.high) / 2;
      const half = ((this.high - this.low) / 2) * (event.key === "+" ? 0.5 : 2);
      return this.onZoom([middle - half, middle + half]);
    }
    all.sort((a, b) => a - b);
    const here = this.cursorX ?? (event.key === "ArrowLeft" ? Infinity : -Infinity);
    const next = event.key === "ArrowRight" ? all.find((x) => x > here) : all.findLast((x) => x < here);
    if (next !== undefined) this.point(next);
  }

  // Show the values nearest to x, in text under the chart.
  point(x) {
    this.cursor?.remove();
    this.zoom?.remove();
    this.cursorX = x;
    if (x === null || !this.series.some((curve) => curve.points.length)) {
      this.readout.textContent = "";
      return;
    }
    const nearest = this.series.map((curve) => {
      let best = null;
      for (const point of curve.points) if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
      return [curve, best];
    }).filter(([, best]) => best);
    const [nearestX] = nearest.map(([, best]) => best[0]).sort((a, b) => Math.abs(a - x) - Math.abs(b - x));
    const values = nearest.map(([curve, best]) => {
      const band = this.isStack ? null : curve.band?.find(([at]) => at === best[0]);
      const interval = band ? ` [${this.number(band[1])}, ${this.number(band[2])}]` : "";
      return `${this.series.length > 1 ? `${curve.name} ` : ""}${this.number(best[1])}${interval}`;
    });
    this.readout.textContent = `${this.xName} ${format(nearestX)}: ${values.join(", ")}`;
    this.svg.setAttribute("aria-description", this.readout.textContent);
    const position = this.pixelX(nearestX);
    this.cursor = element("line", { class: "cursor", x1: position, x2: position, y1: TOP, y2: HEIGHT - BOTTOM });
    this.svg.append(this.cursor);
  }

  pixelX(x) { return LEFT + ((x - this.low) / (this.high - this.low || 1)) * (this.width - LEFT - RIGHT); }
  pixelY(y) { return HEIGHT - BOTTOM - ((y - this.bottom) / (this.top - this.bottom || 1)) * (HEIGHT - TOP - BOTTOM); }
  path(points) {
    return points.map(([x, y], n) => `${n ? "L" : "M"}${this.pixelX(x).toFixed(1)} ${this.pixelY(y).toFixed(1)}`).join("");
  }

  // The figure must be part of the page, since its width counts.
  draw(series, { range = null, smoothing = 0 } = {}) {
    this.series = series.filter((curve) => curve.points.length);
    this.width = Math.max(240, this.figure.clientWidth || 440);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.replaceChildren();
    const inside = ([x]) => range === null || (x >= range[0] && x <= range[1]);
    const drawn = this.isStack ? stack(this.series) : this.series;
    const shown = drawn.map((curve) => ({ ...curve, points: (curve.top ?? curve.points).filter(inside), band: curve.band?.filter(inside) }));
    this.drawLegend();
    const xs = shown.flatMap((curve) => curve.points.map(([x]) => x));
    if (!xs.length) {
      this.svg.append(element("text", { x: this.width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet"));
      return;
    }
    this.scale(shown, xs, range);
    this.drawAxes();
    for (const curve of [...shown].reverse()) this.drawCurve(curve, smoothing);
    const labels = this.series.map((curve) => `${curve.name}: ${this.number(curve.points.at(-1)[1])}`);
    this.svg.setAttribute("aria-label", `${this.title} over ${this.xName}; last values ${labels.join(", ")}`);
    if (this.values.open) this.fillTable();
  }

  scale(shown, xs, range) {
    [this.low, this.high] = range ?? extent(xs);
    if (this.low === this.high) [this.low, this.high] = [this.low - 0.5, this.high + 0.5];
    const starts = shown.map((curve) => curve.start).filter(Number.isFinite);
    const ends = shown.flatMap((curve) => (curve.band ?? []).flatMap(([, low, high]) => [low, high]));
    const [least, greatest] = extent([...shown.flatMap((curve) => curve.points.map(([, y]) => y)), ...starts, ...ends]);
    const margin = 0.05 * (greatest - least || Math.abs(least) || 1);
    [this.bottom, this.top] = [this.isStack ? 0 : least - margin, greatest + margin];
  }

  drawLegend() {
    this.legend.replaceChildren(...(this.series.length < 2 ? [] : this.series.map((curve) => {
      const key = node("span", { className: "key" });
      key.style.background = seriesColor(curve.color);
      return node("span", {}, key, curve.name);
    })));
  }

  drawAxes() {
    for (const y of ticks(this.bottom, this.top, 5)) {
      const position = this.pixelY(y);
      this.svg.append(element("line", { class: "axis", x1: LEFT, x2: this.width - RIGHT, y1: position, y2: position }));
      const label = this.number === percent ? `${Number((100 * y).toPrecision(3))} %` : format(Number(y.toPrecision(6)));
      this.svg.append(element("text", { x: LEFT - 5, y: position + 4, "text-anchor": "end" }, label));
    }
    for (const x of ticks(this.low, this.high, Math.max(2, Math.floor(this.width / 70)))) {
      if (this.xName === "step" && !Number.isInteger(x)) continue;
      this.svg.append(element("text", { x: this.pixelX(x), y: HEIGHT - 6, "text-anchor": "middle" }, format(x)));
    }
  }

  drawCurve(curve, smoothing) {
    const stroke = seriesColor(curve.color), dash = seriesDash(curve.color);
    if (Number.isFinite(curve.start)) {
      const position = this.pixelY(curve.start);
      this.svg.append(element("line", { class: "start", x1: LEFT, x2: this.width - RIGHT, y1: position, y2: position, "data-start": curve.start }));
    }
    if (curve.band?.length) {
      const back = [...curve.band].reverse().map(([x, low]) => [x, low]);
      const area = element("path", { class: this.isStack ? "layer" : "band", d: `${this.path([...curve.band.map(([x, , high]) => [x, high]), ...back])}Z` });
      area.style.fill = stroke;
      this.svg.append(area);
      if (this.isStack) return;
    }
    const columns = Math.round(this.width - LEFT - RIGHT);
    const dots = curve.isDots || curve.points.length === 1;
    if (smoothing && !curve.isDots) this.svg.append(element("path", { class: "raw", d: this.path(thin(curve.points, columns)), stroke }));
    const line = thin(curve.isDots ? curve.points : smooth(curve.points, smoothing), columns);
    if (!curve.isDots) this.svg.append(element("path", { d: this.path(line), stroke, "stroke-dasharray": dash }));
    if (dots || curve.hasMarks) {
      for (const [x, y] of line) this.svg.append(element("circle", { cx: this.pixelX(x), cy: this.pixelY(y), r: 3, fill: stroke }));
    }
  }

  // The same numbers as a table: at most a hundred rows, evenly.
  fillTable() {
    if (!this.values.open) return;
    const xs = [...new Set(this.series.flatMap((curve) => curve.points.map(([x]) => x)))].sort((a, b) => a - b);
    const size = Math.max(1, Math.ceil(xs.length / TABLE_ROWS));
    const columns = this.series.map((curve) => new Map(curve.points));
    const rows = xs.filter((_, n) => n % size === 0 || n === xs.length - 1)
      .map((x) => [format(x), ...columns.map((column) => this.number(column.get(x)))]);
    const content = table(this.title, [this.xName, ...this.series.map((curve) => curve.name)], rows);
    this.values.replaceChildren(this.values.firstChild, node("div", { className: "scroll" }, content));
  }
}

// rows: [{name, values: [{mean, low, high, name}], cells}]: means with their intervals; `heads` are of the cells.
export function intervalChart(rows, title, heads) {
  const names = [...new Set(rows.flatMap((row) => row.values.map((value) => value.name)))];
  const track = (value) => {
    const bar = node("span", { className: "interval-bar", title: `${value.name}: ${percent(value.mean)} [${percent(value.low)}, ${percent(value.high)}]` });
    const [line, dot] = [node("i"), node("b")];
    line.style.left = `${100 * value.low}%`;
    line.style.width = `${100 * (value.high - value.low)}%`;
    dot.style.left = `${100 * value.mean}%`;
    for (const mark of [line, dot]) mark.style.background = seriesColor(names.indexOf(value.name));
    bar.append(line, dot);
    return bar;
  };
  const cells = rows.map((row) => [row.name, node("div", { className: "tracks" }, ...row.values.map(track)),
    ...names.map((name) => percent(row.values.find((value) => value.name === name)?.mean)), ...row.cells]);
  return node("div", { className: "scroll interval-chart" }, table(title, ["task", "0 % to 100 %", ...names, ...heads], cells));
}
