// @ts-check
/** The plots by depth, as data: the series of each, and a sentence about its numbers. */

import { show } from "../numbers.js";

/**
 * @typedef {object} Panel
 * @property {string} id
 * @property {string} title
 * @property {string} y
 * @property {[string, string][]} lines  a series of the server's, and what it is called
 * @property {boolean} [linear]  never on a logarithm
 * @property {boolean} [stems]
 * @property {number} [threshold]  without a value of this size the `quiet` sentence is shown instead
 * @property {string} [quiet]
 * @property {(series: Record<string, (number | null)[]>, labels: string[]) => string} [more]
 */

/** @type {Panel[]} */
export const PANELS = [
  { id: "stream", title: "Residual stream", y: "root mean square", lines: [["out.rms", "stream"]] },
  {
    id: "each", title: "Each of the streams", y: "root mean square",
    lines: Array.from({ length: 8 }, (_, k) => [`out.rms_${k}`, `stream ${k + 1}`]),
  },
  {
    id: "mixing", title: "Mixing of the streams", y: "deviation of a sum of A from 1",
    lines: [["matrices.forward", "rows: what a stream receives"], ["matrices.backward", "columns: what a stream passes on"]],
  },
  { id: "reading", title: "Reading of the streams", y: "concentration of C", lines: [["matrices.concentration", "from 1/n, all alike, to 1, one stream"]], linear: true },
  { id: "gradients", title: "Gradients", y: "L2 norm", lines: [["grad.l2", "of the stream"], ["params.grad_l2", "of the sublayer's parameters"]] },
  { id: "ratio", title: "Write / stream", y: "ratio of L2 norms", lines: [["write.ratio", "write / stream"]], stems: true },
  { id: "cosine", title: "Direction of the writes", y: "cosine between write and stream", lines: [["write.cosine", "cosine"]], linear: true },
  { id: "similarity", title: "Token similarity", y: "mean cosine between two tokens", lines: [["out.similarity", "similarity"]], linear: true },
  {
    id: "sigma", title: "Denominators of the norms", y: "sigma, harmonic mean over the tokens",
    lines: [["norm_in.sigma", "norm before the sublayer"], ["norm_branch.sigma", "norm after the sublayer"], ["norm_out.sigma", "norm after the add"], ["norm_final.sigma", "final norm"]],
  },
  {
    id: "largest", title: "Largest elements", y: "magnitude", lines: [["out.max", "largest element of the stream"]],
    more: ({ "out.massive": massive = [] }, labels) => {
      const most = Math.max(0, ...massive.map((value) => value ?? 0));
      return most ? `Massive activations: ${show(most)} at ${labels[massive.indexOf(most)]}.` : massive.length ? "No massive activations." : "";
    },
  },
  {
    id: "unchanged", title: "Writes lost to rounding", y: "share of the stream's elements", lines: [["write.unchanged", "left unchanged"]], linear: true,
    threshold: 0.01, quiet: "No writes are lost to rounding: each changes at least 99% of the stream's elements",
  },
];

/** A larger ratio of largest to smallest is drawn on a logarithm. */
const WIDE = 10;

/** @param {string} text */
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** @param {(number | null)[]} values */
export const there = (values) => /** @type {number[]} */ (values.filter((value) => value !== null && value !== undefined));

/** Whether values call for a logarithm. @param {Panel} panel @param {(number | null)[]} values */
export function logarithmic(panel, values) {
  const finite = there(values).filter(Number.isFinite);
  const positive = finite.filter((value) => value > 0);
  if (panel.linear || !positive.length || finite.some((value) => value < 0)) return false;
  return Math.max(...positive) > WIDE * Math.min(...positive);
}

/**
 * The first and the last value, and the largest: of each line that is there.
 * @param {{name: string, values: (number | null)[]}[]} lines
 * @param {string[]} labels
 */
export function sentence(lines, labels) {
  return lines.map(({ name, values }) => {
    const places = values.map((value, k) => ({ value: /** @type {number} */ (value), k })).filter(({ value }) => value !== null && value !== undefined);
    const odd = places.filter(({ value }) => !Number.isFinite(value));
    const good = places.filter(({ value }) => Number.isFinite(value));
    const parts = [];
    if (good.length === 1) parts.push(`${show(good[0].value, 4)} at ${labels[good[0].k]}`);
    else if (good.length) {
      const [first, last] = [good[0], good[good.length - 1]];
      const top = good.reduce((best, point) => (point.value > best.value ? point : best));
      parts.push(`from ${show(first.value, 4)} at ${labels[first.k]} to ${show(last.value, 4)} at ${labels[last.k]}`);
      if (top !== first && top !== last) parts.push(`largest ${show(top.value, 4)} at ${labels[top.k]}`);
    }
    if (odd.length) parts.push(`${odd.length} not finite, the first at ${labels[odd[0].k]}`);
    const text = parts.join(", ");
    return `${capital(lines.length > 1 ? `${name}: ${text}` : text)}.`;
  }).join(" ");
}
