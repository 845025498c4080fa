// @ts-check
/**
 * A, B and C of every sublayer as small maps beside one another, and those of one sublayer with their numbers.
 *
 *     C C C         C stands over the old streams that it reads, A between old and new streams, B beside the new streams
 *     A A A  B      that it writes to.
 *     A A A  B
 *     A A A  B
 */

import { h, mark, s, set, updateChildren } from "../dom.js";
import { ChartFigure } from "../chart/figure.js";
import { swatch } from "../chart/heat.js";
import { every } from "../chart/scale.js";
import { show } from "../numbers.js";

/** @typedef {{mix: number[][], inject: number[], collapse: number[][]}} Site  each entry is a mean over tokens and features */
/** @typedef {{name: string, text: string, x: number, y: number, of: (site: Site) => number | undefined}} Entry  x, y: its cell in the map */
/** @typedef {{labels: string[], sites: Site[], summary: string}} Data */

const MARGIN = { top: 8, right: 4, bottom: 18, left: 4 };
const [SMALLEST, LARGEST] = [7, 17]; // pixels of a cell
const LABEL = 24; // pixels for the number of a sublayer
const GAP = 0.45; // between A and the others, in cells
const FILLED = 0.88; // of the space for a sublayer

/** The entries of maps of so many old and new streams. @param {number} n @param {number} rows @returns {Entry[]} */
export function entriesOf(n, rows) {
  const each = (/** @type {number} */ count) => Array.from({ length: count }, (_, k) => k);
  return [
    ...each(n).map((j) => ({ name: `C ${j + 1}`, text: `C, read of stream ${j + 1}`, x: j, y: 0, of: (/** @type {Site} */ site) => site.collapse[0][j] })),
    ...each(rows).flatMap((k) => each(n).map((j) => ({
      name: `A ${k + 1}${j + 1}`, text: `A, new stream ${k + 1} from old stream ${j + 1}`, x: j, y: 1 + GAP + k, of: (/** @type {Site} */ site) => site.mix[k]?.[j],
    }))),
    ...each(rows).map((k) => ({ name: `B ${k + 1}`, text: `B, write to stream ${k + 1}`, x: n + GAP, y: 1 + GAP + k, of: (/** @type {Site} */ site) => site.inject[k] })),
  ];
}

export class Matrices extends ChartFigure {
  /** @param {import("../chart/figure.js").Options} options */
  constructor(options) {
    super(options);
    /** @type {Data} */
    this.data = { labels: [], sites: [], summary: "" };
    /** @type {Entry[]} */
    this.entries = [];
    this.n = this.newest = 1;
    this.most = 1;
    this.layers = Object.fromEntries(["cells", "axis", "cursor"].map((name) => [name, this.svg.appendChild(s(`g.${name}`))]));
    // Beside the figure, whose table is that of all sublayers.
    this.numbers = h("div.streams-numbers", { tabindex: 0, role: "group", "aria-label": "A, B and C of one sublayer" });
  }

  /** @param {Data} data */
  show(data) {
    this.data = data;
    this.n = Math.max(...data.sites.map((site) => site.collapse[0].length));
    this.newest = Math.max(...data.sites.map((site) => site.mix.length));
    this.entries = entriesOf(this.n, this.newest);
    const sizes = data.sites.flatMap((site) => this.entries.map((entry) => Math.abs(entry.of(site) ?? 0))).filter(Number.isFinite);
    this.most = Math.max(1, ...sizes);
    this.shown(data.sites.length, data.summary);
    this.#drawLegend();
    this.#drawNumbers();
  }

  rows() {
    return Math.max(1, this.entries.length);
  }

  /** Several lines of maps where one would have too small cells. */
  #layout() {
    const [count, across, inner] = [Math.max(1, this.data.sites.length), this.n + 1 + GAP, this.width - MARGIN.left - MARGIN.right];
    const fitting = Math.max(1, Math.floor(inner / ((SMALLEST * across) / FILLED)));
    const lines = Math.ceil(count / fitting);
    const perLine = Math.ceil(count / lines);
    const step = inner / perLine;
    const size = Math.max(1, Math.min(LARGEST, (step * FILLED) / across));
    const below = (this.newest + 1 + GAP) * size + LABEL; // from a line to the next
    const corner = (/** @type {number} */ k) => ({ x: MARGIN.left + (k % perLine) * step + (step - size * across) / 2, y: MARGIN.top + Math.floor(k / perLine) * below });
    return { lines, perLine, step, size, below, corner };
  }

  /** @param {PointerEvent} event */
  nearest(event) {
    const box = this.plot.getBoundingClientRect();
    const { lines, perLine, step, below } = this.#layout();
    const at = (/** @type {number} */ value, /** @type {number} */ count) => Math.max(0, Math.min(count - 1, Math.floor(value)));
    return at((event.clientY - box.top - MARGIN.top) / below, lines) * perLine + at((event.clientX - box.left - MARGIN.left) / step, perLine);
  }

  /** @param {PointerEvent} event */
  point(event) {
    const box = this.plot.getBoundingClientRect();
    const { size, corner } = this.#layout();
    const from = corner(Math.min(this.count - 1, this.nearest(event)));
    const [x, y] = [(event.clientX - box.left - from.x) / size, (event.clientY - box.top - from.y) / size];
    const at = this.entries.findIndex((entry) => x >= entry.x && x < entry.x + 1 && y >= entry.y && y < entry.y + 1);
    if (at >= 0) this.row = at;
  }

  /** @param {number} index */
  spoken(index) {
    const entry = this.entries[this.row];
    const value = entry.of(this.data.sites[index]);
    return `${this.data.labels[index]}: ${entry.text}: ${value === undefined ? "none" : show(value, 4)}`;
  }

  table() {
    return {
      head: ["sublayer", ...this.entries.map((entry) => entry.name)],
      rows: this.data.sites.map((site, k) => [this.data.labels[k], ...this.entries.map((entry) => entry.of(site) ?? null)]),
    };
  }

  resize(anyway = false) {
    const width = anyway && this.width ? this.width : Math.floor(this.plot.clientWidth);
    const before = this.width;
    this.width = width || before;
    const { lines, below } = this.#layout();
    this.height = Math.ceil(MARGIN.top + lines * below + MARGIN.bottom);
    this.width = before;
    super.resize(anyway);
  }

  draw() {
    const { perLine, step, size, below, corner } = this.#layout();
    const gap = size > 6 ? 1 : 0;
    const cells = this.data.sites.flatMap((site, k) =>
      this.entries.map((entry) => ({ entry, k, from: corner(k), value: entry.of(site) })).filter(({ value }) => value !== undefined));
    updateChildren(this.layers.cells, cells, () => s("rect"), (cell, { entry, k, from, value }) => {
      const number = /** @type {number} */ (value);
      mark(cell, {
        class: `${toClass(number)} bordered`, x: (from.x + entry.x * size).toFixed(2), y: (from.y + entry.y * size).toFixed(2),
        width: (size - gap).toFixed(2), height: (size - gap).toFixed(2), "fill-opacity": toStrength(number, this.most).toFixed(3),
        "data-series": entry.name, "data-index": k, "data-value": String(number),
      });
    });
    const nth = every(perLine + 1, (this.width - MARGIN.left) / 22);
    const texts = [
      ...this.data.sites.map((_, k) => ({ k, x: MARGIN.left + ((k % perLine) + 0.5) * step, y: corner(k).y + below - 8, text: String(k + 1) })).filter(({ k }) => k % nth === 0),
      { x: this.width / 2, y: this.height - 6, text: this.options.x },
    ];
    updateChildren(this.layers.axis, texts, () => s("text"), (text, label) => {
      set(text, { x: label.x.toFixed(1), y: label.y.toFixed(1), "text-anchor": "middle", text: label.text });
    });
  }

  drawCursor() {
    const { size, corner } = this.#layout();
    const entry = this.entries[this.row];
    const from = corner(this.index ?? 0);
    const at = this.index === null || !entry ? [] : [
      { x: from.x - 3, y: from.y - 3, width: (this.n + 1 + GAP) * size + 6, height: (this.newest + 1 + GAP) * size + 6 },
      { x: from.x + entry.x * size, y: from.y + entry.y * size, width: size, height: size },
    ];
    updateChildren(this.layers.cursor, at, () => s("rect"), (rect, box) => set(rect, box));
    this.#drawNumbers();
  }

  /** The numbers of the sublayer at the cursor, else of the first, in the places that they have in the map. */
  #drawNumbers() {
    const at = Math.min(this.index ?? 0, this.count - 1);
    const site = this.data.sites[at];
    if (!site) return;
    const [n, rows] = [site.collapse[0].length, site.mix.length];
    const text = JSON.stringify([this.data.labels[at], site, this.most]);
    if (text === this.shownText) return;
    this.shownText = text;
    const cell = (/** @type {number} */ value) =>
      h("td.number", { class: `number level-${Math.round(10 * toStrength(value, this.most))}${value < 0 ? " below" : ""}` }, show(value, 3));
    const head = (/** @type {string} */ name, scope = "col") => h("th", { scope }, name);
    this.numbers.replaceChildren(h("table", null,
      h("caption", null, `${this.data.labels[at]}: the numbers`),
      h("thead", null, h("tr", null, h("td"), ...site.collapse[0].map((_, j) => head(n === 1 ? "old x" : `old ${j + 1}`)), head("B, write"))),
      h("tbody", null,
        h("tr", null, head("C, read", "row"), ...site.collapse[0].map(cell), h("td")),
        ...site.mix.map((row, k) => h("tr", null, head(`A, new ${rows === 1 ? "x" : k + 1}`, "row"), ...row.map(cell), cell(site.inject[k]))))));
  }

  #drawLegend() {
    const below = this.data.sites.some((site) => this.entries.some((entry) => (entry.of(site) ?? 0) < 0));
    const steps = [0.01, 0.1, 0.3, 1].map((share) => share * this.most);
    this.legend.replaceChildren(
      h("li.unit", null, this.options.y),
      ...steps.map((step) => h("li", null, swatch("cell", Math.sqrt(step / this.most)), show(step, 2))),
      ...(below ? [h("li", null, swatch("cell below", 0.6), "below 0")] : []));
  }
}

/** @param {number} value */
const toClass = (value) => (!Number.isFinite(value) ? "cell odd" : value < 0 ? "cell below" : "cell");

/** How strong a cell's colour is: the root makes hundredths visible. @param {number} value @param {number} most */
const toStrength = (value, most) => 0.04 + 0.96 * Math.sqrt(Math.min(1, Number.isFinite(value) ? Math.abs(value) / most : 1));
