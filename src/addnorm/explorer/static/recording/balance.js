// @ts-check
/**
 * The balance of the stream: what each source wrote, how much of it is left at the end, the sum of these amounts, the stream's norm,
 * and the difference of the two.
 */

import { h, updateChildren, announce, set, unique } from "../dom.js";
import { show } from "../numbers.js";

/** @typedef {{source: string, label: string, kind: string, depth: number, written: number | null, amount: number | null, part: number}} Row */

/** @typedef {{key: keyof Row, name: string, hint: string, first: 1 | -1}} Column */

/** @type {Column[]} */
const COLUMNS = [
  { key: "depth", name: "source", hint: "ordered by depth", first: 1 },
  { key: "written", name: "written", hint: "L2 norm of the write, mean over all tokens", first: -1 },
  { key: "amount", name: "left at the end", hint: "component along the final stream, after all norms on the way", first: -1 },
  { key: "part", name: "share", hint: "of the stream at its end: ⟨component, x⟩ / |x|² of a token, mean over the tokens", first: -1 },
];

/** @param {number | null} value */
const cell = (value) => (value === null || value === undefined ? "" : show(value, 4));

/** @param {number} value */
export const percent = (value) => (Number.isFinite(value) ? `${show(100 * value, 3)}%` : show(value));

export class Balance {
  constructor() {
    /** @type {Column} */
    this.by = COLUMNS[0];
    this.up = 1;
    /** @type {Row[]} */
    this.rows = [];
    const title = unique("balance");
    this.summary = h("p.recording-summary");
    this.heads = COLUMNS.map((column, k) =>
      h(k ? "th.number" : "th", { scope: "col" }, h("button.recording-sort", { type: "button", title: column.hint, onclick: () => this.#sort(column) }, column.name)));
    this.body = h("tbody");
    this.foot = h("tfoot");
    this.table = h("div.scroll.recording-sheet", { tabindex: 0, role: "group", "aria-labelledby": title },
      h("table", null, h("caption.unseen", null, "Balance of the stream"), h("thead", null, h("tr", null, ...this.heads)), this.body, this.foot));
    this.element = h("section.recording-balance", { "aria-labelledby": title }, h("h3", { id: title }, "Balance of the stream"), this.summary, this.table);
  }

  /** @param {any} sheet  what the server says; `refused` why there is none */
  show(sheet) {
    this.table.hidden = Boolean(sheet.refused);
    this.rows = sheet.rows ?? [];
    set(this.summary, { class: sheet.refused ? "recording-summary wrong" : "recording-summary", text: sheet.refused || summarize(sheet) });
    if (sheet.refused) return;
    this.#draw();
    const sum = this.rows.reduce((total, row) => total + (row.amount ?? 0), 0);
    const parts = this.rows.reduce((total, row) => total + row.part, 0);
    const lines = [
      ["sum", show(sum, 6), percent(parts)],
      ["norm of the stream", show(sheet.length, 6), ""],
      [sheet.closes ? "error" : "error: the sum differs", show(Math.abs(sheet.length - sum), 2), percent(sheet.error)],
    ];
    this.foot.replaceChildren(...lines.map(([name, amount, part], k) =>
      h(k === 2 && !sheet.closes ? "tr.wrong" : "tr", null, h("th", { scope: "row" }, name), h("td"), h("td.number", null, amount), h("td.number", null, part))));
  }

  /** @param {Column} column */
  #sort(column) {
    this.up = this.by === column ? -this.up : column.first;
    this.by = column;
    this.#draw();
    announce(`Sorted by ${column.name}, ${this.up > 0 ? "smallest" : "largest"} first.`);
  }

  #draw() {
    this.heads.forEach((head, k) => set(head, { "aria-sort": COLUMNS[k] === this.by ? (this.up > 0 ? "ascending" : "descending") : null }));
    const { key } = this.by;
    const number = (/** @type {Row} */ row) => /** @type {number | null} */ (row[key]);
    // What has no number comes last, whichever way it is sorted.
    const rows = [...this.rows].sort((a, b) => {
      const [first, second] = [number(a), number(b)];
      if (first === null || second === null) return Number(first === null) - Number(second === null) || a.depth - b.depth;
      return (first - second) * this.up || a.depth - b.depth;
    });
    const most = Math.max(...this.rows.map((row) => (Number.isFinite(row.part) ? Math.abs(row.part) : 0)), 1e-12);
    updateChildren(this.body, rows, () => line(), (tr, row) => {
      const [name, written, amount, part] = tr.children;
      const bar = part.lastElementChild;
      set(name.firstElementChild, { text: row.label });
      set(name.lastElementChild, { text: row.kind === "start" ? "start" : row.source === row.label ? "" : row.source });
      set(written, { text: cell(row.written) });
      set(amount, { text: cell(row.amount), data: { source: row.source, value: row.amount ?? "" } });
      set(part.firstElementChild, { text: percent(row.part) });
      set(bar, { class: `recording-bar${row.part < 0 ? " below" : ""}` });
      bar.style.width = `${(100 * (Number.isFinite(row.part) ? Math.abs(row.part) : 0)) / most}%`;
    });
  }
}

const line = () =>
  h("tr", null,
    h("th", { scope: "row" }, h("span"), " ", h("span.recording-module")),
    h("td.number"), h("td.number"), h("td.number.recording-part", null, h("span"), h("span.recording-bar", { "aria-hidden": "true" })));

/** The sheet in words. @param {any} sheet */
function summarize(sheet) {
  /** @type {Row[]} */
  const rows = sheet.rows;
  const top = [...rows].sort((a, b) => b.part - a.part)[0];
  const opening = rows.find((row) => row.kind === "start");
  const against = rows.filter((row) => row.part < 0).length;
  const how = `Means over ${sheet.tokens}${sheet.total_tokens > sheet.tokens ? ` of ${sheet.total_tokens}` : ""} token${sheet.tokens === 1 ? "" : "s"}; at every depth the components add up to the stream, relative error at most ${show(sheet.closure, 2)}`;
  return [
    `After the last sublayer, at step ${sheet.step},`,
    top === opening ? `x_0 has the largest share of the stream, ${percent(top.part)}.` : `${top.label} has the largest share of the stream, ${percent(top.part)}.`,
    opening && opening !== top ? `x_0 has ${percent(opening.part)}.` : "",
    against ? `${against} ${against === 1 ? "source has" : "sources have"} a negative share: they point against the stream.` : "",
    `The amount left of a source is its component along the final stream, after all norms on the way, with their recorded denominators. ${how}.`,
  ].filter(Boolean).join(" ");
}
