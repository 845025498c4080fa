// @ts-check
/**
 * The balance sheet of the stream: with what it opens, what each sublayer deposits, what is left of each in the end, the closing,
 * and the error between the closing and the sum.
 */

import { h, join, say, set, unique } from "../dom.js";
import { show } from "../numbers.js";

/** @typedef {{source: string, label: string, kind: string, depth: number, written: number | null, amount: number | null, part: number}} Row */

/** @typedef {{key: keyof Row, name: string, hint: string, first: 1 | -1}} Column */

/** @type {Column[]} */
const COLUMNS = [
  { key: "depth", name: "source", hint: "in the order of depth", first: 1 },
  { key: "written", name: "deposited", hint: "its length as it was written, mean over all tokens", first: -1 },
  { key: "amount", name: "left in the end", hint: "its length along the stream after the last sublayer, behind every norm on the way", first: -1 },
  { key: "part", name: "part of the closing", hint: "what is left of it, over the length of the stream", first: -1 },
];

/** @param {number | null} value */
const cell = (value) => (value === null || value === undefined ? "" : show(value, 4));

/** @param {number} value */
export const percent = (value) => (Number.isFinite(value) ? `${show(100 * value, 3).replace("-", "\u2212")}\u00a0%` : show(value));

export class Balance {
  constructor() {
    /** @type {Column} */
    this.by = COLUMNS[0];
    this.up = 1;
    /** @type {Row[]} */
    this.rows = [];
    const title = unique("balance");
    this.said = h("p.recording-said");
    this.heads = COLUMNS.map((column, k) =>
      h(k ? "th.number" : "th", { scope: "col" }, h("button.recording-sort", { type: "button", title: column.hint, onclick: () => this.#sort(column) }, column.name)));
    this.body = h("tbody");
    this.foot = h("tfoot");
    this.table = h("div.scroll.recording-sheet", { tabindex: 0, role: "group", "aria-labelledby": title },
      h("table", null, h("caption.unseen", null, "The balance sheet of the stream"), h("thead", null, h("tr", null, ...this.heads)), this.body, this.foot));
    this.element = h("section.recording-balance", { "aria-labelledby": title }, h("h3", { id: title }, "The balance sheet"), this.said, this.table);
  }

  /** @param {any} sheet  what the server says; `refused` why there is none */
  show(sheet) {
    this.table.hidden = Boolean(sheet.refused);
    this.rows = sheet.rows ?? [];
    set(this.said, { class: sheet.refused ? "recording-said wrong" : "recording-said", text: sheet.refused || told(sheet) });
    if (sheet.refused) return;
    this.#draw();
    const sum = this.rows.reduce((total, row) => total + (row.amount ?? 0), 0);
    const parts = this.rows.reduce((total, row) => total + row.part, 0);
    const amounts = sheet.length !== null;
    const lines = [
      ["sum of what is left", amounts ? show(sum, 6) : "", percent(parts)],
      ["closing: length of the stream", amounts ? show(sheet.length, 6) : "not recorded", percent(1)],
      [sheet.closes ? "error" : "error: it does not close", amounts ? show(Math.abs(sheet.length - sum), 2) : "", `${show(100 * sheet.error, 2)} %`],
    ];
    this.foot.replaceChildren(...lines.map(([name, amount, part], k) =>
      h(k === 2 && !sheet.closes ? "tr.wrong" : "tr", null, h("th", { scope: "row" }, name), h("td"), h("td.number", null, amount), h("td.number", null, part))));
  }

  /** @param {Column} column */
  #sort(column) {
    this.up = this.by === column ? -this.up : column.first;
    this.by = column;
    this.#draw();
    say(`Sorted by ${column.name}, ${this.up > 0 ? "smallest" : "largest"} first.`);
  }

  #draw() {
    this.heads.forEach((head, k) => set(head, { "aria-sort": COLUMNS[k] === this.by ? (this.up > 0 ? "ascending" : "descending") : null }));
    const { key } = this.by;
    const number = (/** @type {Row} */ row) => /** @type {number | null} */ (row[key]);
    // What has no number comes last, whichever way it is sorted.
    const rows = [...this.rows].sort((a, b) => {
      const [one, two] = [number(a), number(b)];
      if (one === null || two === null) return Number(one === null) - Number(two === null) || a.depth - b.depth;
      return (one - two) * this.up || a.depth - b.depth;
    });
    const most = Math.max(...this.rows.map((row) => (Number.isFinite(row.part) ? Math.abs(row.part) : 0)), 1e-12);
    join(this.body, rows, () => line(), (tr, row) => {
      const [name, written, amount, part] = tr.children;
      const bar = part.lastElementChild;
      set(name.firstElementChild, { text: row.label });
      set(name.lastElementChild, { text: row.kind === "start" ? "opening" : row.source === row.label ? "" : row.source });
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
function told(sheet) {
  /** @type {Row[]} */
  const rows = sheet.rows;
  const top = [...rows].sort((one, two) => two.part - one.part)[0];
  const opening = rows.find((row) => row.kind === "start");
  const against = rows.filter((row) => row.part < 0).length;
  const how = sheet.length === null
    ? "This file has shares without amounts, from an older version"
    : `Means over ${sheet.tokens} token${sheet.tokens === 1 ? "" : "s"}; at every depth the components make the stream to ${show(sheet.closure, 2)}`;
  return [
    `After the last sublayer, at step ${sheet.step},`,
    top === opening ? `the opening is still the largest part of the stream, ${percent(top.part)}.` : `the largest part of the stream is ${top.label}'s, ${percent(top.part)}.`,
    opening && opening !== top ? `Of the opening ${percent(opening.part)} is left.` : "",
    against ? `${against} ${against === 1 ? "source points" : "sources point"} against the stream.` : "",
    `What is left of a source is its length along that stream, behind every norm on the way, with the norm's recorded denominator. ${how}.`,
  ].filter(Boolean).join(" ");
}
