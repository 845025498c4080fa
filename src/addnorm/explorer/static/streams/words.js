// @ts-check
/** Sentences about several streams, computed from their measurements. */

import { show } from "../numbers.js";

const COPIES = 1e-3; // relative distance of streams up to which they count as copies

/** Three digits. @param {number} value */
const n = (value) => (Math.abs(value) >= 1000 && Math.abs(value) < 1e6 ? String(Number(value.toPrecision(3))) : show(value, 3));

/** The least and the largest. @param {number[]} values */
function range(values) {
  const there = values.filter(Number.isFinite);
  if (there.length < values.length) return "not finite in places";
  const [low, high] = [n(Math.min(...there)), n(Math.max(...there))];
  return low === high ? low : `between ${low} and ${high}`;
}

/** @param {number[]} values */
const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;

/** @template T @param {T[]} values */
const last = (values) => values[values.length - 1];

/** Of each chart. @type {Record<string, (result: any) => string>} */
const SENTENCES = {
  sizes(result) {
    if (result.keeps_states) return `The read, before its norm, has a root mean square ${range(result.reads)}; earlier states never change.`;
    const end = last(result.streams);
    if (end.length === 1) return `From x_0 to the end the stream's root mean square changes by a factor of ${n(end[0] / result.streams[0][0])}.`;
    return `At the end the root mean squares of the streams are ${range(end)}; that of x_0 is ${n(result.streams[0][0])}.`;
  },
  gradients(result) {
    return `From the end back to x_0 the gradient of ${last(result.streams).length > 1 ? "all streams together" : "the stream"} changes by a factor of ${n(result.gradient[0] / last(result.gradient))}.`;
  },
  paths(result) {
    const direct = result.coefficients.direct_path.slice(1).map(Math.abs);
    return `For the writes the direct path, past all sublayers, is ${range(direct)}; the full gradient, which passes them too, is ${range(result.write_gradients.slice(1))}.`;
  },
  coefficients(result) {
    const { sites } = result.coefficients;
    if (sites[0].mix.length === 1) return "One stream: A, B and C are numbers, and the same in every sublayer.";
    const square = sites.filter((/** @type {any} */ site) => site.mix.length === site.mix[0].length);
    const kept = square.flatMap((/** @type {any} */ site) => site.mix.map((/** @type {number[]} */ row, /** @type {number} */ k) => row[k]));
    const moved = square.flatMap((/** @type {any} */ site) => site.mix.flatMap((/** @type {number[]} */ row, /** @type {number} */ k) => row.filter((_, j) => j !== k).map(Math.abs)));
    const sums = square.flatMap((/** @type {any} */ site) => site.mix.map((/** @type {number[]} */ row) => row.reduce((a, b) => a + b, 0)));
    return `A keeps ${n(mean(kept))} of a stream on average, and takes ${n(mean(moved))} of each other one, without signs. Its rows sum to ${range(sums)}.`;
  },
  gains({ gains }) {
    const [free, bound] = [gains.hyper_connections, gains.mhc];
    return `The product of all A amplifies by up to ${n(last(free.forward))} forward and ${n(free.backward[0])} backward in hyper-connections, by ${n(last(bound.forward))} and ${n(bound.backward[0])} in mHC.`;
  },
  sources(result) {
    const head = result.coefficients.head;
    return `The output reads x_0 with weight ${n(head[0])} and the newest state with ${n(last(head))}. Equal weights would be ${n(1 / head.length)}.`;
  },
};

/** @param {any} result  as the server sends it @returns {Record<string, string>} */
export function summaries(result) {
  const absent = [...(result.gains ? [] : ["gains"]), result.keeps_states ? "coefficients" : "sources"];
  return Object.fromEntries(Object.entries(SENTENCES).filter(([id]) => !absent.includes(id)).map(([id, describe]) => [id, describe(result)]));
}

/**
 * Returns the sentence that says what the figures show at this perturbation.
 * @param {any} result @param {number} perturbation @param {boolean} isLearned @returns {string[]}
 */
export function verdict(result, perturbation, isLearned) {
  const { difference, distance } = result;
  const lines = [];
  if (!isLearned) {
    lines.push("No coefficient is learned, so there is nothing to move: the perturbation does nothing here.");
  } else if (distance !== null && distance < COPIES) {
    lines.push("All streams are identical copies, as before training: it makes no difference which of them is read or how A mixes them. Raise the perturbation to see what the coefficients do.");
  } else if (distance !== null) {
    lines.push(`The streams differ: their distance from the mean stream is up to ${n(distance)} of their size.`);
  } else if (perturbation === 0) {
    lines.push("All coefficients have their initial values.");
  }
  if (!Number.isFinite(difference)) lines.push("The output is not finite.");
  else if (difference === 0) lines.push("The output is that of pre-LN.");
  else lines.push(`The output differs from pre-LN's, with the same sublayers, by ${n(difference)} of its norm${difference < 1e-3 ? ": by no more than round-off and the epsilons of norms and gates" : ""}.`);
  return lines;
}
