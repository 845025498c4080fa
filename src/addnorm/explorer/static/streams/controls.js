// @ts-check
/** The settings of the streams view: fields of the address, and their controls. */

import { h, labelled, set, unique } from "../dom.js";
import { exportNote } from "../exported.js";
import { show } from "../numbers.js";
import { Slider } from "../slider.js";
import { fieldOf, whole } from "../state.js";

/** Keys of the address, and what the library calls them. @type {Record<string, string>} */
export const KEYS = { swiring: "wiring", sS: "sublayers", sd: "d_model", sn: "n", moved: "perturbation", sseed: "seed" };

/** @type {[string, string, string][]} key, label, hint */
const SLIDERS = [
  ["moved", "Perturbation", "how far the coefficients are from their initial values"],
  ["sn", "Streams n", "of wirings with any number of streams"],
  ["sS", "Sublayers", "alternately attention and feed-forward"],
  ["sd", "d_model", "features of each stream"],
  ["sseed", "Seed", "of the weights, x_0, the targets and the perturbation"],
];

const NONE = "none"; // of the wirings beside the path

/** @param {any} meta @returns {import("../state.js").Fields} */
export function fields(meta) {
  const known = meta.streams.fields;
  const entries = Object.entries(KEYS).map(([key, name]) => [key, fieldOf(known[name])]);
  return { ...Object.fromEntries(entries), sdepth: whole(-1, -1, known.sublayers.maximum) };
}

/** The settings of a state, as the server calls them. @param {import("../state.js").State} state @returns {Record<string, any>} */
export const toParams = (state) => Object.fromEntries(Object.entries(KEYS).map(([key, name]) => [name, state[key]]));

export class Controls {
  /** @param {any} meta @param {import("../state.js").Store} store */
  constructor(meta, store) {
    this.meta = meta.streams;
    this.store = store;
    const { fields: known, steps, wirings } = this.meta;
    const group = unique("step");
    const choose = (/** @type {string} */ wiring) => store.set({ swiring: wiring });
    this.radios = steps.map((/** @type {any} */ step, /** @type {number} */ k) => h("label.choice", null,
      h("input", { type: "radio", name: group, value: step.wiring, onchange: () => choose(step.wiring) }), step.title, h("kbd", { "aria-hidden": "true" }, k + 1)));
    this.back = h("button.plain", { type: "button", onclick: () => this.go(-1) }, "Back");
    this.next = h("button.main", { type: "button", onclick: () => this.go(1) }, "Next step");
    const others = Object.keys(wirings).filter((name) => !steps.some((/** @type {any} */ step) => step.wiring === name));
    this.others = h("select", { onchange: () => this.others.value !== NONE && choose(this.others.value) },
      h("option", { value: NONE }, "choose one"), ...others.map((name) => h("option", { value: name }, name)));
    this.sliders = SLIDERS.map(([key, label, hint]) => new Slider(store, key, known[KEYS[key]], label, hint));
    this.path = h("fieldset", null, h("legend", null, "Path, step by step"), h("div.streams-path", null, ...this.radios),
      h("div.buttons", null, this.back, this.next), labelled("More wirings", this.others));
    this.settings = h("fieldset.streams-settings", null, h("legend", null, "The stack"), ...this.sliders.map((slider) => slider.element),
      exportNote(meta, "This exported page has some of the settings, measured beforehand. All others are measured on your machine:"));
  }

  /** The number of the step of a state, -1 for a wiring beside the path. @param {import("../state.js").State} state @returns {number} */
  at(state) {
    return this.meta.steps.findIndex((/** @type {any} */ step) => step.wiring === state.swiring);
  }

  /** Goes along the path, from its start if the wiring is beside it. @param {number} by */
  go(by) {
    const step = this.meta.steps[Math.max(0, this.at(this.store.state) + by)];
    if (step) this.store.set({ swiring: step.wiring });
  }

  /** @param {import("../state.js").State} state */
  show(state) {
    const at = this.at(state);
    const wiring = this.meta.wirings[state.swiring];
    for (const radio of this.radios) set(radio.firstElementChild, { checked: radio.firstElementChild.value === state.swiring });
    set(this.back, { disabled: at <= 0 });
    set(this.next, { disabled: at === this.meta.steps.length - 1, text: at < 0 ? "First step" : "Next step" });
    set(this.others, { value: at < 0 ? state.swiring : NONE });
    for (const slider of this.sliders) {
      const { key } = slider;
      const fixed = (key === "sn" && !wiring.has_n) || (key === "moved" && !wiring.is_learned);
      slider.show(state[key], fixed ? (key === "sn" ? "fixed" : "none") : show(state[key], 4), fixed);
    }
  }
}
