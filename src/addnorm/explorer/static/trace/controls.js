// @ts-check
/** The controls: the example, the vectors as text and as sliders, the choices. Each reports the state's keys that it changes. */

import { h, updateChildren, labelled, set, unique } from "../dom.js";
import { show } from "../numbers.js";
import { entries, float } from "./parsing.js";

/** @typedef {import("../state.js").State} State */
/** @typedef {import("./presets.js").Preset} Preset */
/** @typedef {(some: State, how?: {commit?: boolean}) => void} Change */

/** The texts: key, name of the argument (errors begin with it), label, hint. */
const TEXTS = /** @type {const} */ ([
  ["x", "x", "Token x", "1 to 16 numbers, separated by commas"],
  ["F", "sublayer", "Sublayer(x)", "Output of the sublayer: as many numbers as x has"],
  ["gamma", "weight", "γ, the scale", "One number for all features, or one for each; empty is 1"],
  ["beta", "bias", "β, the shift", "One number for all features, or one for each; empty is 0"],
  ["eps", "eps", "ε", "A small number that keeps the root above 0"],
  ["g", "grad", "Incoming gradient", "Gradient of the output, one number for each feature; empty is 1, 0, 0, …"],
  ["rg", "read_grad", "Gradient of the sublayer's input", "From the sublayer's backward pass; empty is the incoming gradient"],
]);

/** The choices: key, name of the argument, legend, [value, label] pairs. */
const CHOICES = /** @type {const} */ ([
  ["tplace", "placement", "Placement of the norm", [["post", "post-LN"], ["pre", "pre-LN"]]],
  ["tnorm", "norm", "Norm", [["layer", "LayerNorm"], ["rms", "RMSNorm"]]],
  ["var", "variance", "Variance over", [["biased", "d"], ["unbiased", "d − 1"]]],
  ["epsat", "eps_place", "ε", [["inside", "in the root"], ["outside", "outside"]]],
]);

const OWN = "own";
/** Field of an argument's error. */
const KEYS = new Map([...TEXTS, ...CHOICES].map(([key, argument]) => [/** @type {string} */ (argument), /** @type {string} */ (key)]));

/** The key of the field that an error is about; its sentence begins with the argument's name. @param {string} message */
export const keyOf = (message) => KEYS.get(/^\w+/.exec(message)?.[0] ?? "") ?? "x";

/** The numbers of a text, as far as they can be read. @param {string} text @returns {number[] | undefined} */
function read(text) {
  const numbers = entries(text).map((entry) => float(entry));
  return numbers.every((number) => number !== undefined && Number.isFinite(number)) ? /** @type {number[]} */ (numbers) : undefined;
}

export class Controls {
  /** @param {Preset[]} presets @param {{change: Change, preset: (preset: Preset) => void}} on */
  constructor(presets, { change, preset }) {
    this.change = change;
    /** @type {Record<string, {input: any, problem: HTMLElement, box: HTMLElement}>} */
    this.fields = {};
    /** @type {State} */
    this.state = {};

    this.preset = h(
      "select",
      { onchange: () => preset(presets[Number(this.preset.value)]) },
      h("option", { value: OWN, disabled: true }, "Your own numbers"),
      ...presets.map(({ title }, k) => h("option", { value: k }, title)),
    );
    for (const [key, , label, hint] of TEXTS) this.#text(key, label, hint);
    for (const [key, , legend, options] of CHOICES) this.#choice(key, legend, options);
    this.digits = h("input", {
      type: "range", min: 2, max: 10, oninput: () => change({ digits: Number(this.digits.value) }, { commit: false }), onchange: () => change({ digits: Number(this.digits.value) }),
    });
    this.digitsOutput = h("output");
    this.sliders = h("div.trace-sliders");
    this.drag = h("details.trace-drag", { open: true }, h("summary", null, "Drag the numbers"), h("p.trace-slider", { "aria-hidden": "true" }, h("span"), h("span", null, "x"), h("span", null, "Sublayer")), this.sliders);

    const box = (/** @type {string} */ key) => this.fields[key].box;
    this.element = h(
      "form.trace-rail",
      { "aria-label": "The token and the choices", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
      labelled("Example", this.preset),
      box("x"), box("F"), this.drag, box("tnorm"),
      h("div.trace-two", null, box("gamma"), box("beta")),
      box("g"), box("rg"),
      h(
        "details.trace-variants",
        null,
        h("summary", null, "Variants of hand calculations"),
        h("div.trace-two", null, box("var"), box("epsat")),
        box("eps"),
        labelled("Digits shown", this.digits, { output: this.digitsOutput }),
      ),
    );
    this.variants = this.element.querySelector(".trace-variants");
  }

  /**
   * @param {State} state @param {{preset: number, problem?: {key: string, text: string}}} check
   *   preset: the index of that which these numbers are, or -1; problem: what is wrong, and where
   */
  show(state, { preset, problem }) {
    this.state = state;
    set(this.preset, { value: preset < 0 ? OWN : String(preset) });
    for (const [key] of TEXTS) {
      const { input } = this.fields[key];
      // what is being typed is not rewritten under the hand
      if (document.activeElement !== input || input.value.trim() !== state[key]) set(input, { value: state[key] });
    }
    for (const [key] of CHOICES) {
      for (const radio of this.fields[key].box.querySelectorAll("input")) set(radio, { checked: radio.value === state[key] });
    }
    for (const [key, { input, problem: place }] of Object.entries(this.fields)) {
      const text = problem?.key === key ? problem.text : "";
      set(place, { text, hidden: !text });
      set(input, { "aria-invalid": text ? "true" : null });
    }
    const pre = state.tplace === "pre";
    set(this.fields.rg.box, { hidden: !pre });
    set(/** @type {HTMLElement} */ (this.fields.F.box.querySelector(".name")), { text: pre ? "Sublayer(read)" : "Sublayer(x)" });
    for (const radio of this.fields.var.box.querySelectorAll("input")) set(radio, { disabled: state.tnorm === "rms" && radio.value === "unbiased" });
    if (state.var !== "biased" || state.epsat !== "inside" || problem?.key === "eps") this.variants.open = true;
    set(this.digits, { value: String(state.digits) });
    set(this.digitsOutput, { text: state.digits });
    this.#drawSliders();
  }

  /** @param {string} key @param {string} label @param {string} hint */
  #text(key, label, hint) {
    const id = unique("trace-problem");
    const most = key === "eps" ? 30 : 480;
    const send = (/** @type {boolean} */ commit) => this.change({ [key]: input.value.trim() }, { commit });
    const input = h("input", {
      type: "text", inputmode: "text", autocomplete: "off", spellcheck: "false", maxlength: most, name: key, "aria-describedby": id,
      oninput: () => send(false), onchange: () => send(true),
    });
    const problem = h("p.trace-problem", { id, hidden: true });
    this.fields[key] = { input, problem, box: h("div.trace-field", null, labelled(label, input, { hint }), problem) };
  }

  /** @param {string} key @param {string} legend @param {readonly (readonly [string, string])[]} options */
  #choice(key, legend, options) {
    const id = unique("trace-problem");
    const radios = options.map(([value, label]) =>
      h("label", null, h("input", { type: "radio", name: `trace-${key}`, value, onchange: () => this.change(this.#chosen(key, value)) }), h("span", null, label)));
    const problem = h("p.trace-problem", { id, hidden: true });
    const set = h("fieldset.trace-choice", { "aria-describedby": id }, h("legend", null, legend), h("div.trace-segments", null, ...radios), problem);
    this.fields[key] = { input: radios[0].firstChild, problem, box: set };
  }

  /** A choice, and what it rules out: RMSNorm has no variance. @param {string} key @param {string} value */
  #chosen(key, value) {
    return key === "tnorm" && value === "rms" ? { tnorm: value, var: "biased" } : { [key]: value };
  }

  #drawSliders() {
    const x = read(this.state.x) ?? [];
    const sublayer = read(this.state.F) ?? [];
    const features = x.length && x.length <= 16 ? x.map((value, k) => ({ x: value, F: sublayer[k] })) : [];
    set(this.drag, { hidden: !features.length });
    // while one is dragged the scale stays, so that the number under the hand does not run away
    if (!this.held) this.reach = reach([...x, ...sublayer]);
    updateChildren(this.sliders, features, (_, k) => this.#slider(k), (row, feature) => {
      for (const key of /** @type {const} */ (["x", "F"])) {
        const { input, output } = row.parts[key];
        const value = feature[key];
        set(input, { min: -(this.reach ?? 1), max: this.reach ?? 1, disabled: value === undefined });
        if (value !== undefined && (!this.held || document.activeElement !== input)) set(input, { value: String(value) });
        set(output, { text: value === undefined ? "" : show(value, 4) });
      }
    });
  }

  /** @param {number} k */
  #slider(k) {
    /** @type {Record<string, {input: any, output: any}>} */
    const parts = {};
    for (const key of ["x", "F"]) {
      const send = (/** @type {boolean} */ commit) => {
        this.held = !commit;
        const numbers = read(this.state[key]);
        if (!numbers || k >= numbers.length) return;
        const step = /** @type {number} */ (this.reach) / 100;
        numbers[k] = Number((Math.round(Number(input.value) / step) * step).toPrecision(10));
        this.change({ [key]: numbers.map(written).join(",") }, { commit });
      };
      const input = h("input", {
        type: "range", step: "any", "aria-label": `${key === "x" ? "x" : "Sublayer(x)"}, feature ${k + 1}`, oninput: () => send(false), onchange: () => send(true),
      });
      parts[key] = { input, output: h("output") };
    }
    const { x, F } = parts;
    return Object.assign(h("div.trace-slider", null, h("span.trace-index", { "aria-hidden": "true" }, k + 1), h("span", null, x.input, x.output), h("span", null, F.input, F.output)), { parts });
  }
}

/** A number for a text. @param {number} value */
export const written = (value) => (Object.is(value, -0) ? "-0" : String(value));

/** How far the sliders go: 5, 10, 20, 50, …, with room around the numbers. @param {number[]} values */
function reach(values) {
  const most = Math.max(2, ...values.map(Math.abs)) * 1.25;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((k) => k * power).find((candidate) => candidate >= most) ?? most;
}
