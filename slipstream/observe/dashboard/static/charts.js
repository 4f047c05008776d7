// Line charts over steps or seconds, with one cursor for all charts of a page.

import { h, setText, short } from "./dom.js";

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const PALETTE = ["--blue", "--orange", "--green", "--violet", "--red", "--teal", "--gold", "--grey"];
export const color = (index) => token(PALETTE[index % PALETTE.length]);

/** Mean of each value and up to `width - 1` before it; null where the value is. */
export function smooth(values, width) {
  let sum = 0;
  const recent = [];
  return values.map((value) => {
    if (value === null) return null;
    recent.push(value);
    sum += value;
    if (recent.length > width) sum -= recent.shift();
    return sum / recent.length;
  });
}

const isSparse = (values) => {
  let count = 0;
  for (const value of values) if (value !== null) count += 1;
  return count < values.length / 2;
};

/**
 * A chart. `lines`: [{label, color, dash, faint, points}]; `set(x, [values, ...])` draws.
 * `title` may be an element; `floor`, `ceiling`: ends of the y axis; `log`: its scale; `marks`: [{value, label}].
 */
export class Chart {
  constructor({ title, lines, floor = null, ceiling = null, log = false, marks = [], height = 168, format = short, x = "step", sync = "page" }) {
    Object.assign(this, { lines, floor, ceiling, log, marks, height, format, x, sync });
    this.values = lines.map(() => h("b", null, ""));
    const shown = lines.map((line, index) => (line.label === null ? null
      : h("span", { class: "key" }, h("i", { css: { background: line.color } }), line.label, " ", this.values[index])));
    this.at = h("span", { class: "at" });
    this.canvas = h("div", { class: "canvas" });
    this.element = h("figure", { class: "chart" },
      h("figcaption", null, h("span", { class: "title" }, title), this.at), h("div", { class: "keys" }, shown), this.canvas);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.canvas);
  }

  set(x, series) {
    this.data = [x, ...series.map((values) => (this.log ? values.map((value) => (value > 0 ? value : null)) : values))];
    if (!this.plot && this.canvas.clientWidth) this.draw();
    else this.plot?.setData(this.data, this.isWhole());
    this.showValues();
  }

  /** Whether all of x is shown: a range that was chosen stays while rows arrive. */
  isWhole() {
    return !this.isZoomed;
  }

  draw() {
    const grid = { stroke: token("--grid"), width: 1 };
    const axis = { stroke: token("--muted"), font: `10px ${token("--sans")}`, grid, ticks: { show: false }, gap: 3 };
    this.plot = new uPlot({
      width: this.canvas.clientWidth,
      height: this.height,
      legend: { show: false },
      cursor: { sync: { key: this.sync, setSeries: false }, points: { size: 5 }, drag: { x: true, y: false, setScale: true }, y: false },
      scales: { x: { time: false }, y: { distr: this.log ? 3 : 1, range: (_, low, high) => this.range(low, high) } },
      axes: [{ ...axis, size: 20, space: 60 }, { ...axis, size: this.log ? 50 : 44, space: 30, grid: this.log ? { ...grid, filter: (_, ticks) => ticks.map((tick) => (power(tick) ? tick : null)) } : grid,
        values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : this.log ? power(tick) : compact(tick))) }],
      series: [{}, ...this.lines.map((line, index) => this.line(line, index))],
      hooks: { setCursor: [() => this.showValues()], draw: [() => this.drawMarks()],
        setScale: [(plot, key) => { if (key === "x") this.noteZoom(plot); }] },
    }, this.data, this.canvas);
  }

  noteZoom(plot) {
    const x = this.data[0];
    this.isZoomed = x.length > 1 && (plot.scales.x.min > x[0] || plot.scales.x.max < x[x.length - 1]);
  }

  line(line, index) {
    const sparse = isSparse(this.data[index + 1]);
    return { stroke: line.faint ? `${line.color}55` : line.color, width: line.faint ? 1 : 1.6, dash: line.dash, spanGaps: true,
      points: { show: Boolean(line.points || (sparse && this.data[0].length < 2000)), size: 4, fill: line.color, stroke: line.color } };
  }

  range(low, high) {
    if (this.log) return low === null || high === null || !(low > 0) ? [0.001, 1] : [low, low === high ? 10 * low : high];
    if (low === null) return [this.floor ?? 0, this.ceiling ?? 1];
    const least = Math.min(low, this.floor ?? low), most = Math.max(high, this.ceiling ?? high);
    const pad = least === most ? Math.abs(least) * 0.1 || 1 : (most - least) * 0.06;
    return [this.floor !== null && least >= this.floor ? this.floor : least - pad,
      this.ceiling !== null && most <= this.ceiling ? this.ceiling + 0.02 * (this.ceiling - least) : most + pad];
  }

  drawMarks() {
    const { ctx, bbox } = this.plot;
    for (const mark of this.marks) {
      const y = Math.round(this.plot.valToPos(mark.value, "y", true));
      if (!(y >= bbox.top && y <= bbox.top + bbox.height)) continue;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = token("--muted");
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.font = `${10 * devicePixelRatio}px ${token("--sans")}`;
      ctx.textAlign = "right";
      ctx.fillText(mark.label, bbox.left + bbox.width, y - 3 * devicePixelRatio);
      ctx.restore();
    }
  }

  /** The values at the cursor, else the newest. */
  showValues() {
    const index = this.plot?.cursor.idx ?? null;
    const [x, ...series] = this.data;
    setText(this.at, index === null || x[index] === undefined ? "" : `${this.x} ${short(x[index])}`);
    series.forEach((values, number) => setText(this.values[number], this.format(valueAt(values, index))));
  }

  resize() {
    if (!this.data || !this.canvas.clientWidth) return;
    if (this.plot) this.plot.setSize({ width: this.canvas.clientWidth, height: this.height });
    else { this.draw(); this.showValues(); }
  }

  destroy() {
    this.observer.disconnect();
    this.plot?.destroy();
  }
}

/** The value at an index, or the newest before it: evaluations are not in every row. */
function valueAt(values, index) {
  for (let at = index ?? values.length - 1; at >= 0; at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(0);
  return String(+value.toPrecision(4));
}

/** Whole powers of ten alone: others would crowd a logarithmic axis. */
function power(value) {
  const exponent = Math.log10(value);
  return Math.abs(exponent - Math.round(exponent)) < 1e-9 ? value.toExponential(0) : "";
}
