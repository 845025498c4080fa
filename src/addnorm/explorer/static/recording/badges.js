// @ts-check
/** The proofs of a recording as badges, with a sign and a word beside the colour. */

import { h, updateChildren, set } from "../dom.js";

/** @typedef {{name: string, state: "proved" | "open" | "none", text: string, more: string}} Badge */

/** @type {Record<Badge["state"], [string, string]>} */
const SIGNS = { proved: ["✓", "proved"], open: ["!", "open"], none: ["–", ""] };

export class Badges {
  constructor() {
    this.element = h("ul.recording-badges", { "aria-label": "Proofs for this stream" });
  }

  /** @param {Badge[]} badges */
  show(badges) {
    updateChildren(this.element, badges, () => h("li", null, h("span.sign", { "aria-hidden": "true" }), h("div", null, h("p.name"), h("p.text"), h("p.more"))), (li, badge) => {
      const [sign, word] = SIGNS[badge.state];
      const [name, text, more] = li.lastElementChild.children;
      set(li, { class: `recording-badge ${badge.state}`, data: { state: badge.state } });
      set(li.firstElementChild, { text: sign });
      set(name, { text: word ? `${badge.name}: ${word}` : badge.name });
      // A number with an exponent stays in one line.
      text.replaceChildren(...badge.text.split(/(\S*\de-\d+)/).map((part, k) => (k % 2 ? h("span.figure", null, part) : part)));
      set(more, { text: badge.more });
    });
  }
}
