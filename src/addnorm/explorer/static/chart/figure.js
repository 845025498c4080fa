// @ts-check
/**
 * The parts that all charts share: title, a sentence about the data, a data cursor for keyboard and screen reader with the value
 * in words, the data as a table, and files.
 *
 * The cursor is a slider over the places of the x axis: Left and Right move it, Home and End go to the ends, Up and Down
 * change the series that is read out. The pointer moves it too; a click keeps it there.
 */

import { h, s, announce, set, unique } from "../dom.js";
import { csvText, save, svgText } from "./download.js";

/**
 * @typedef {object} Options
 * @property {string} id
 * @property {string} title
 * @property {string} x
 * @property {string} y
 * @property {boolean} [log]
 * @property {number} [from]  a value that must be on the y axis
 * @property {number} [height]
 * @property {boolean} [stems]  from the lower edge up to each mark, instead of a line through them
 * @property {boolean} [patient]  out of sight it is drawn a moment later: see `settled`
 * @property {(index: number, commit: boolean) => void} [onCursor]
 */

/** @typedef {{head: string[], rows: (string | number | null)[][]}} Table */

/** What is still to be drawn, out of sight. @type {Set<ChartFigure>} */
const pending = new Set();
const DELAY = 40; // milliseconds

/** @type {ReturnType<typeof setTimeout> | undefined} */
let waiting;

/** @type {(() => void)[]} */
const waiters = [];

/** @param {ChartFigure} chart */
function drawLater(chart) {
  pending.add(chart);
  clearTimeout(waiting);
  waiting = setTimeout(drawPending, DELAY);
}

/** @param {ChartFigure} [chart]  which; else all */
function drawPending(chart) {
  for (const target of chart ? [chart] : [...pending]) if (pending.delete(target)) target.resize(true);
  if (!pending.size) for (const resolve of waiters.splice(0)) resolve();
}

/** When every chart shows what it was given, those out of sight too. @returns {Promise<void>} */
export const settled = () => new Promise((done) => (pending.size ? waiters.push(done) : done()));

/**
 * The grid of a view's charts. One that would be alone in the last of several rows is as wide as the grid.
 * @param {...HTMLElement} charts
 */
export function chartGrid(...charts) {
  const grid = h("div.charts", null, ...charts);
  const observer = new ResizeObserver(() => {
    const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
    const seen = charts.filter((chart) => chart.clientWidth && !chart.classList.contains("broad"));
    seen.forEach((chart, k) => chart.classList.toggle("lone", k === seen.length - 1 && k % columns === 0));
  });
  for (const element of [grid, ...charts]) observer.observe(element);
  return grid;
}

export class ChartFigure {
  /** @param {Options} options */
  constructor(options) {
    this.options = options;
    /** @type {number | null} */
    this.index = null;
    this.count = 0;
    this.row = 0; // which series the cursor reads out
    this.width = 0;
    this.height = options.height ?? 230;
    const title = unique("title");
    this.svg = s("svg", { role: "img", height: this.height });
    this.slider = h("div.cursor", { role: "slider", tabindex: 0, "aria-label": `${options.title}: data cursor`, "aria-valuemin": 1 });
    this.summary = h("p.summary");
    this.legend = h("ul.legend");
    this.readout = h("p.readout", { "aria-hidden": "true" });
    this.plot = h("div.plot", null, this.svg, this.slider);
    this.tableBox = h("div.tabled", { hidden: true });
    this.tableButton = h("button.quiet", { type: "button", "aria-expanded": "false", onclick: () => this.#toggleTable() }, "Table");
    const file = `addnorm-${options.id}`;
    const tools = h("div.tools", { role: "group", "aria-label": `${options.title}: data and files` },
      this.tableButton,
      h("button.quiet", { type: "button", onclick: () => save(`${file}.svg`, "image/svg+xml", svgText(this.svg, options.title)) }, "SVG"),
      h("button.quiet", { type: "button", onclick: () => { const { head, rows } = this.table(); save(`${file}.csv`, "text/csv", csvText(head, rows)); } }, "CSV"),
    );
    this.element = h("figure.chart", { id: `chart-${options.id}`, "aria-labelledby": title },
      h("figcaption", null, h("div.head", null, h("h3", { id: title }, options.title), tools), this.summary),
      this.legend, this.plot, this.readout, this.tableBox);
    this.#listen();
    new ResizeObserver(() => this.resize()).observe(this.plot);
    addEventListener("beforeprint", () => drawPending());
    this.away = false; // out of sight, and drawn a moment later than what is in it
    if (options.patient) {
      new IntersectionObserver(([seen]) => {
        this.away = !seen.isIntersecting;
        if (!this.away) drawPending(this);
      }).observe(this.plot);
    }
  }

  // What a kind of chart says of itself.

  /** Draws everything at the present width. */
  draw() {}

  /** Where a place of the x axis is, and how far the next. @returns {{left: number, step: number}} */
  places() {
    return { left: 0, step: 1 };
  }

  /** The place of the x axis that is nearest to a pointer. @param {PointerEvent} event */
  nearest(event) {
    const { left, step } = this.places();
    return Math.round((event.clientX - this.plot.getBoundingClientRect().left - left) / step);
  }

  /** How many series the cursor can read out. */
  rows() {
    return 1;
  }

  /** @param {number} _index @returns {string} */
  spoken(_index) {
    return "";
  }

  /** @returns {Table} */
  table() {
    return { head: [], rows: [] };
  }

  /** The mark of the cursor. */
  drawCursor() {}

  // The same for all.

  /** Shows new data: called by `show` of each kind. @param {number} count @param {string} summary */
  shown(count, summary) {
    this.count = count;
    if (this.index !== null) this.index = Math.min(this.index, count - 1);
    this.row = Math.min(this.row, Math.max(0, this.rows() - 1));
    set(this.summary, { text: summary });
    set(this.svg, { "aria-label": `${this.options.title}. ${summary}` });
    if (this.away) drawLater(this);
    else this.resize(true);
    if (!this.tableBox.hidden) this.#fillTable();
  }

  /** @param {boolean} [anyway]  with new data: the width is known, and to ask would lay out what the chart before has changed */
  resize(anyway = false) {
    const width = anyway && this.width ? this.width : Math.floor(this.plot.clientWidth);
    if (!width || (width === this.width && !anyway)) return;
    this.width = width;
    set(this.svg, { width, height: this.height, viewBox: `0 0 ${width} ${this.height}` });
    this.plot.style.containIntrinsicBlockSize = `${this.height}px`;
    this.draw();
    this.cursor(this.index);
  }

  /** Moves the cursor, without telling. @param {number | null} index */
  cursor(index) {
    this.index = index === null || !this.count ? null : Math.max(0, Math.min(this.count - 1, index));
    const text = this.index === null ? "" : this.spoken(this.index);
    set(this.slider, { "aria-valuemax": Math.max(this.count, 1), "aria-valuenow": (this.index ?? 0) + 1, "aria-valuetext": text || "no place selected" });
    set(this.readout, { text: text || "\u00a0" });
    if (this.width) this.drawCursor();
  }

  /** @param {number} index @param {boolean} commit */
  #move(index, commit) {
    if (!this.count) return;
    this.cursor(index);
    this.options.onCursor?.(/** @type {number} */ (this.index), commit);
  }

  #listen() {
    this.slider.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
      if (event.pointerType !== "touch" || event.buttons) this.point(event);
      this.#move(this.nearest(event), false);
    });
    this.slider.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
      this.point(event);
      this.#move(this.nearest(event), true);
    });
    this.slider.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const at = this.index ?? -1;
      const far = event.shiftKey ? 10 : 1;
      /** @type {Record<string, number>} */
      const moves = { ArrowRight: at + far, ArrowLeft: Math.max(at, 1) - far, Home: 0, End: this.count - 1, PageUp: at + 10, PageDown: at - 10 };
      if (event.key in moves) {
        this.#move(Math.max(0, moves[event.key]), true);
      } else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        const rows = this.rows();
        this.row = (this.row + (event.key === "ArrowUp" ? rows - 1 : 1)) % rows;
        this.cursor(this.index ?? 0);
      } else {
        return;
      }
      event.preventDefault();
      event.stopPropagation();
      announce(this.spoken(/** @type {number} */ (this.index)));
    });
  }

  /** A pointer is here: for charts whose rows have places too. @param {PointerEvent} _event */
  point(_event) {}

  #toggleTable() {
    const open = this.tableBox.hidden;
    this.tableBox.hidden = !open;
    this.tableButton.setAttribute("aria-expanded", String(open));
    if (open) this.#fillTable();
  }

  #fillTable() {
    const { head, rows } = this.table();
    const cells = (/** @type {(string | number | null)[]} */ row) =>
      row.map((cell, k) => (k ? h("td.number", null, cell === null ? "" : String(cell)) : h("th", { scope: "row" }, cell)));
    this.tableBox.replaceChildren(
      h("div.scroll", { tabindex: 0, role: "group", "aria-label": `${this.options.title}: table` },
        h("table", null,
          h("caption.unseen", null, this.options.title),
          h("thead", null, h("tr", null, ...head.map((name, k) => h(k ? "th.number" : "th", { scope: "col" }, name)))),
          h("tbody", null, ...rows.map((row) => h("tr", null, ...cells(row)))))),
    );
  }
}
