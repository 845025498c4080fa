// @ts-check
/**
 * A map of numbers: a cell for each row and column. Shares between 0 and 1 are drawn by lightness of one colour; what is below 0
 * has a colour of its own. A cell for which there is no number is left out.
 */

import { h, updateChildren, mark, s, set } from "../dom.js";
import { show } from "../numbers.js";
import { ChartFigure } from "./figure.js";
import { every } from "./scale.js";

/**
 * @typedef {object} Map
 * @property {string[]} columns
 * @property {string[]} rows
 * @property {(number | null)[][]} values  row by row
 * @property {string} summary
 * @property {number[]} [at]  the places of the columns, where some are left out
 * @property {number[]} [from]  the places of the rows
 * @property {boolean} [diverging]  values below 0 matter as much as those above: the scale is that of the largest magnitude
 */

const MARGIN = { top: 6, right: 12, bottom: 40 };
const MOST = 520; // pixels of height
const NAMED = 420; // pixels of width from which on rows have their names, not numbers
const LETTER = 6.3; // pixels
const LONGEST = 18; // letters of a name
const CELL = [27, 14]; // pixels: cells of at least this size show their number
const MID = 0.37; // share of the largest from which on a cell of the dark theme is light, and its number dark
const HIGH = 0.75; // share of the largest from which on a cell of the light theme is dark, and its number light

export class HeatMap extends ChartFigure {
  /** @param {import("./figure.js").Options} options */
  constructor(options) {
    super(options);
    this.legendText = "";
    this.element.classList.add("square");
    /** @type {Map} */
    this.data = { columns: [], rows: [], values: [], summary: "" };
    this.layers = Object.fromEntries(["cells", "numbers", "axis", "cursor"].map((name) => [name, this.svg.appendChild(s(`g.${name}`))]));
  }

  /** @param {Map} data */
  show(data) {
    this.data = data;
    const sizes = data.values.flat().map((value) => (value === null || !Number.isFinite(value) ? 0 : Math.abs(value)));
    this.most = data.diverging ? Math.max(...sizes, 1e-12) : 1;
    this.shown(data.columns.length, data.summary);
    this.#drawLegend();
  }

  rows() {
    return Math.max(1, this.data.rows.length);
  }

  places() {
    const step = this.#cell()[0];
    return { left: this.#left() + step / 2, step };
  }

  /** Whether the rows have their names: short ones, where there is room. */
  #named() {
    return this.width >= NAMED && this.data.rows.every((name) => name.length <= LONGEST);
  }

  #left() {
    const letters = this.#named() ? Math.max(...this.data.rows.map((name) => name.length), 1) : 3;
    return 12 + LETTER * letters;
  }

  #cell() {
    const [columns, rows] = [Math.max(1, this.data.columns.length), Math.max(1, this.data.rows.length)];
    return [(this.width - this.#left() - MARGIN.right) / columns, (this.height - MARGIN.top - MARGIN.bottom) / rows];
  }

  /** @param {PointerEvent} event */
  point(event) {
    const top = event.clientY - this.plot.getBoundingClientRect().top - MARGIN.top;
    // The first row is at the bottom, as the stream goes up.
    this.row = Math.max(0, Math.min(this.rows() - 1, this.rows() - 1 - Math.floor(top / this.#cell()[1])));
  }

  /** @param {number} index */
  spoken(index) {
    const { columns, rows, values } = this.data;
    const value = values[this.row]?.[index];
    return `${this.options.x} ${columns[index]}: ${rows[this.row]} ${value === null || value === undefined ? "none" : show(value, 4)}`;
  }

  table() {
    const { columns, rows, values } = this.data;
    return { head: [this.options.y, ...columns], rows: rows.map((name, k) => [name, ...values[k]]) };
  }

  resize(anyway = false) {
    // About square, as rows and columns are the same places: but no higher than a screen.
    const width = anyway && this.width ? this.width : Math.floor(this.plot.clientWidth); // asking for it costs a layout
    this.height = Math.max(300, Math.min(MOST, width));
    super.resize(anyway);
  }

  draw() {
    const [width, height] = this.#cell();
    const { columns, rows, values, at, from } = this.data;
    const [left, named] = [this.#left(), this.#named()];
    const cells = values.flatMap((row, r) => row.map((value, c) => ({ value, r, c }))).filter(({ value }) => value !== null);
    const gap = Math.min(width, height) > 8 ? 1 : 0;
    updateChildren(this.layers.cells, cells, () => s("rect"), (cell, { value, r, c }) => {
      const number = /** @type {number} */ (value);
      const finite = Number.isFinite(number);
      const share = finite ? Math.min(1, Math.abs(number) / (this.most ?? 1)) : 1;
      mark(cell, {
        class: !finite ? "cell odd" : number < 0 ? "cell below" : "cell",
        x: (left + c * width).toFixed(2), y: (MARGIN.top + (rows.length - 1 - r) * height).toFixed(2),
        width: Math.max(0.5, width - gap).toFixed(2), height: Math.max(0.5, height - gap).toFixed(2),
        // The root makes shares of a few hundredths visible; the legend has the same steps.
        "fill-opacity": (0.04 + 0.96 * Math.sqrt(share)).toFixed(3),
        "data-series": rows[r], "data-index": c, "data-value": String(number),
      });
    });
    const numbered = width >= CELL[0] && height >= CELL[1] ? cells.filter(({ value }) => Number.isFinite(value)) : [];
    updateChildren(this.layers.numbers, numbered, () => s("text"), (label, { value, r, c }) => {
      const share = Math.abs(/** @type {number} */ (value)) / (this.most ?? 1);
      set(label, {
        x: (left + (c + 0.5) * width).toFixed(1), y: (MARGIN.top + (rows.length - 0.5 - r) * height + 3.5).toFixed(1), "text-anchor": "middle",
        class: share > HIGH ? "high" : share > MID ? "mid" : "low", text: /** @type {number} */ (value).toFixed(2),
      });
    });
    const across = every(columns.length, (this.width - left) / 40);
    const up = every(rows.length, (this.height - MARGIN.bottom) / 22);
    const bottom = this.height - MARGIN.bottom;
    const texts = [
      ...columns.flatMap((_, c) => (c % across ? [] : [{ x: left + (c + 0.5) * width, y: bottom + 16, text: String(at?.[c] ?? c), anchor: "middle" }])),
      ...rows.flatMap((_, r) => (r % up ? [] : [{ x: left - 7, y: bottom - (r + 0.5) * height + 4, text: named ? rows[r] : String(from?.[r] ?? r), anchor: "end" }])),
      { x: (left + this.width - MARGIN.right) / 2, y: this.height - 6, text: this.options.x, anchor: "middle" },
    ];
    updateChildren(this.layers.axis, texts, () => s("text"), (text, label) => {
      set(text, { x: label.x.toFixed(1), y: label.y.toFixed(1), "text-anchor": label.anchor, text: label.text });
    });
  }

  drawCursor() {
    const [width, height] = this.#cell();
    const at = this.index === null ? [] : [0];
    updateChildren(this.layers.cursor, at, () => s("rect"), (rect) => {
      set(rect, {
        x: (this.#left() + /** @type {number} */ (this.index) * width).toFixed(2), y: (MARGIN.top + (this.rows() - 1 - this.row) * height).toFixed(2),
        width: width.toFixed(2), height: height.toFixed(2),
      });
    });
  }

  #drawLegend() {
    const below = this.data.values.some((row) => row.some((value) => value !== null && value < 0));
    const text = JSON.stringify([this.options.y, below, this.most]);
    if (text === this.legendText) return;
    this.legendText = text;
    const steps = [0.01, 0.1, 0.3, 1].map((share) => share * (this.most ?? 1));
    this.legend.replaceChildren(
      h("li.unit", null, this.options.y),
      ...steps.map((step) => h("li", null, swatch("cell", Math.sqrt(step / (this.most ?? 1))), show(step, 2))),
      ...(below ? [h("li", null, swatch("cell below", 0.6), "below 0")] : []),
    );
  }
}

/** A cell of the legend. @param {string} class_ @param {number} strength */
export const swatch = (class_, strength) =>
  s("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true", class: "sample" },
    s("rect", { class: class_, width: 12, height: 12, "fill-opacity": (0.04 + 0.96 * strength).toFixed(3) }));
