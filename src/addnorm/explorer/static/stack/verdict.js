// @ts-check
/** What the numbers say, in words: computed from what was measured, and from nothing else. */

import { show } from "../numbers.js";

/** @param {number} value */
const n = (value) => show(value, 3);

/** @param {(number | null)[]} values */
const last = (values) => values[values.length - 1] ?? NaN;

/** @param {number} ratio @param {string} grows @param {string} shrinks @param {string} keeps */
function change(ratio, grows, shrinks, keeps) {
  if (!Number.isFinite(ratio)) return `${grows} beyond every number`;
  if (ratio > 1.25) return `${grows} ${n(ratio)}-fold`;
  if (ratio < 0.8) return `${shrinks} to ${n(ratio)} of it`;
  return `${keeps} (${n(ratio)} of it)`;
}

/** @param {number} share */
const percent = (share) => (Math.abs(share) < 0.0005 ? "nothing" : `${show(100 * share, 2)} %`);

/** Of each chart. @param {any} found @returns {Record<string, string>} */
export function summaries(found) {
  const { stream, gradient, parameters, ratio, similarity, map, closure, cosine } = found;
  const bad = stream.some((/** @type {number} */ value) => !Number.isFinite(value));
  const end = map.length - 1;
  return {
    stream: bad
      ? "The stream overflows: crosses mark where it is no number."
      : `From x_0 to the end the stream's length ${change(last(stream) / stream[0], "grows", "shrinks", "stays")}.`,
    gradient: `Back from the end to x_0 the gradient ${change(gradient[0] / last(gradient), "grows", "shrinks", "stays")}.`,
    parameters: `The weights of the last layer get ${n(layer(parameters, -1) / layer(parameters, 0))} of the gradient of those of the first.`,
    ratio: `The first sublayer writes ${n(ratio[1])} of the stream's length, the last ${n(last(ratio))}.`,
    cosine: `On the mean a write lies ${n(mean(cosine.slice(1)))} along the stream that it is added to: 1 is the same direction, -1 the opposite.`,
    similarity: similarity[0] === null
      ? "One token has no other to be like."
      : `At x_0 two tokens have a mean cosine of ${n(similarity[0])}, at the end of ${n(last(similarity))}: 1 is all alike.`,
    map: Number.isFinite(closure)
      ? `At the end ${percent(map[0][end])} of the stream is x_0, ${percent(map[end][end])} the last write. All shares add up to 1; the parts miss the stream by ${show(closure, 2)}.`
      : "The stream is not finite: it has no shares.",
  };
}

/** The gradient of a layer, attention and feed-forward. @param {(number | null)[]} values @param {number} at  0 or -1 */
function layer(values, at) {
  const two = at < 0 ? values.slice(-2) : values.slice(1, 3);
  return Math.hypot(.../** @type {number[]} */ (two));
}

/** @param {number[]} values */
const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;

/**
 * A few sentences about the whole: what it is, and beside the first that is pinned.
 * @param {string} name @param {any} found @param {{name: string, found: any}[]} pinned
 * @returns {string[]}
 */
export function verdict(name, found, pinned) {
  const said = summaries(found);
  const lines = [`${name}: ${lower(said.stream)} ${said.gradient}`];
  const { similarity } = found;
  if (last(similarity) > 0.95) lines.push(`The tokens have become alike (mean cosine ${n(last(similarity))}): attention has little left to tell apart, which starves the gradient.`);
  for (const one of pinned) {
    const factors = [
      ["the gradient at x_0", found.gradient[0] / one.found.gradient[0]],
      ["the gradient of the last layer's weights", layer(found.parameters, -1) / layer(one.found.parameters, -1)],
      ["the stream at the end", last(found.stream) / last(one.found.stream)],
    ];
    lines.push(`Beside ${one.name}: ${factors.map(([what, factor]) => `${what} is ${times(/** @type {number} */ (factor))}`).join(", ")}.`);
  }
  return lines;
}

/** @param {number} factor */
function times(factor) {
  if (!Number.isFinite(factor)) return "beyond comparison";
  return Math.abs(factor - 1) < 0.005 ? "the same" : `${n(factor)} times as large`;
}

/** @param {string} text */
const lower = (text) => text[0].toLowerCase() + text.slice(1);
