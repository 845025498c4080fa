// @ts-check
/**
 * One token through Add & Norm, forward and backward: `addnorm.trace.trace`, step by step the same.
 *
 * The same order of operations gives the same numbers to the bit: sums from left to right, a division by the root and never a
 * product with its reciprocal. Names, symbols, formulas, notes and errors are Python's to the letter; tests/explorer/test_trace.py
 * compares them. Nothing here knows of a page.
 */

import { show } from "../numbers.js";
import { number, repr, vector } from "./parsing.js";

/**
 * @typedef {object} Step  symbol = formula = numbers = value
 * @property {string} name
 * @property {"forward" | "checks" | "backward"} section
 * @property {string} symbol
 * @property {number | number[]} value
 * @property {string} formula
 * @property {string} numbers  the formula with these numbers
 * @property {string} note
 */

/**
 * @typedef {object} Options  with Python's names
 * @property {string} [placement]  "post" or "pre"
 * @property {string} [norm]  "layer" or "rms"
 * @property {any} [weight]  a vector, or one number for all
 * @property {any} [bias]
 * @property {any} [eps]
 * @property {any} [grad]
 * @property {any} [read_grad]  pre-LN only
 * @property {string} [variance]  "biased" or "unbiased"
 * @property {string} [eps_place]  "inside" or "outside"
 * @property {number} [digits]
 * @property {string} [title]
 */

/** @typedef {Required<Pick<Options, "placement" | "norm" | "variance" | "eps_place" | "digits" | "title">>} Choices */
/** @typedef {Choices & {eps: number, weight: number[], bias: number[], steps: Step[]}} Trace */

export const SECTIONS = /** @type {const} */ (["forward", "checks", "backward"]);
export const CHOICES = { placement: ["post", "pre"], norm: ["layer", "rms"], variance: ["biased", "unbiased"], eps_place: ["inside", "outside"] };

/**
 * Follows one token and its gradient back; formulas, steps and arguments are those of `addnorm.trace.trace`.
 * @param {any} x  d numbers
 * @param {any} sublayer  what the sublayer returned for it, d numbers
 * @param {Options} [options]
 * @returns {Trace}
 * @throws {Error} with the sentence of Python's ValueError
 */
export function trace(x, sublayer, options = {}) {
  const { placement = "post", norm = "layer", variance = "biased", eps_place = "inside", digits = 5, title = "" } = options;
  const { weight = null, bias = null, grad = null, read_grad = null } = options;
  const chosen = { placement, norm, variance, eps_place };
  for (const [name, choices] of Object.entries(CHOICES)) {
    const choice = chosen[/** @type {keyof typeof chosen} */ (name)];
    if (choices.includes(choice)) continue;
    throw new Error(`${name} is ${repr(choice)}, expected ${choices.map((c) => repr(c)).join(" or ")}: write one of them.`);
  }
  if (norm === "rms" && variance === "unbiased") {
    throw new Error("variance is 'unbiased', but RMSNorm has no variance: leave it out, or use norm='layer'.");
  }
  if (read_grad !== null && placement === "post") {
    throw new Error("read_grad requires placement 'pre', got 'post', where the norm reads z: use placement='pre', or grad.");
  }
  const eps = number("eps", options.eps ?? 1e-5);
  if (eps < 0) throw new Error(`eps is ${show(eps, 6)}, expected a number >= 0: the usual ones are 1e-5 and 1e-6.`);
  if (!(Number.isInteger(digits) && digits >= 1 && digits <= 17)) {
    throw new Error(`digits is ${repr(digits)}, expected a whole number from 1 to 17: 17 show a float exactly.`);
  }
  const token = vector("x", x);
  const d = token.length;
  const branch = vector("sublayer", sublayer, d);
  const gamma = weight === null ? new Array(d).fill(1) : vector("weight", weight, d, { scalar: true });
  const beta = bias === null ? new Array(d).fill(0) : vector("bias", bias, d, { scalar: true });
  const outGrad = vector("grad", grad ?? token.map((_, k) => (k === 0 ? 1 : 0)), d);
  const came = grad === null ? "default: 1 for the first feature, 0 for the others" : "incoming gradient";
  const v = placement === "post" ? "z" : "x";
  const rule = new Rule(norm === "layer", variance === "biased", eps_place === "inside", eps, gamma, beta, v);
  const w = new Writer(digits);
  const stream = added(token, branch);
  const sums = w.pairs(token, " + ", branch);

  w.add("x", "x", token, { note: "the residual stream" });
  if (placement === "post") {
    w.add("sublayer", "Sublayer(x)", branch, { note: "output of the sublayer" });
    w.add("z", "z", stream, { formula: "x + Sublayer(x)", numbers: sums });
    const saved = normalize(w, stream, rule);
    check(w, saved, rule);
    w.add("grad", "dy", outGrad, { note: came });
    const dz = differentiate(w, outGrad, "dy", saved, rule, "dz");
    w.add("dx", "dx", dz, { formula: "dz", note: "the +1 path; the sublayer adds its Jacobian times dSublayer(x)" });
    w.add("dsublayer", "dSublayer(x)", dz, { formula: "dz", note: "the same: both terms of a sum get its gradient" });
    parameters(w, outGrad, "dy", saved, rule);
  } else {
    const saved = normalize(w, token, rule);
    w.add("sublayer", "Sublayer(read)", branch, { note: "output of the sublayer for it" });
    w.add("z", "z", stream, { formula: "x + Sublayer(read)", numbers: sums, note: "the stream continues without a norm" });
    check(w, saved, rule);
    w.add("grad", "dz", outGrad, { note: came });
    w.add("straight", "dx, straight", outGrad, { formula: "dz", note: "the +1 path: there is no norm on it" });
    w.add("dsublayer", "dSublayer(read)", outGrad, { formula: "dz", note: "the same: both terms of a sum get its gradient" });
    let [back, note] = [outGrad, "default: the identity replaces the unknown Jacobian of the sublayer"];
    if (read_grad !== null) {
      [back, note] = [vector("read_grad", read_grad, d), "from the argument read_grad: the result of the sublayer's backward"];
    }
    w.add("read_grad", "dread", back, { formula: "Jacobianᵀ dSublayer(read)", note });
    const through = differentiate(w, back, "dread", saved, rule, "dnorm");
    const numbers = w.pairs(outGrad, " + ", through);
    w.add("dx", "dx", added(outGrad, through), { formula: "dz + dnorm", numbers, note: "the straight path, plus the path through the sublayer and its norm" });
    parameters(w, back, "dread", saved, rule);
  }
  explain(w.steps, rule);
  return { placement, norm, variance, eps_place, eps, weight: gamma, bias: beta, digits, steps: w.steps, title };
}

/** The step of that name. @param {Trace} of @param {string} name @returns {Step} */
export function step(of, name) {
  const match = of.steps.find((candidate) => candidate.name === name);
  if (!match) throw new Error(`'${name}' is no step of this trace, expected one of: ${of.steps.map((s) => s.name).join(", ")}.`);
  return match;
}

/** A value as a list. @param {number | number[]} value */
export const flat = (value) => (Array.isArray(value) ? value : [value]);

/** What the sublayer's wrapper computes, in one line. @param {{placement: string, norm: string}} of */
export function equation({ placement, norm }) {
  const name = norm === "layer" ? "LayerNorm" : "RMSNorm";
  return placement === "post" ? `y = ${name}(x + Sublayer(x))` : `z = x + Sublayer(${name}(x))`;
}

/** What goes on to the next sublayer: y in post-LN, the stream z in pre-LN. @param {Trace} of */
export const output = (of) => flat(step(of, of.placement === "post" ? "shifted" : "z").value);

/** As `addnorm trace --json` prints it: inf and nan, which JSON lacks, are null. @param {Trace} of */
export function described(of) {
  const json = (/** @type {number} */ value) => (Number.isFinite(value) ? value : null);
  const steps = of.steps.map((step) => ({
    ...step,
    value: Array.isArray(step.value) ? step.value.map(json) : json(step.value),
    finite: flat(step.value).every(Number.isFinite),
  }));
  return { schema: "addnorm.trace", schema_version: 1, equation: equation(of), ...of, steps, output: output(of).map(json) };
}

/** Which norm, and the words for its formulas; v is the symbol of what it normalizes. */
class Rule {
  /**
   * @param {boolean} layer @param {boolean} biased @param {boolean} inside @param {number} eps @param {number[]} weight
   * @param {number[]} bias @param {string} v
   */
  constructor(layer, biased, inside, eps, weight, bias, v) {
    this.layer = layer;
    this.biased = biased;
    this.inside = inside;
    this.eps = eps;
    this.weight = weight;
    this.bias = bias;
    this.v = v;
    this.count = biased ? weight.length : weight.length - 1;
    this.spread = layer ? "σ²" : "ms";
    this.centred = layer ? `(${v} - μ)` : v;
    this.root = inside ? `√(${this.spread} + ε)` : `√(${this.spread}) + ε`;
    this.overRoot = inside ? `/ ${this.root}` : `/ (${this.root})`;
    this.normalized = `${v}_norm`;
    this.average = biased ? "(1/d)" : "(1/(d - 1))";
  }
}

/**
 * What the backward needs from the forward; direction is how the root changes with each feature, times count.
 * @typedef {{normalized: number[], direction: number[], spread: number, root: number}} Saved
 */

/** Collects the steps, and writes numbers into formulas. */
class Writer {
  /** @param {number} digits */
  constructor(digits) {
    this.digits = digits;
    /** @type {Step["section"]} */
    this.section = "forward";
    /** @type {Step[]} */
    this.steps = [];
  }

  /** @param {string} name @param {string} symbol @param {number | number[]} value @param {{formula?: string, numbers?: string, note?: string}} [text] */
  add(name, symbol, value, { formula = "", numbers = "", note = "" } = {}) {
    this.steps.push({ name, section: this.section, symbol, value, formula, numbers, note });
  }

  /** @param {number} value */
  n(value) {
    return show(value, this.digits);
  }

  /** In parentheses if negative or with an exponent, to stand next to an operator. @param {number} value */
  p(value) {
    const text = this.n(value);
    return text.includes("-") || text.includes("e") ? `(${text})` : text;
  }

  /** @param {number} d @param {(k: number) => string} text @param {string} between */
  some(d, text, between) {
    const shown = d <= 4 ? Array.from({ length: d }, (_, k) => text(k)) : [text(0), text(1), "…", text(d - 1)];
    return shown.join(between);
  }

  /** @param {number} d @param {(k: number) => string} text */
  each(d, text) {
    return `[${this.some(d, text, ", ")}]`;
  }

  /** @param {number[]} left @param {string} sign @param {number[]} right */
  pairs(left, sign, right) {
    return this.each(left.length, (k) => `${this.n(left[k])}${sign}${this.p(right[k])}`);
  }

  /** @param {number[]} values @param {number} count @param {(k: number) => string} [text] */
  mean(values, count, text = (k) => (k ? this.p(values[k]) : this.n(values[k]))) {
    return `(${this.some(values.length, text, " + ")}) / ${count} = ${this.n(sum(values))} / ${count}`;
  }
}

/**
 * The steps from the mean (RMSNorm: the squares) to the shift.
 * @param {Writer} w @param {number[]} z @param {Rule} rule @returns {Saved}
 */
function normalize(w, z, rule) {
  const { count, v } = rule;
  const d = z.length;
  let centred = z;
  if (rule.layer) {
    const mean = sum(z) / d;
    centred = z.map((a) => a - mean);
    w.add("mean", "μ", mean, { formula: `(1/d) Σ ${v}ₖ`, numbers: w.mean(z, d) });
    w.add("centred", `${v} - μ`, centred, { numbers: w.pairs(z, " - ", new Array(d).fill(mean)) });
  }
  const squares = centred.map((a) => a * a);
  w.add("squares", `${rule.centred}²`, squares, { numbers: w.each(d, (k) => `${w.p(centred[k])}²`) });
  const spread = sum(squares) / count;
  const each = rule.layer ? `(${v}ₖ - μ)²` : `${v}ₖ²`;
  const formula = `${rule.average} Σ ${each}`;
  w.add(rule.layer ? "variance" : "mean_square", rule.spread, spread, { formula, numbers: w.mean(squares, count) });
  const sigma = Math.sqrt(spread);
  const root = rule.inside ? Math.sqrt(spread + rule.eps) : sigma + rule.eps;
  const eps = Object.is(rule.eps, -0) ? "-0" : show(rule.eps, 6);
  w.add("root", rule.root, root, { numbers: rule.inside ? `√(${w.n(spread)} + ${eps})` : `√(${w.n(spread)}) + ${eps}` });
  const normalized = centred.map((a) => a / root);
  w.add("normalized", rule.normalized, normalized, {
    formula: `${rule.centred} ${rule.overRoot}`,
    numbers: w.pairs(centred, " / ", new Array(d).fill(root)),
    note: onNormalized(z, normalized, root, rule),
  });
  const scaled = times(rule.weight, normalized);
  w.add("scaled", `γ ⊙ ${rule.normalized}`, scaled, { numbers: w.pairs(rule.weight, "·", normalized) });
  w.add("shifted", v === "x" ? "read" : "y", added(scaled, rule.bias), {
    formula: `γ ⊙ ${rule.normalized} + β`,
    numbers: w.pairs(scaled, " + ", rule.bias),
    note: v === "x" ? "input of the sublayer" : "",
  });
  const direction = rule.inside ? normalized : centred.map((a) => (sigma === 0 ? 0 : a / sigma));
  return { normalized, direction, spread, root };
}

/**
 * Mean 0 and variance 1, and what eps makes of the second. What comes after is the backward.
 * @param {Writer} w @param {Saved} saved @param {Rule} rule
 */
function check(w, saved, rule) {
  const d = saved.normalized.length;
  const n = rule.normalized;
  w.section = "checks";
  const mean = sum(saved.normalized) / d;
  w.add("check_mean", `mean(${n})`, mean, { note: onMean(mean, rule) });
  const away = rule.layer ? mean : 0;
  const square = sum(saved.normalized.map((a) => (a - away) * (a - away))) / d;
  if (rule.layer) w.add("check_variance", `variance(${n})`, square, { note: "divided by d" });
  else w.add("check_square", `mean(${n}²)`, square);
  const share = rule.count / d; // the check divides by d, whatever the norm divides by
  const expected = (saved.spread / (saved.root * saved.root)) * share;
  const formula = rule.inside ? `${rule.spread} / (${rule.spread} + ε)` : `${rule.spread} / (${rule.root})²`;
  w.add("expected", "expected", expected, {
    formula: rule.biased ? formula : `(d - 1)/d · ${formula}`,
    note: onExpected(expected, saved.spread, rule),
  });
  w.section = "backward";
}

/**
 * The steps from the gradient of the norm's output to that of its input, which is the step `name`.
 * @param {Writer} w @param {number[]} out @param {string} symbol @param {Saved} saved @param {Rule} rule @param {string} name
 */
function differentiate(w, out, symbol, saved, rule, name) {
  const d = out.length;
  const n = rule.normalized;
  const g = times(out, rule.weight);
  w.add("grad_scaled", "g", g, { formula: `${symbol} ⊙ γ`, numbers: w.pairs(out, "·", rule.weight) });
  let mean = 0;
  if (rule.layer) {
    mean = sum(g) / d;
    w.add("grad_mean", "mean(g)", mean, { formula: "(1/d) Σ gₖ", numbers: w.mean(g, d) });
  }
  const products = times(g, saved.normalized);
  const p = sum(products) / rule.count;
  w.add("projection", "p", p, {
    formula: `${rule.average} Σ gₖ·${n}ₖ`,
    numbers: w.mean(products, rule.count, (k) => `${w.p(g[k])}·${w.p(saved.normalized[k])}`),
    note: `component of g along ${n}`,
  });
  const dz = g.map((a, k) => (a - mean - saved.direction[k] * p) / saved.root);
  const along = rule.inside ? n : `${rule.centred}/√${rule.spread}`;
  const taken = rule.layer ? ` - ${w.p(mean)}` : "";
  let note = rule.layer && dz.every(Number.isFinite) ? `sums to 0: the norm ignores a constant added to ${rule.v}` : "";
  if (!rule.inside && saved.direction.every((a) => a === 0)) {
    note = "the limit at √0; autograd gives nan here: 0 times the infinite slope of the root";
  }
  w.add(name, name, dz, {
    formula: `(g${rule.layer ? " - mean(g)" : ""} - ${along}·p) ${rule.overRoot}`,
    numbers: w.each(d, (k) => `(${w.n(g[k])}${taken} - ${w.p(saved.direction[k])}·${w.p(p)}) / ${w.n(saved.root)}`),
    note,
  });
  return dz;
}

/**
 * The gradients of gamma and beta: this token's share, which a batch sums over its tokens.
 * @param {Writer} w @param {number[]} out @param {string} symbol @param {Saved} saved @param {Rule} rule
 */
function parameters(w, out, symbol, saved, rule) {
  w.add("dweight", "dγ", times(out, saved.normalized), {
    formula: `${symbol} ⊙ ${rule.normalized}`,
    numbers: w.pairs(out, "·", saved.normalized),
    note: "a batch sums this over its tokens",
  });
  w.add("dbias", "dβ", out, { formula: symbol, note: "a batch sums this over its tokens" });
}

/** @param {number} mean @param {Rule} rule */
function onMean(mean, rule) {
  if (!Number.isFinite(mean)) return "";
  if (!rule.layer) return "RMSNorm does not subtract the mean";
  return Math.abs(mean) < 1e-9 ? "0 up to round-off" : "not 0: the features are so large that the round-off of μ is visible";
}

/** @param {number} expected @param {number} spread @param {Rule} rule */
function onExpected(expected, spread, rule) {
  if (!Number.isFinite(expected)) return "";
  if (spread === 0) return "the variance is 0 and cannot become 1";
  if (expected < 1) {
    const cause = rule.biased ? "ε" : rule.eps ? "d - 1 and ε" : "d - 1";
    return `${show(1 - expected, 2)} below 1, due to ${cause}`;
  }
  return rule.eps ? "1: ε is negligible beside this variance" : "1: ε = 0 has no effect";
}

/** What is special about this token, if anything. @param {number[]} z @param {number[]} normalized @param {number} root @param {Rule} rule */
function onNormalized(z, normalized, root, rule) {
  const n = rule.normalized;
  const y = rule.v === "z" ? "y" : "the read";
  if (root === Infinity && normalized.every((a) => a === 0)) return `the squares overflow, so ${n} = 0 and ${y} = β`;
  if (!normalized.every(Number.isFinite)) return "";
  if (!rule.layer) return z.every((a) => a === 0) ? `a token of zeros stays zero, and ${y} = β` : "";
  if (z.length === 1) return `d = 1: a single feature is its own mean, so ${n} = 0 and ${y} = β for every input`;
  if (z.every((a) => a === z[0])) {
    if (normalized.some((a) => Math.abs(a) > 1e-6)) {
      return "all features are equal: the values are only the round-off of μ; a larger ε hides it";
    }
    return `all features are equal: ${n} = 0 up to round-off, and ${y} = β`;
  }
  return "";
}

/** Says at the first step that is not finite why it is not. @param {Step[]} steps @param {Rule} rule */
function explain(steps, rule) {
  const first = steps.find((step) => !flat(step.value).every(Number.isFinite));
  if (!first) return;
  let why = "overflow: larger than the largest float64, 1.8e308; later values may be inf or nan";
  if (first.name === "variance" && !rule.count) why = "0/0: with d = 1 there is no variance divided by d - 1; later values are nan";
  else if (first.name === "normalized") why = "division by 0: the root is 0, and ε = 0";
  first.note = first.note ? `${first.note}; ${why}` : why;
}

/** From left to right. @param {number[]} values */
function sum(values) {
  let total = 0;
  for (const value of values) total = total + value;
  return total;
}

/** @param {number[]} left @param {number[]} right */
const added = (left, right) => left.map((a, k) => a + right[k]);

/** @param {number[]} left @param {number[]} right */
const times = (left, right) => left.map((a, k) => a * right[k]);
