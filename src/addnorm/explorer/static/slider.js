// @ts-check
/** A slider over the numbers of a parameter. An exported page has some of them; with a single one the slider is hidden. */

import { h, labelled, set, unique } from "./dom.js";

export class Slider {
  /**
   * @param {import("./state.js").Store} store
   * @param {string} key  of the state
   * @param {any} field  as the server describes it
   * @param {string} label @param {string} [hint]
   */
  constructor(store, key, { minimum, maximum, step, values }, label, hint) {
    this.key = key;
    this.values = values;
    const value = () => (values ? values[Number(this.input.value)] : Number(this.input.value));
    this.input = h("input", {
      type: "range", min: values ? 0 : minimum, max: values ? values.length - 1 : maximum, step: values ? 1 : step ?? 0.05, id: unique(key),
      oninput: () => store.set({ [key]: value() }, { commit: false }), onchange: () => store.set({ [key]: value() }),
    });
    this.output = h("output", { for: this.input.id });
    this.element = labelled(label, this.input, { hint, output: this.output });
    this.element.hidden = values?.length === 1;
  }

  /** @param {number} value @param {string} text  of the value @param {boolean} [disabled] */
  show(value, text, disabled = false) {
    set(this.input, { value: String(this.values ? this.values.indexOf(value) : value), "aria-valuetext": text, disabled });
    set(this.output, { text });
  }
}
