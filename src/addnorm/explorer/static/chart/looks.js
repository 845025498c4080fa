// @ts-check
/** The look of a wiring in every chart, as in the reports: number of its colour, dash and marker (LOOKS of _util/charts.py). */

const LOOKS = {
  post_ln: 0, pre_ln: 1, sandwich: 2, reordered: 3, deepnorm: 4, no_norm: 5, no_residual: 6,
  hyper_connections: 3, mhc: 2, attention_residuals: 4, rezero: 2, peri_ln: 3,
};
const NUM_LOOKS = 7;

/** The wiring that the name of a series begins with, as "post-LN, seed 3" or "mHC, forward". @param {string} name */
function wiringOf(name) {
  const word = name.split(/[,(]/)[0].trim().toLowerCase().replace(/[\s-]+/g, "_");
  return word === "none" ? "no_norm" : word;
}

/**
 * The tones of a chart's series, from 1: those of their wirings, or the first free one where it is taken or unknown.
 * @param {string[]} names
 * @returns {number[]}
 */
export function chooseTones(names) {
  const own = names.map((name) => LOOKS[/** @type {keyof typeof LOOKS} */ (wiringOf(name))]);
  /** @type {number[]} */
  const tones = [];
  for (const look of own) {
    const taken = new Set([...tones, ...own.filter((one) => one !== undefined).map((one) => one + 1)]);
    const free = Array.from({ length: NUM_LOOKS }, (_, k) => k + 1).find((tone) => !taken.has(tone)) ?? NUM_LOOKS;
    tones.push(look === undefined || tones.includes(look + 1) ? free : look + 1);
  }
  return tones;
}
