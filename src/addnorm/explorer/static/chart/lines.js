// @ts-check
/**
 * Values by depth, or by step: a line and marks for each series, distinguished by colour, dash and the shape of the marks.
 * Marks of attention are full, those of feed-forward hollow. What has no place on the axis (inf, nan, or 0 on a logarithm)
 * stands at its edge as a sign of its own: it is never left out.
 */

import { h, updateChildren, mark, s, set } from "../dom.js";
import { show } from "../numbers.js";
import { ChartFigure } from "./figure.js";
import { every, scaleOf } from "./scale.js";

/**
 * @typedef {object} Series
 * @property {string} name
 * @property {(number | null)[]} values  null: there is none
 * @property {number} [tone]  from 1 to 7
 * @property {boolean} [ghost]  drawn behind, thin
 * @property {[(number | null)[], (number | null)[]]} [band]  low and high
 * @property {(number | null)[]} [smooth]  what the line goes through, where it is not the values
 */

/**
 * @typedef {object} Shown
 * @property {string[]} labels  of the places of the x axis
 * @property {string[]} [kinds]  of the sublayers
 * @property {Series[]} series
 * @property {string} summary
 * @property {{name: string, values: (number | null)[]}} [earlier]  drawn behind, with its name at its end
 * @property {number[]} [range]  values that must be on the y axis too, so that it stays the same while others are shown
 */

const MARGIN = { top: 10, right: 12, bottom: 40, left: 52 };
const SIZE = 3.2;

/** Marks by tone, as paths around 0, 0. @type {Record<number, (r: number) => string>} */
const SHAPES = {
  1: (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0z`,
  2: (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  3: (r) => `M0,${-1.35 * r}L${1.25 * r},${0.9 * r}L${-1.25 * r},${0.9 * r}z`,
  4: (r) => `M0,${-1.4 * r}L${1.4 * r},0L0,${1.4 * r}L${-1.4 * r},0z`,
  5: (r) => `M0,${1.35 * r}L${1.25 * r},${-0.9 * r}L${-1.25 * r},${-0.9 * r}z`,
  6: (r) => `M${-1.4 * r},${-0.7 * r}h${2.8 * r}v${1.4 * r}h${-2.8 * r}z`,
  7: (r) => `M${-0.7 * r},${-1.4 * r}h${1.4 * r}v${2.8 * r}h${-1.4 * r}z`,
};

export class LineChart extends ChartFigure {
  /** @param {import("./figure.js").Options} options */
  constructor(options) {
    super(options);
    this.legendText = "";
    /** @type {Shown} */
    this.data = { labels: [], series: [], summary: "" };
    this.layers = Object.fromEntries(["grid", "axis", "bands", "before", "stems", "lines", "marks", "cursor"].map((name) => [name, this.svg.appendChild(s(`g.${name}`))]));
    /** @type {import("./scale.js").Scale} */
    this.scale = scaleOf([], {});
  }

  /** @param {Shown} data */
  show(data) {
    // The present state is drawn last, over the ghosts, and is first in legend, table and readout.
    this.data = data;
    const values = [...(data.range ?? []), ...(data.earlier?.values ?? []), ...data.series.flatMap((curve) => [...curve.values, ...(curve.band ? [...curve.band[0], ...curve.band[1]] : [])])];
    this.scale = scaleOf(values, { log: this.options.log, from: this.options.from, room: this.height < 200 ? 4 : 6 });
    this.shown(data.labels.length, data.summary);
    this.#drawLegend();
  }

  rows() {
    return Math.max(1, this.data.series.length);
  }

  places() {
    const room = Math.max(1, this.width - MARGIN.left - MARGIN.right);
    return { left: MARGIN.left, step: room / Math.max(1, this.count - 1) };
  }

  /** @param {number} index */
  spoken(index) {
    const series = this.data.series;
    const texts = series.map((curve, k) => ({ k, text: `${curve.name} ${this.#word(curve.values[index])}` }));
    texts.sort((a, b) => Number(b.k === this.row) - Number(a.k === this.row) || a.k - b.k);
    return `${this.data.labels[index]}: ${texts.map((entry) => entry.text).join("; ")}`;
  }

  /** @param {number | null | undefined} value */
  #word(value) {
    return value === null || value === undefined ? "none" : show(value, 4);
  }

  table() {
    return {
      head: [this.options.x, ...this.data.series.map((curve) => curve.name)],
      rows: this.data.labels.map((label, k) => [label, ...this.data.series.map((curve) => curve.values[k] ?? null)]),
    };
  }

  draw() {
    const { left, step } = this.places();
    const inner = this.height - MARGIN.top - MARGIN.bottom;
    const floor = MARGIN.top + inner;
    const { labels, kinds } = this.data;
    /** @param {number} k */
    const x = (k) => left + k * step;
    /** @param {number} value */
    const y = (value) => floor - this.scale.place(value) * inner;
    const edge = (/** @type {number} */ value) => (value === Infinity ? MARGIN.top + 4 : floor);
    const fits = (/** @type {number | null} */ value) => value !== null && Number.isFinite(value) && !(this.options.log && value <= 0);
    this.#drawAxes(x, y, floor);

    // Stems of several series stand side by side.
    const wide = this.options.stems ? Math.min(9, 0.36 * step) : 0;
    /** @param {number} at of the series */
    const aside = (at) => (wide * (at - (this.data.series.length - 1) / 2)) / Math.max(1, this.data.series.length - 1);
    const series = this.data.series.map((curve, at) => ({ curve, at })).reverse().sort((a, b) => Number(b.curve.ghost ?? false) - Number(a.curve.ghost ?? false));
    updateChildren(this.layers.bands, series.filter(({ curve }) => curve.band), () => s("path"), (path, { curve }) => {
      const [low, high] = /** @type {[any[], any[]]} */ (curve.band);
      const there = curve.values.map((_, k) => k).filter((k) => fits(low[k]) && fits(high[k]));
      const points = [...there.map((k) => `${x(k).toFixed(1)},${y(high[k]).toFixed(1)}`), ...there.reverse().map((k) => `${x(k).toFixed(1)},${y(low[k]).toFixed(1)}`)];
      set(path, { class: `band tone-${curve.tone ?? 1}`, d: points.length ? `M${points.join("L")}z` : "" });
    });
    /** @param {(number | null)[]} values @param {number} [shift] @param {boolean} [stems] */
    const through = (values, shift = 0, stems = false) => {
      let pen = "M";
      let d = "";
      values.forEach((value, k) => {
        if (!fits(value)) { pen = "M"; return; }
        const [px, py] = [(x(k) + shift).toFixed(1), y(/** @type {number} */ (value)).toFixed(1)];
        d += stems ? `M${px},${floor}V${py}` : `${pen}${px},${py}`;
        pen = "L";
      });
      return d;
    };
    const { earlier } = this.data;
    const end = earlier ? earlier.values.findLastIndex(fits) : -1;
    updateChildren(this.layers.before, earlier && end >= 0 ? [earlier] : [], () => s("g", null, s("path"), s("text")), (group, { name, values }) => {
      set(group.firstChild, { d: through(values) });
      set(group.lastChild, { x: x(end).toFixed(1), y: Math.max(MARGIN.top + 8, y(/** @type {number} */ (values[end])) - 6).toFixed(1), text: `${name}, before` });
    });
    updateChildren(this.layers.lines, series, () => s("path"), (path, { curve, at }) => {
      const d = through(curve.smooth ?? curve.values, aside(at), this.options.stems);
      set(path, { class: `line tone-${curve.tone ?? 1}${curve.ghost ? " ghost" : ""}${this.options.stems ? " stem" : ""}`, d });
    });
    // Many marks grow small, and those of ghosts are smaller still.
    const crowded = Math.max(0.4, Math.min(1, step / 9));
    updateChildren(this.layers.marks, series, () => s("g"), (group, { curve, at }) => {
      set(group, { class: `marks tone-${curve.tone ?? 1}${curve.ghost ? " ghost" : ""}${curve.smooth ? " faint" : ""}`, data: { series: curve.name } });
      const marks = curve.values.map((value, k) => ({ value, k })).filter(({ value }) => value !== null && value !== undefined);
      updateChildren(group, marks, () => s("path"), (element, { value, k }) => {
        const good = fits(value);
        // Those of a series behind another are larger: where both are equal, both are seen.
        const r = SIZE * crowded * (curve.ghost ? 0.7 : 1) * (1 + 0.16 * at);
        const odd = good ? "" : " odd";
        mark(element, {
          class: `mark${kinds?.[k] === "feed-forward" ? " hollow" : ""}${odd}`,
          d: good ? SHAPES[curve.tone ?? 1](r) : "M-4,-4L4,4M-4,4L4,-4",
          transform: `translate(${(x(k) + aside(at)).toFixed(1)},${(good ? y(/** @type {number} */ (value)) : edge(/** @type {number} */ (value))).toFixed(1)})`,
          "data-series": curve.name, "data-index": k, "data-value": String(value),
        });
      });
    });
    if (!labels.length) updateChildren(this.layers.marks, [], () => s("g"), () => {});
  }

  /** @param {(k: number) => number} x @param {(value: number) => number} y @param {number} floor */
  #drawAxes(x, y, floor) {
    const right = this.width - MARGIN.right;
    updateChildren(this.layers.grid, this.scale.ticks, () => s("line"), (line, tick) => {
      set(line, { x1: MARGIN.left, x2: right, y1: y(tick).toFixed(1), y2: y(tick).toFixed(1) });
    });
    const ticks = this.scale.ticks.map((tick) => ({ x: MARGIN.left - 7, y: y(tick) + 4, text: short(tick), anchor: "end" }));
    const step = every(this.count, (right - MARGIN.left) / 44);
    const { labels } = this.data;
    for (let k = 0; k < this.count; k += step) ticks.push({ x: x(k), y: floor + 16, text: labels[k] === "x_0" ? "x_0" : String(k), anchor: "middle" });
    const names = [
      { x: (MARGIN.left + right) / 2, y: this.height - 6, text: this.options.x, anchor: "middle" },
    ];
    updateChildren(this.layers.axis, [...ticks, ...names], () => s("text"), (text, label) => {
      set(text, { x: label.x.toFixed(1), y: label.y.toFixed(1), "text-anchor": label.anchor, text: label.text });
    });
  }

  drawCursor() {
    const { left, step } = this.places();
    const at = this.index === null ? [] : [left + this.index * step];
    updateChildren(this.layers.cursor, at, () => s("line"), (line, px) => {
      set(line, { x1: px.toFixed(1), x2: px.toFixed(1), y1: MARGIN.top, y2: this.height - MARGIN.bottom });
    });
  }

  #drawLegend() {
    const kinds = new Set(this.data.kinds ?? []);
    const items = this.data.series.map((curve) => ({ name: curve.name, tone: curve.tone ?? 1, ghost: curve.ghost ?? false }));
    const shapes = kinds.has("attention") && kinds.has("feed-forward") ? [{ name: "● attention, ○ feed-forward", tone: 0, ghost: false }] : [];
    const wanted = [...items, ...shapes];
    const text = JSON.stringify([this.options.y, wanted]);
    if (text === this.legendText) return;
    this.legendText = text;
    this.legend.replaceChildren(
      h("li.unit", null, this.options.y + (this.options.log ? ", logarithmic" : "")),
      ...wanted.map((item) => h("li", null, item.tone ? sample(item.tone, item.ghost, this.options.stems) : null, item.name)),
    );
  }
}

/** A line with a mark, as in the legend. @param {number} tone @param {boolean} ghost @param {boolean} [stems] */
function sample(tone, ghost, stems) {
  const class_ = `tone-${tone}${ghost ? " ghost" : ""}`;
  return s("svg", { width: 26, height: 10, viewBox: "0 0 26 10", "aria-hidden": "true", class: "sample" },
    stems ? null : s("path", { class: `line ${class_}`, d: "M0,5H26" }),
    s("g", { class: `marks ${class_}` }, s("path", { class: "mark", d: SHAPES[tone](ghost ? SIZE * 0.7 : SIZE), transform: "translate(13,5)" })));
}

/** A tick in few characters. @param {number} tick */
function short(tick) {
  const size = Math.abs(tick);
  if (size >= 1e4 || (size > 0 && size < 1e-3)) return tick.toExponential().replace("e+", "e").replace(/\.0+e/, "e");
  return show(tick, 4);
}
