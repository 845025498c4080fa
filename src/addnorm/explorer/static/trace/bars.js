// @ts-check
/** A vector as numbered bars, from 0 to the left or to the right. */

import { h, updateChildren, set } from "../dom.js";
import { show } from "../numbers.js";
import { flat } from "./trace.js";

/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {import("./descriptions.js").Scale} Scale */

/**
 * By scale, the longest bar's number.
 * @param {Trace} of @param {(name: string) => Scale} scaleOf
 * @returns {Record<string, number>}
 */
export function longest(of, scaleOf) {
  /** @type {Record<string, number>} */
  const most = {};
  for (const { name, value } of of.steps) {
    for (const entry of flat(value)) {
      if (Number.isFinite(entry)) most[scaleOf(name)] = Math.max(most[scaleOf(name)] ?? 0, Math.abs(entry));
    }
  }
  return most;
}

/** @returns {HTMLOListElement} */
export const bars = () => h("ol.trace-bars");

/**
 * @param {HTMLElement} list  from bars()
 * @param {{name: string, value: number | number[], scale: Scale, most: number, digits: number}} what
 */
export function drawBars(list, { name, value, scale, most, digits }) {
  const values = flat(value);
  const shape = `trace-bars ${scale}${values.length > 4 ? " many" : ""}${Array.isArray(value) ? "" : " lone"}`;
  set(list, { class: shape });
  updateChildren(list, values, make, (item, entry, index) => {
    const shown = `${name} ${index} ${entry} ${most} ${digits} ${values.length}`;
    if (item.shown === shown) return;
    item.shown = shown;
    const [number, track, text] = item.children;
    const finite = Number.isFinite(entry);
    // halves of the track: 50% is the longest bar of its scale
    const share = finite ? (most ? (Math.abs(entry) / most) * 50 : 0) : 50;
    set(item, { class: finite ? "" : "unwell", "data-series": name, "data-index": index, "data-value": entry });
    const { style } = track.firstChild;
    style.width = `${share.toFixed(2)}%`;
    style.left = `${(entry < 0 ? 50 - share : 50).toFixed(2)}%`;
    set(number, { text: Array.isArray(value) ? index + 1 : "" });
    set(text, { text: show(entry, digits) });
  });
}

const make = () =>
  h("li", null, h("span.trace-index", { "aria-hidden": "true" }), h("span.trace-track", { "aria-hidden": "true" }, h("span.trace-bar")), h("span.trace-value"));
