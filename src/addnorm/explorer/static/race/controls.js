// @ts-check
/** The settings of a race: fields of the address and their controls. */

import { h, updateChildren, labelled, set, unique } from "../dom.js";
import { fieldOf, whole } from "../state.js";

/** Keys of the address, and what the server calls them. @type {Record<string, string>} */
export const KEYS = {
  left: "left", right: "right", L: "layers", steps: "steps", lr: "lr", warm: "warm_up", rseed: "seed", rd: "d_model", rT: "tokens", rB: "batch",
};

/** @type {[string, string, string][]} key, label, hint */
const SLIDERS = [
  ["L", "Layers", "each with attention and feed-forward"],
  ["steps", "Steps", "of Adam, each with a new batch"],
  ["warm", "Warm-up", "steps over which the learning rate rises"],
  ["rd", "d_model", "features of a token"],
  ["rT", "Tokens", "characters of a sequence"],
  ["rB", "Batch", "sequences of a step"],
];

/** @type {[string, string, string][]} key, label, hint */
const TYPED = [
  ["lr", "Learning rate", "of both models, as in 0.003 or 3e-3"],
  ["rseed", "Seed", "of the weights and the batches of both models"],
];

/**
 * Races that are worth a look: the label of the button, and the settings. At the default rate post-LN fails.
 * @param {any} race  of the server @returns {[string, Record<string, any>][]}
 */
const suggested = ({ fields: { lr: { default: lr } }, lesson: { rate, warm_up: warm } }) => [
  ["post-LN fails", { left: "post_ln", right: "pre_ln", warm: 0, lr }],
  ["warm-up helps", { left: "post_ln", right: "pre_ln", warm, lr }],
  ["both learn", { left: "post_ln", right: "pre_ln", warm: 0, lr: rate }],
  ["DeepNorm helps", { left: "post_ln", right: "deepnorm", warm: 0, lr }],
  ["no residual", { left: "pre_ln", right: "no_residual", warm: 0, lr: rate }],
];

/** @param {any} meta @returns {import("../state.js").Fields} */
export function fields(meta) {
  const known = meta.race.fields;
  const entries = Object.entries(KEYS).map(([key, name]) => [key, fieldOf(known[name])]);
  return { ...Object.fromEntries(entries), at: whole(-1, -1, known.steps.maximum - 1) };
}

/** The settings of a state, as the server calls them. @param {import("../state.js").State} state @returns {Record<string, any>} */
export const toSettings = (state) => Object.fromEntries(Object.entries(KEYS).map(([key, name]) => [name, state[key]]));

export class Controls {
  /** @param {any} meta @param {import("../state.js").Store} store */
  constructor(meta, store) {
    this.store = store;
    const { fields: known, wirings } = meta.race;
    this.wirings = wirings;
    this.selects = ["left", "right"].map((key) => {
      const input = h("select", { onchange: () => store.set({ [key]: input.value }) },
        ...known[key].choices.map((/** @type {string} */ name) => h("option", { value: name }, name)));
      const equation = h("p.race-equation");
      return { key, input, equation, element: labelled(key === "left" ? "Wiring" : "Against", input) };
    });
    this.sliders = SLIDERS.map(([key, label, hint]) => {
      const field = known[KEYS[key]];
      const change = () => this.#limitWarmUp(key, Number(input.value));
      const input = h("input", {
        type: "range", min: field.minimum, max: field.maximum, step: field.step, id: unique(key),
        oninput: () => store.set(change(), { commit: false }), onchange: () => store.set(change()),
      });
      const output = h("output", { for: input.id });
      return { key, input, output, element: labelled(label, input, { hint, output }) };
    });
    this.typed = TYPED.map(([key, label, hint]) => {
      const wrong = h("p.wrong", { id: unique(key), hidden: true });
      const input = h("input", { type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false", "aria-describedby": wrong.id, onchange: () => this.#read(key, label, input, wrong) });
      return { key, input, wrong, element: labelled(label, input, { hint }) };
    });
    this.suggested = h("div.buttons", null, ...suggested(meta.race).map(([name, some]) =>
      h("button.plain", { type: "button", onclick: () => store.set(this.#within(some)) }, name)));
    this.settings = h("fieldset", { "aria-label": "Training" }, ...this.typed.flatMap(({ element, wrong }) => [element, wrong]), ...this.sliders.map(({ element }) => element));
    this.pair = h("fieldset", null, h("legend", null, "Two wirings"), this.suggested,
      ...this.selects.flatMap(({ element, equation }) => [element, equation]));
    this.inShort = h("span");
    this.details = h("details.race-training", { open: matchMedia("(min-width: 1000px)").matches },
      h("summary", null, "Training settings", this.inShort), this.settings);
    this.drawings = h("div.race-drawings");
    this.element = h("div", null, this.pair, this.details);
  }

  /** A warm-up is no longer than the training. @param {string} key @param {number} value */
  #limitWarmUp(key, value) {
    if (key === "steps") return { steps: value, warm: Math.min(this.store.state.warm, value) };
    return { [key]: key === "warm" ? Math.min(value, this.store.state.steps) : value };
  }

  /** @param {Record<string, any>} some */
  #within(some) {
    return { ...some, warm: Math.min(some.warm, this.store.state.steps) };
  }

  /** Takes what was typed, or says what is wrong with it. @param {string} key @param {string} label @param {any} input @param {any} wrong */
  #read(key, label, input, wrong) {
    try {
      const value = this.store.fields[key].parse(input.value);
      this.#right(input, wrong);
      this.store.set({ [key]: value });
    } catch (error) {
      set(input, { "aria-invalid": "true" });
      set(wrong, { text: `${label} is '${input.value.slice(0, 40)}', expected ${/** @type {Error} */ (error).message}.` });
      wrong.hidden = false;
    }
  }

  /** @param {any} input @param {any} wrong */
  #right(input, wrong) {
    set(input, { "aria-invalid": null });
    wrong.hidden = true;
  }

  /** @param {import("../state.js").State} state @param {Set<string>} changed @param {boolean} locked  a race runs */
  show(state, changed, locked) {
    for (const { key, input, equation } of this.selects) {
      set(input, { value: state[key] });
      updateChildren(equation, this.wirings[state[key]].equation.split("\n"), () => h("span"), (line, text) => set(line, { text }));
    }
    updateChildren(this.drawings, [state.left, state.right], () => h("div", null, h("h3"), h("pre", { tabindex: 0 }), h("p")), (element, name) => {
      const { drawing, description } = this.wirings[name];
      const [title, picture, text] = element.children;
      set(title, { text: name });
      set(picture, { text: drawing, role: "img", "aria-label": `${name} as a drawing` });
      set(text, { text: description });
    });
    set(this.inShort, { text: `: rate ${state.lr}, ${state.L} layers, ${state.steps} steps${state.warm ? `, warm-up ${state.warm}` : ""}` });
    for (const { key, input, output } of this.sliders) {
      set(input, { value: String(state[key]), "aria-valuetext": String(state[key]), ...(key === "warm" ? { max: state.steps } : {}) });
      set(output, { text: state[key] });
    }
    for (const { key, input, wrong } of this.typed) {
      if (!changed.has(key) && input.hasAttribute("aria-invalid")) continue;
      set(input, { value: this.store.fields[key].format(state[key]) });
      this.#right(input, wrong);
    }
    for (const part of [this.pair, this.settings]) set(part, { disabled: locked });
  }
}
