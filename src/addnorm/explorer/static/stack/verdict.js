// @ts-check
/** Sentences about a stack, computed from its measurements. */

import { show } from "../numbers.js";

/** @typedef {(number | null)[]} Values */

/** Three digits, and no exponent where a reader needs none. @param {number} value */
function n(value) {
  const size = Math.abs(value);
  return size >= 1000 && size < 1e6 ? String(Number(value.toPrecision(3))) : show(value, 3);
}

/** @param {Values} values */
const last = (values) => values[values.length - 1] ?? NaN;

/** Where a list has no finite number for the first time; null is none that is missed. @param {Values} values */
const lost = (values) => values.findIndex((value) => value !== null && !Number.isFinite(value));

/** The change of an L2 norm, in words. @param {number} ratio */
function change(ratio) {
  return Math.abs(ratio - 1) <= 0.1 ? `changes little, by a factor of ${n(ratio)}` : `changes by a factor of ${n(ratio)}`;
}

/** @param {number} share */
function percent(share) {
  return share !== 0 && Math.abs(share) < 0.001 ? "less than 0.1%" : `${n(100 * share)}%`;
}

/** Of each chart. @type {Record<string, (result: any) => string>} */
const SENTENCES = {
  stream({ stream, labels }) {
    const [at, zero] = [lost(stream), stream.indexOf(0)];
    if (at >= 0) return `The stream overflows at ${labels[at]}; crosses mark values that are not finite.`;
    if (zero >= 0) return `The stream underflows: it is 0 from ${labels[zero]} on.`;
    return `From x_0 to the end the stream's norm ${change(last(stream) / stream[0])}.`;
  },
  gradient({ gradient, direct_path: path }) {
    const bad = gradient.filter((/** @type {number} */ value) => !Number.isFinite(value)).length;
    if (bad) return `The gradient is not finite at ${bad} of ${gradient.length} places.`;
    if (gradient[0] === 0) return "The gradient underflows: it is 0 at x_0.";
    const slopes = Number.isFinite(path[0]) ? `The +1 path alone, the product of the norms' slopes, has the factor ${n(path[0])}. ` : "";
    return `${slopes}From the end back to x_0 the gradient's norm ${change(gradient[0] / last(gradient))}.`;
  },
  parameters({ parameters }) {
    const bad = parameters.filter((/** @type {number | null} */ value) => value !== null && !Number.isFinite(value)).length;
    if (bad) return `The gradient of the weights is not finite in ${bad} of ${parameters.length - 1} sublayers.`;
    if (layer(parameters, 0) === 0) return "The gradient of the first layer's weights underflows: it is 0.";
    if (parameters.length === 3) return "There is only one layer, so there is nothing to compare.";
    return `The gradient of the last layer's weights is ${n(layer(parameters, -1) / layer(parameters, 0))} times that of the first layer's.`;
  },
  ratio({ ratio, labels }) {
    const at = lost(ratio);
    const first = `The first sublayer's write has ${n(ratio[1])} times the norm of the stream`;
    return at >= 0 ? `${first}; from ${labels[at]} on the ratio is not finite.` : `${first}, the last one's ${n(last(ratio))} times.`;
  },
  cosine({ cosine }) {
    const there = cosine.slice(1).filter(Number.isFinite);
    const of = there.length === cosine.length - 1 ? "all writes" : `${there.length} writes`;
    return there.length
      ? `The cosine between a write and the stream before it is ${n(mean(there))} on average over ${of}: 1 is the same direction, -1 the opposite.`
      : "No write has a direction: all are 0 or not finite.";
  },
  similarity({ similarity, labels }) {
    if (similarity[0] === null) return "There is only one token.";
    const at = lost(similarity);
    const first = `The mean cosine between two tokens is ${n(similarity[0])} at x_0`;
    return at >= 0 ? `${first}; from ${labels[at]} on it is not finite.` : `${first} and ${n(last(similarity))} at the end: 1 means identical directions.`;
  },
  map({ map, stream, closure, labels }) {
    const end = map.length - 1;
    if (!Number.isFinite(closure)) {
      const at = stream.findIndex((/** @type {number} */ value, /** @type {number} */ k) => !value || !Number.isFinite(map[0][k]));
      return `From ${labels[Math.max(at, 0)]} on the stream ${stream[at] === 0 ? "is 0" : "is not finite"}, so there are no shares.`;
    }
    const against = map.some((/** @type {Values} */ row) => (row[end] ?? 0) < -0.001) ? " A negative share points against the stream." : "";
    return `At the end ${percent(map[0][end])} of the stream is from x_0 and ${percent(map[end][end])} from the last write.${against} `
      + `The shares at each depth add up to 1, with a relative error of at most ${n(closure)}.`;
  },
};

/** @param {any} result  as `InitProbe.measure` returns it @returns {Record<string, string>} */
export const summaries = (result) => Object.fromEntries(Object.entries(SENTENCES).map(([id, describe]) => [id, describe(result)]));

/** The gradient of a layer, attention and feed-forward. @param {Values} values @param {number} at  0 or -1 */
function layer(values, at) {
  const two = at < 0 ? values.slice(-2) : values.slice(1, 3);
  return Math.hypot(.../** @type {number[]} */ (two));
}

/** @param {number[]} values */
const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;

/** What is compared between stacks. @type {[string, (result: any) => number][]} */
const COMPARED = [
  ["the gradient at x_0", (result) => result.gradient[0]],
  ["the gradient of the last layer's weights", (result) => layer(result.parameters, -1)],
  ["the stream at the end", (result) => last(result.stream)],
];

/**
 * A few sentences about the whole: what it is, and beside each that is pinned.
 * @param {string} name @param {any} result @param {{name: string, result: any}[]} pinned
 * @returns {string[]}
 */
export function verdict(name, result, pinned) {
  const texts = summaries(result);
  const alike = last(result.similarity);
  return [
    `${name}: ${texts.stream[0].toLowerCase()}${texts.stream.slice(1)} ${texts.gradient}`,
    ...(alike > 0.95 ? [`At the end the tokens are nearly identical (mean cosine ${n(alike)}): attention reads almost the same from each of them.`] : []),
    ...pinned.map((pin) => (pin.result === result ? `${name} is pinned: change a setting to compare with it.` : compareWith(pin.name, result, pin.result))),
  ];
}

/** @param {string} name @param {any} result @param {any} other */
function compareWith(name, result, other) {
  const factors = COMPARED.map(([what, of]) => ({ what, factor: of(result) / of(other) })).filter(({ factor }) => Number.isFinite(factor));
  if (!factors.length) return `Compared with ${name}: the numbers are not finite.`;
  return `Compared with ${name}: ${factors.map(({ what, factor }) => `${what} is ${Math.abs(factor - 1) < 0.005 ? "the same" : `${n(factor)} times as large`}`).join(", ")}.`;
}

/** Numbers that differ between seeds. @type {[string, (result: any) => number][]} */
const SPREAD = [
  ["the stream, its end over x_0", (result) => last(result.stream) / result.stream[0]],
  ["its gradient, x_0 over the end", (result) => result.gradient[0] / last(result.gradient)],
  ["the gradient of the weights, last layer over first", (result) => layer(result.parameters, -1) / layer(result.parameters, 0)],
];

/** The same figures of several seeds, the least and the largest. @param {any[]} results  of seed 0, 1, ... */
export function spread(results) {
  const ranges = SPREAD.map(([what, of]) => {
    const values = results.map(of);
    return `${what}: ${values.every(Number.isFinite) ? `${n(Math.min(...values))} to ${n(Math.max(...values))}` : "not finite"}`;
  });
  return `Over seeds 0 to ${results.length - 1}: ${ranges.join("; ")}.`;
}
