// @ts-check
/** What to say of each step, in plain words, and which steps share a scale. */

/** @typedef {import("./trace.js").Trace} Trace */

/**
 * The scales of the bars: within one, a bar twice as long is a number twice as large.
 * @typedef {"values" | "squares" | "unit" | "gradient" | "parameters"} Scale
 */

/**
 * By step: its title, one plain sentence, and the scale of its bars.
 * @type {Record<string, [title: string, says: string, scale: Scale]>}
 */
const WORDS = {
  x: ["The token", "One number for each feature: this is what enters the sublayer, and what the residual carries past it.", "values"],
  sublayer: ["What the sublayer returns", "Attention or feed-forward answers with a change, of the same length as the token.", "values"],
  z: ["Add: the residual connection", "The change is added to the token, feature by feature. Nothing of x is lost.", "values"],
  mean: ["The mean", "Where the features sit: their average.", "values"],
  centred: ["Centre", "Take the mean away from each: now they sit around 0.", "values"],
  squares: ["Square", "Squares are positive, and the far-off features count most.", "squares"],
  variance: ["The variance", "The average square: how widely the features are spread.", "squares"],
  mean_square: ["The mean square", "The average square: how large the features are. RMSNorm takes no mean away first.", "squares"],
  root: ["Its root", "Back from squares to the size of a feature. ε keeps it off 0, so that the division is safe.", "squares"],
  normalized: ["Divide", "Each feature over that size: the result has the same size whatever came in.", "unit"],
  scaled: ["Scale by γ", "A learned factor for each feature: the model may undo the norm where it wants to.", "unit"],
  shifted: ["Shift by β", "A learned offset for each feature.", "unit"],
  check_mean: ["Check the mean", "The normalized features average 0.", "unit"],
  check_variance: ["Check the variance", "Their average square is 1, but for what ε takes.", "unit"],
  check_square: ["Check the mean square", "Their average square is 1, but for what ε takes.", "unit"],
  expected: ["What it should be", "The same number from the spread and ε alone.", "unit"],
  grad: ["The gradient that comes in", "How the loss would change if a feature of the output grew a little.", "gradient"],
  straight: ["Straight through: the +1 path", "The add hands the gradient to x untouched. However deep the stack, this part arrives.", "gradient"],
  grad_scaled: ["Through γ", "What was multiplied by γ forward is multiplied by γ backward.", "gradient"],
  grad_mean: ["Its mean", "The part along (1, …, 1): adding a constant to all features changes nothing, so no gradient may go there.", "gradient"],
  projection: ["Its part along the token", "Stretching the token changes nothing either, so this part has to go as well.", "gradient"],
  dz: ["Through the norm", "What is left when both parts are gone, over the same root: a large token gets a small gradient.", "gradient"],
  dnorm: ["Through the norm", "What is left when both parts are gone, over the same root: a large token gets a small gradient.", "gradient"],
  dx: ["To the token", "The add copies the gradient: the whole of it goes back along the residual.", "gradient"],
  dsublayer: ["To the sublayer", "And the whole of it goes into the sublayer.", "gradient"],
  read_grad: ["Back from the sublayer", "What its own backward hands to what it read.", "gradient"],
  dweight: ["To γ", "The gradient of the learned factors.", "parameters"],
  dbias: ["To β", "The gradient of the learned offsets.", "parameters"],
};

/** What differs by placement or norm. @type {Record<string, Record<string, Partial<Record<0 | 1, string>>>>} */
const VARIANTS = {
  pre: {
    z: { 1: "The change is added to the token as it came: the norm stands on the branch, and the stream stays free." },
    shifted: { 1: "A learned offset for each feature. This is what the sublayer reads." },
    dx: { 1: "Two ways meet: straight along the residual, and through the norm that the sublayer reads by." },
  },
  rms: {
    normalized: { 1: "Each feature over that size: the result has a root mean square of 1 whatever came in." },
    check_mean: { 1: "No mean was taken away, so it is not 0." },
    dz: { 1: "What is left when that part is gone, over the same root: a large token gets a small gradient." },
    dnorm: { 1: "What is left when that part is gone, over the same root: a large token gets a small gradient." },
    projection: { 1: "Stretching the token changes nothing, so this part of the gradient has to go." },
  },
  unbiased: {
    variance: { 1: "The average square, but over d - 1, as statistics has it for a sample: larger than LayerNorm's." },
    check_variance: { 1: "Their average square is (d - 1)/d, not 1: the norm divided by d - 1." },
  },
};

/**
 * Title and sentence of a step, and the scale of its bars.
 * @param {string} name @param {Trace} of
 * @returns {{title: string, says: string, scale: Scale}}
 */
export function words(name, of) {
  const [title, says, scale] = WORDS[name];
  for (const choice of [of.placement, of.norm, of.variance]) {
    const other = VARIANTS[choice]?.[name];
    if (other) return { title: other[0] ?? title, says: other[1] ?? says, scale };
  }
  return { title, says, scale };
}

export const HEADINGS = {
  forward: ["Forward", "from the token to what goes on"],
  checks: ["Checks", "what a norm promises, computed from these numbers"],
  backward: ["Backward", "from the gradient that comes in to what each part gets"],
};

/** Whether the step is the residual's own: what no norm touches. @param {string} name @param {Trace} of */
export const straight = (name, of) => of.placement === "pre" && (name === "straight" || name === "grad" || name === "dx");

/**
 * What the placement does to this gradient, from both traces: a sentence of numbers, not of opinion.
 * @param {Trace} post @param {Trace} pre @param {(value: number) => string} show
 */
export function moral(post, pre, show) {
  const size = (/** @type {Trace} */ of, /** @type {string} */ name) => {
    const value = of.steps.find((one) => one.name === name)?.value;
    return Array.isArray(value) ? Math.hypot(...value) : NaN;
  };
  const [came, through, kept] = [size(post, "grad"), size(post, "dx"), size(pre, "straight")];
  if (![came, through, kept].every(Number.isFinite)) return "With these numbers a gradient is no longer finite: look for the step that says why.";
  if (!came) return "No gradient comes in, so none goes on.";
  const first = `In post-LN the gradient goes through the norm on its way to x: of its length ${show(came)}, ${show(through)} arrives.`;
  return `${first} In pre-LN the add hands x all ${show(kept)} of it, and what comes back through the sublayer on top.`;
}
