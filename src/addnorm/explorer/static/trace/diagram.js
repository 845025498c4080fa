// @ts-check
/** The sublayer with its add and its norm as a picture; a click moves the norm. */

import { h, s, set } from "../dom.js";

/** Where things stand in the picture, 0 to 400 across; the residual runs above, the branch below. */
const TOP = 34;
const LOW = 92;
const PLACES = {
  post: { norm: [305, TOP], sublayer: [128, LOW], add: [218, TOP] },
  pre: { norm: [106, LOW], sublayer: [214, LOW], add: [296, TOP] },
};

/** The steps that light a part of the picture. @type {Record<string, string[]>} */
const LIT = {
  x: ["x"],
  sublayer: ["sublayer"], dsublayer: ["sublayer"], read_grad: ["sublayer"],
  z: ["add"], dx: ["add", "straight"], straight: ["straight"], grad: ["y"],
};

export class Diagram {
  /** @param {() => void} flip */
  constructor(flip) {
    this.residual = s("path.trace-line.residual", { d: `M26 ${TOP}H374` });
    this.branch = s("path.trace-line");
    this.start = s("text.trace-end", { x: 12, y: TOP + 5 }, "x");
    this.end = s("text.trace-end", { x: 391, y: TOP + 5 });
    this.add = s("g.trace-part", null, s("circle", { r: 13 }), s("path", { d: "M-6 0H6M0 -6V6" }));
    this.sublayerName = s("text", { y: 5 }, "Sublayer");
    this.sublayer = s("g.trace-part", null, s("rect", { x: -47, y: -18, width: 94, height: 36, rx: 9 }), this.sublayerName);
    this.normName = s("text", { y: 5 });
    this.norm = s("g.trace-part.norm", null, s("rect", { x: -47, y: -18, width: 94, height: 36, rx: 9 }), this.normName);
    this.straight = s("text.trace-plus", { y: TOP - 14 });
    const arrow = s("path.trace-tip", { d: `M372 ${TOP - 5}l9 5l-9 5z` });
    this.picture = s("svg", { viewBox: "0 0 400 118", "aria-hidden": "true", focusable: "false" }, this.residual, this.branch, arrow, this.start, this.end, this.straight, this.add, this.sublayer, this.norm);
    this.element = h("button.trace-diagram", { type: "button", onclick: flip }, this.picture);
  }

  /** @param {{placement: string, norm: string}} of @param {string} step  the step that is looked at */
  show({ placement, norm }, step) {
    const pre = placement === "pre";
    const at = PLACES[pre ? "pre" : "post"];
    for (const part of /** @type {const} */ (["norm", "sublayer", "add"])) this[part].style.transform = `translate(${at[part][0]}px, ${at[part][1]}px)`;
    set(this.branch, { d: `M40 ${TOP}V${LOW - 10}a10 10 0 0 0 10 10H${at.add[0] - 10}a10 10 0 0 0 10 -10V${TOP + 13}` });
    const name = norm === "rms" ? "RMSNorm" : "LayerNorm";
    set(this.normName, { text: name });
    set(this.end, { text: pre ? "z" : "y" });
    set(this.straight, { text: pre ? "no norm on this path" : "the norm is on this path", x: pre ? 160 : 122 });
    const label = pre ? `pre-LN: ${name} before the sublayer, on the branch` : `post-LN: ${name} after the add, on the residual connection`;
    set(this.element, { class: `trace-diagram ${placement}`, "aria-label": `${label}. Move it.` });
    const lit = new Set(LIT[step] ?? (step ? ["norm"] : []));
    for (const part of /** @type {const} */ (["norm", "sublayer", "add"])) this[part].classList.toggle("lit", lit.has(part));
    this.residual.classList.toggle("lit", lit.has("straight"));
    this.start.classList.toggle("lit", lit.has("x"));
    this.end.classList.toggle("lit", lit.has("y"));
  }
}
