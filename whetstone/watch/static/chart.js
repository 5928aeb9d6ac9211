// Line charts of our own: some hundred lines, so that the page and the report need no other file, work without
// a network, follow the colors of the page, and can be read by a screen reader through the table beside them.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 440, HEIGHT = 176, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22;

function element(name, attributes = {}, text = null) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  return node;
}

export function format(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(4)));
}

// An exponential moving average that starts at the first value; weight 0 leaves the points alone.
export function smooth(points, weight) {
  let mean = null;
  return points.map(([x, y]) => {
    mean = mean === null ? y : weight * mean + (1 - weight) * y;
    return [x, mean];
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

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) values.push(value);
  return values;
}

// series: [{name, color (0 to 5), points: [[x, y]], band: [[x, low, high]] or undefined, start: y or undefined}]
export class LineChart {
  constructor(title, { xName = "step", onZoom = () => {} } = {}) {
    this.title = title;
    this.xName = xName;
    this.onZoom = onZoom;
    this.series = [];
    this.range = null;
    this.smoothing = 0;
    this.figure = document.createElement("figure");
    this.figure.dataset.metric = title;
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    this.svg = element("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0" });
    this.readout = document.createElement("div");
    this.readout.className = "readout";
    this.figure.append(caption, this.svg, this.readout);
    this.svg.addEventListener("pointermove", (event) => this.point(this.xAt(event)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("pointerdown", (event) => { this.dragFrom = this.xAt(event); });
    this.svg.addEventListener("pointerup", (event) => this.drop(this.xAt(event)));
    this.svg.addEventListener("dblclick", () => this.onZoom(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  xAt(event) {
    const box = this.svg.getBoundingClientRect();
    const position = ((event.clientX - box.left) / box.width) * WIDTH;
    return this.low + ((position - LEFT) / (WIDTH - LEFT - RIGHT)) * (this.high - this.low);
  }

  drop(x) {
    const from = this.dragFrom;
    this.dragFrom = undefined;
    if (from !== undefined && Math.abs(x - from) > (this.high - this.low) / 50) {
      this.onZoom([Math.min(from, x), Math.max(from, x)]);
    }
  }

  key(event) {
    const all = this.series.flatMap((curve) => curve.points.map(([x]) => x)).sort((a, b) => a - b);
    if (!["ArrowLeft", "ArrowRight", "Escape"].includes(event.key) || !all.length) return;
    event.preventDefault();
    if (event.key === "Escape") return this.onZoom(null);
    const here = this.cursorX ?? (event.key === "ArrowLeft" ? Infinity : -Infinity);
    const next = event.key === "ArrowRight" ? all.find((x) => x > here) : all.findLast((x) => x < here);
    if (next !== undefined) this.point(next);
  }

  // Show the values nearest to x, in words under the chart.
  point(x) {
    this.cursor?.remove();
    this.cursorX = x;
    if (x === null || !this.series.some((curve) => curve.points.length)) {
      this.readout.textContent = "";
      return;
    }
    const values = [];
    let nearestX = x;
    for (const curve of this.series) {
      let best = null;
      for (const point of curve.points) {
        if (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
      }
      if (best) {
        nearestX = best[0];
        values.push(`${this.series.length > 1 ? curve.name + " " : ""}${format(best[1])}`);
      }
    }
    this.readout.textContent = `${this.xName} ${format(nearestX)}: ${values.join(", ")}`;
    const position = this.pixelX(nearestX);
    this.cursor = element("line", { class: "cursor", x1: position, x2: position, y1: TOP, y2: HEIGHT - BOTTOM });
    this.svg.append(this.cursor);
  }

  pixelX(x) { return LEFT + ((x - this.low) / (this.high - this.low || 1)) * (WIDTH - LEFT - RIGHT); }
  pixelY(y) { return HEIGHT - BOTTOM - ((y - this.bottom) / (this.top - this.bottom || 1)) * (HEIGHT - TOP - BOTTOM); }
  path(points) {
    return points.map(([x, y], n) => `${n ? "L" : "M"}${this.pixelX(x).toFixed(1)} ${this.pixelY(y).toFixed(1)}`).join("");
  }

  draw(series, { range = null, smoothing = 0 } = {}) {
    this.series = series.filter((curve) => curve.points.length);
    this.svg.replaceChildren();
    const inside = ([x]) => range === null || (x >= range[0] && x <= range[1]);
    const shown = this.series.map((curve) => ({ ...curve, points: curve.points.filter(inside), band: curve.band?.filter(inside) }));
    const xs = shown.flatMap((curve) => curve.points.map(([x]) => x));
    const ys = shown.flatMap((curve) => [...curve.points.map(([, y]) => y), ...(curve.band ?? []).flatMap(([, low, high]) => [low, high])]);
    if (!xs.length) {
      this.svg.append(element("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet"));
      return;
    }
    [this.low, this.high] = range ?? [Math.min(...xs), Math.max(...xs)];
    if (this.low === this.high) this.high = this.low + 1;
    const spread = Math.max(...ys) - Math.min(...ys) || Math.abs(ys[0]) || 1;
    [this.bottom, this.top] = [Math.min(...ys) - 0.05 * spread, Math.max(...ys) + 0.05 * spread];
    for (const y of ticks(this.bottom, this.top, 4)) {
      const position = this.pixelY(y);
      this.svg.append(element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: position, y2: position }));
      this.svg.append(element("text", { x: LEFT - 5, y: position + 4, "text-anchor": "end" }, format(y)));
    }
    for (const x of ticks(this.low, this.high, 5)) {
      this.svg.append(element("text", { x: this.pixelX(x), y: HEIGHT - 6, "text-anchor": "middle" }, format(x)));
    }
    for (const curve of shown) {
      const stroke = `var(--series-${curve.color % 6})`;
      if (curve.start !== undefined && curve.start !== null) {
        const position = this.pixelY(curve.start);
        this.svg.append(element("line", { class: "start", x1: LEFT, x2: WIDTH - RIGHT, y1: position, y2: position }));
      }
      if (curve.band?.length) {
        const back = [...curve.band].reverse().map(([x, low]) => [x, low]);
        const outline = this.path([...curve.band.map(([x, , high]) => [x, high]), ...back]);
        const area = element("path", { class: "band", d: `${outline}Z` });
        area.style.fill = stroke;
        this.svg.append(area);
      }
      const columns = WIDTH - LEFT - RIGHT;
      if (smoothing) this.svg.append(element("path", { class: "raw", d: this.path(thin(curve.points, columns)), stroke }));
      const line = thin(smooth(curve.points, smoothing), columns);
      this.svg.append(element("path", { d: this.path(line), stroke }));
      if (line.length === 1) this.svg.append(element("circle", { cx: this.pixelX(line[0][0]), cy: this.pixelY(line[0][1]), r: 2.5, fill: stroke }));
    }
    const labels = this.series.map((curve) => `${curve.name}: ${format(curve.points.at(-1)[1])}`);
    this.svg.setAttribute("aria-label", `${this.title} over ${this.xName}; last values ${labels.join(", ")}`);
  }
}
