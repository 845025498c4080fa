// @ts-check
/** The norm's Jacobian, its eigenvalues, and the components of a gradient, computed from the trace. */

import { flat, step, trace } from "./trace.js";

/** @typedef {import("./trace.js").Trace} Trace */

/** The name of what is normalized, z or in pre-LN x. @param {Trace} of */
export const normalizedName = (of) => (of.placement === "post" ? "z" : "x");

/** Its numbers. @param {Trace} of */
export const input = (of) => flat(step(of, normalizedName(of)).value);

/** The same norm, without γ and β, of another token. @param {Trace} of @param {number[]} token @param {number[]} [grad] */
export function normOf({ norm, variance, eps_place, eps }, token, grad) {
  return trace(token, token.map(() => 0), { norm, variance, eps_place, eps, grad });
}

/** How the normalized token changes with the token: column k is the gradient that feature k sends back. @param {Trace} of */
export function jacobian(of) {
  const token = input(of);
  return token.map((_, k) => flat(step(normOf(of, token, token.map((_, j) => (j === k ? 1 : 0))), "dz").value));
}

/**
 * The eigenvalues of a symmetric matrix, from the smallest: Jacobi's rotations, each of which makes one entry 0.
 * The Jacobian of a norm is symmetric in all its variants: I, less 1/d, less a multiple of z_norm z_normᵀ, over the root.
 * @param {number[][]} matrix
 */
export function eigenvalues(matrix) {
  const a = matrix.map((row) => [...row]);
  const d = a.length;
  for (let sweep = 0; sweep < 30; sweep++) {
    let off = 0;
    for (let p = 0; p < d; p++) {
      for (let q = p + 1; q < d; q++) {
        off = Math.max(off, Math.abs(a[p][q]));
        if (a[p][q] === 0) continue;
        const theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
        const t = (theta < 0 ? -1 : 1) / (Math.abs(theta) + Math.hypot(theta, 1));
        const c = 1 / Math.hypot(t, 1);
        rotate(a, p, q, c, t * c);
      }
    }
    if (off === 0) break;
  }
  return a.map((row, k) => row[k]).sort((a, b) => a - b);
}

/** @param {number[][]} a @param {number} p @param {number} q @param {number} c @param {number} s */
function rotate(a, p, q, c, s) {
  for (const row of a) [row[p], row[q]] = [c * row[p] - s * row[q], s * row[p] + c * row[q]];
  [a[p], a[q]] = [a[p].map((_, k) => c * a[p][k] - s * a[q][k]), a[p].map((_, k) => s * a[p][k] + c * a[q][k])];
}

/**
 * What becomes of the gradient at the norm: mean + along + rest = g, and rest / root goes on.
 * @param {Trace} of
 */
export function parts(of) {
  const g = flat(step(of, "grad_scaled").value);
  const mean = of.norm === "layer" ? flat(step(of, "grad_mean").value)[0] : 0;
  const root = flat(step(of, "root").value)[0];
  const through = flat(step(of, of.placement === "post" ? "dz" : "dnorm").value);
  const rest = through.map((value) => value * root);
  const centred = g.map((value) => value - mean);
  return { g, centred, mean: g.map(() => mean), along: centred.map((value, k) => value - rest[k]), rest, through, root };
}

/** @param {number[]} v */
export const length = (v) => Math.hypot(...v);

/** @param {number[]} a @param {number[]} b */
export const dot = (a, b) => a.reduce((total, value, k) => total + value * b[k], 0);
