// @ts-check
/** The worked examples: which of them matches the page's numbers, with the notes of its lesson. */

import { CHOICES } from "./trace.js";

/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {import("./trace.js").Options} Options */
/**
 * @typedef {object} Preset  as `list_presets` of explorer/trace.py returns it
 * @property {string} name
 * @property {string} title
 * @property {number[]} x
 * @property {number[]} sublayer
 * @property {Options} options
 * @property {Record<string, {values: string[], because: string, note: string}>} printed
 * @property {Record<string, string>} notes
 */

/**
 * The preset whose forward pass equals the trace, if any. The gradients and the number of digits may differ.
 * @param {Preset[]} presets @param {Trace} of
 * @returns {Preset | undefined}
 */
export function matching(presets, of) {
  const value = (/** @type {string} */ name) => of.steps.find((step) => step.name === name)?.value;
  return presets.find(({ x, sublayer, options }) =>
    same(value("x"), x) &&
    same(value("sublayer"), sublayer) &&
    same(of.weight, all(options.weight ?? 1, x.length)) &&
    same(of.bias, all(options.bias ?? 0, x.length)) &&
    of.eps === (options.eps ?? 1e-5) &&
    Object.entries(CHOICES).every(([name, [first]]) => /** @type {any} */ (of)[name] === (/** @type {any} */ (options)[name] ?? first)));
}

/**
 * The trace with the printed values and remarks of the lesson in its notes, as Python's `Preset.trace()`.
 * @param {Trace} of @param {Preset} preset
 * @returns {Trace}
 */
export function noted(of, { printed, notes, title }) {
  const steps = of.steps.map((step) => {
    const texts = [step.note, printed[step.name]?.note, notes[step.name]].filter(Boolean);
    return { ...step, note: texts.join("; ") };
  });
  return { ...of, steps, title: of.title || title };
}

/** @param {any} value @param {number} d @returns {number[]} */
const all = (value, d) => (Array.isArray(value) ? value : new Array(d).fill(value));

/** @param {any} a @param {any} b */
const same = (a, b) => Array.isArray(a) && a.length === b.length && a.every((entry, k) => entry === b[k]);
