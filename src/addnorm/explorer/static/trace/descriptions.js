// @ts-check
/** Title and description of each step, and the scale of its bars. */

/** @typedef {import("./trace.js").Trace} Trace */

/**
 * The scales of the bars: within one, a bar twice as long is a number twice as large.
 * @typedef {"values" | "squares" | "unit" | "gradient" | "parameters"} Scale
 */

/**
 * By step: title, one sentence, and the scale of the bars.
 * @type {Record<string, [title: string, description: string, scale: Scale]>}
 */
const WORDS = {
  x: ["The token", "One number for each feature: the residual stream of one token.", "values"],
  sublayer: ["The sublayer's output", "The output of attention or feed-forward, with as many numbers as the token.", "values"],
  z: ["Add: the residual connection", "The output is added to the token, feature by feature.", "values"],
  mean: ["The mean", "The average of the features.", "values"],
  centred: ["Centre", "Subtract the mean from each feature.", "values"],
  squares: ["Square", "Square each feature: features far from the mean count most.", "squares"],
  variance: ["The variance", "The average of the squares.", "squares"],
  mean_square: ["The mean square", "The average of the squares. RMSNorm does not subtract the mean.", "squares"],
  root: ["The root", "The standard deviation. ε keeps it above 0, so that the division is safe.", "squares"],
  normalized: ["Divide", "Divide each feature by the root: the result has variance 1 for every input.", "unit"],
  scaled: ["Scale by γ", "Multiply by a learned factor for each feature.", "unit"],
  shifted: ["Shift by β", "Add a learned offset for each feature.", "unit"],
  check_mean: ["Check the mean", "The mean of the normalized features is 0.", "unit"],
  check_variance: ["Check the variance", "Their variance is 1, up to the effect of ε.", "unit"],
  check_square: ["Check the mean square", "Their mean square is 1, up to the effect of ε.", "unit"],
  expected: ["Expected value", "The same number, computed from the variance and ε alone.", "unit"],
  grad: ["The incoming gradient", "The gradient of the loss with respect to the output.", "gradient"],
  straight: ["Through the residual connection", "The add passes the gradient to x unchanged. This part arrives at any depth.", "gradient"],
  grad_scaled: ["Through γ", "The gradient is multiplied by γ, as the features were in the forward pass.", "gradient"],
  grad_mean: ["Its mean", "The component along (1, …, 1). Adding a constant to all features does not change the output, so this component is removed.", "gradient"],
  projection: ["Its component along the token", "Scaling the token does not change the output either, so this component is removed too.", "gradient"],
  dz: ["Through the norm", "The rest of the gradient, divided by the root: a large token gets a small gradient.", "gradient"],
  dnorm: ["Through the norm", "The rest of the gradient, divided by the root: a large token gets a small gradient.", "gradient"],
  dx: ["To the token", "The add copies the gradient to the residual connection.", "gradient"],
  dsublayer: ["To the sublayer", "The add copies the same gradient to the sublayer.", "gradient"],
  read_grad: ["From the sublayer", "The gradient of the sublayer's input, from its own backward pass.", "gradient"],
  dweight: ["To γ", "The gradient of the learned factors γ.", "parameters"],
  dbias: ["To β", "The gradient of the learned offsets β.", "parameters"],
};

/** Descriptions that differ by placement, norm or variance. @type {Record<string, Record<string, Partial<Record<0 | 1, string>>>>} */
const VARIANTS = {
  pre: {
    z: { 1: "The output is added to the token without a norm: the norm is on the branch." },
    shifted: { 1: "Add a learned offset for each feature. The result is the sublayer's input." },
    dx: { 1: "The sum of two paths: the residual connection, and the sublayer with its norm." },
  },
  rms: {
    normalized: { 1: "Divide each feature by the root: the result has a root mean square of 1 for every input." },
    check_mean: { 1: "The mean was not subtracted, so it is not 0." },
    projection: { 1: "Scaling the token does not change the output, so this component is removed." },
  },
  unbiased: {
    variance: { 1: "The sum of the squares divided by d - 1, as for a sample in statistics: larger than LayerNorm's." },
    check_variance: { 1: "Their variance is (d - 1)/d, not 1: the norm divided by d - 1." },
  },
};

/**
 * Title and sentence of a step, and the scale of its bars.
 * @param {string} name @param {Trace} of
 * @returns {{title: string, description: string, scale: Scale}}
 */
export function words(name, of) {
  const [title, description, scale] = WORDS[name];
  for (const choice of [of.placement, of.norm, of.variance]) {
    const other = VARIANTS[choice]?.[name];
    if (other) return { title: other[0] ?? title, description: other[1] ?? description, scale };
  }
  return { title, description, scale };
}

export const HEADINGS = {
  forward: ["Forward", "from the token to the output"],
  checks: ["Checks", "mean and variance of the normalized token"],
  backward: ["Backward", "from the incoming gradient to that of each input"],
};

/** Whether the step is on the residual connection, without a norm. @param {string} name @param {Trace} of */
export const straight = (name, of) => of.placement === "pre" && (name === "straight" || name === "grad" || name === "dx");

/**
 * The effect of the placement on this gradient, with the numbers of both traces.
 * @param {Trace} post @param {Trace} pre @param {(value: number) => string} show
 */
export function comparePlacements(post, pre, show) {
  const size = (/** @type {Trace} */ of, /** @type {string} */ name) => {
    const value = of.steps.find((step) => step.name === name)?.value;
    return Array.isArray(value) ? Math.hypot(...value) : NaN;
  };
  const [incoming, leaving, passed] = [size(post, "grad"), size(post, "dx"), size(pre, "straight")];
  if (![incoming, leaving, passed].every(Number.isFinite)) return "With these numbers a gradient is not finite: the notes of the steps say why.";
  if (!incoming) return "The incoming gradient is 0.";
  const first = `In post-LN the gradient passes through the norm on its way to x: its L2 norm changes from ${show(incoming)} to ${show(leaving)}.`;
  return `${first} In pre-LN the residual connection passes all of it, ${show(passed)}, and the sublayer's part is added.`;
}
