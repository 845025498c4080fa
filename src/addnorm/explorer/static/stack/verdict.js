// @ts-check
/** What the numbers say, in words: computed from what was measured, and from nothing else. */

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

/** What became of a length. @param {number} ratio */
function change(ratio) {
  if (ratio > 1.1) return `grows to ${n(ratio)} times its length`;
  if (ratio < 0.9) return `shrinks to ${n(ratio)} times its length`;
  return `keeps its length (${n(ratio)} times)`;
}

/** @param {number} share */
function percent(share) {
  return share !== 0 && Math.abs(share) < 0.001 ? "less than 0.1 %" : `${n(100 * share)} %`;
}

/** Of each chart. @type {Record<string, (found: any) => string>} */
const SAYS = {
  stream({ stream, labels }) {
    const [at, zero] = [lost(stream), stream.indexOf(0)];
    if (at >= 0) return `The stream overflows at ${labels[at]}: from there on crosses mark what is no number.`;
    if (zero >= 0) return `The stream vanishes: from ${labels[zero]} on it is 0 to the computer.`;
    return `From x_0 to the end the stream ${change(last(stream) / stream[0])}.`;
  },
  gradient({ gradient }) {
    const bad = gradient.filter((/** @type {number} */ value) => !Number.isFinite(value)).length;
    if (bad) return `At ${bad} of ${gradient.length} places the gradient is no finite number.`;
    if (gradient[0] === 0) return "The gradient vanishes: at x_0 it is 0 to the computer.";
    return `Back from the end to x_0 the gradient ${change(gradient[0] / last(gradient))}.`;
  },
  parameters({ parameters }) {
    const bad = parameters.filter((/** @type {number | null} */ value) => value !== null && !Number.isFinite(value)).length;
    if (bad) return `In ${bad} of ${parameters.length - 1} sublayers the gradient of the weights is no finite number.`;
    if (layer(parameters, 0) === 0) return "The weights of the first layer get no gradient: it is 0 to the computer.";
    if (parameters.length === 3) return "There is one layer: its gradient has no other to be beside.";
    return `The weights of the last layer get ${n(layer(parameters, -1) / layer(parameters, 0))} times the gradient of those of the first.`;
  },
  ratio({ ratio, labels }) {
    const at = lost(ratio);
    const first = `What the first sublayer writes is ${n(ratio[1])} times as long as the stream`;
    return at >= 0 ? `${first}; from ${labels[at]} on there is no such number.` : `${first}, what the last writes ${n(last(ratio))} times.`;
  },
  cosine({ cosine }) {
    const there = cosine.slice(1).filter(Number.isFinite);
    const of = there.length === cosine.length - 1 ? "all" : `the ${there.length} that have one`;
    return there.length
      ? `The cosine of a write and the stream before it is ${n(mean(there))} on the mean of ${of}: 1 is the same direction, -1 the opposite.`
      : "No write has a direction.";
  },
  similarity({ similarity, labels }) {
    if (similarity[0] === null) return "One token has no other to be like.";
    const at = lost(similarity);
    const first = `The mean cosine of two tokens is ${n(similarity[0])} at x_0`;
    return at >= 0 ? `${first}; from ${labels[at]} on there is none.` : `${first} and ${n(last(similarity))} at the end: 1 is all alike.`;
  },
  map({ map, stream, closure, labels }) {
    const end = map.length - 1;
    if (!Number.isFinite(closure)) {
      const at = stream.findIndex((/** @type {number} */ value, /** @type {number} */ k) => !value || !Number.isFinite(map[0][k]));
      return `From ${labels[Math.max(at, 0)]} on the stream ${stream[at] === 0 ? "is 0" : "is not finite"}: it has no shares.`;
    }
    const against = map.some((/** @type {Values} */ row) => (row[end] ?? 0) < -0.001) ? " A share below 0 lies against the stream." : "";
    return `At the end x_0 is ${percent(map[0][end])} of the stream, the last write ${percent(map[end][end])}.${against} `
      + `The shares of a place add up to 1: the parts miss the stream by ${n(closure)} of it at most.`;
  },
};

/** @param {any} found  as `Flip.measure` returns it @returns {Record<string, string>} */
export const summaries = (found) => Object.fromEntries(Object.entries(SAYS).map(([id, say]) => [id, say(found)]));

/** The gradient of a layer, attention and feed-forward. @param {Values} values @param {number} at  0 or -1 */
function layer(values, at) {
  const two = at < 0 ? values.slice(-2) : values.slice(1, 3);
  return Math.hypot(.../** @type {number[]} */ (two));
}

/** @param {number[]} values */
const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;

/** What is compared between stacks. @type {[string, (found: any) => number][]} */
const COMPARED = [
  ["the gradient at x_0", (found) => found.gradient[0]],
  ["the gradient of the last layer's weights", (found) => layer(found.parameters, -1)],
  ["the stream at the end", (found) => last(found.stream)],
];

/**
 * A few sentences about the whole: what it is, and beside each that is pinned.
 * @param {string} name @param {any} found @param {{name: string, found: any}[]} pinned
 * @returns {string[]}
 */
export function verdict(name, found, pinned) {
  const said = summaries(found);
  const alike = last(found.similarity);
  return [
    `${name}: ${said.stream[0].toLowerCase()}${said.stream.slice(1)} ${said.gradient}`,
    ...(alike > 0.95 ? [`At the end the tokens are alike (mean cosine ${n(alike)}): whatever attention attends to, it reads nearly the same.`] : []),
    ...pinned.map((one) => (one.found === found ? `${name} is pinned: change something, and it stays to compare with.` : beside(one.name, found, one.found))),
  ];
}

/** @param {string} name @param {any} found @param {any} other */
function beside(name, found, other) {
  const factors = COMPARED.map(([what, of]) => ({ what, factor: of(found) / of(other) })).filter(({ factor }) => Number.isFinite(factor));
  if (!factors.length) return `Beside ${name}: there is nothing to compare where numbers are not finite.`;
  return `Beside ${name}: ${factors.map(({ what, factor }) => `${what} is ${Math.abs(factor - 1) < 0.005 ? "the same" : `${n(factor)} times as large`}`).join(", ")}.`;
}

/** What one seed says, and another may not. @type {[string, (found: any) => number][]} */
const SPREAD = [
  ["the stream, its end over x_0", (found) => last(found.stream) / found.stream[0]],
  ["its gradient, x_0 over the end", (found) => found.gradient[0] / last(found.gradient)],
  ["the gradient of the weights, last layer over first", (found) => layer(found.parameters, -1) / layer(found.parameters, 0)],
];

/** The same figures of several seeds, the least and the largest. @param {any[]} founds  of seed 0, 1, ... */
export function spread(founds) {
  const ranges = SPREAD.map(([what, of]) => {
    const values = founds.map(of);
    return `${what}: ${values.every(Number.isFinite) ? `${n(Math.min(...values))} to ${n(Math.max(...values))}` : "not finite"}`;
  });
  return `Over seeds 0 to ${founds.length - 1}: ${ranges.join("; ")}.`;
}
