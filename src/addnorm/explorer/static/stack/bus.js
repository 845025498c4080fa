// @ts-check
/** The whole stack as a bus: the residual stream is one line, which every sublayer reads and writes. */

import { s, set } from "../dom.js";

const LINE = 62; // where the stream runs
const TOP = 18; // the middle of the sublayers
const MOST = 4; // sublayers that are drawn; of more the first ones and the last

/** @param {number} x @param {number} y */
const norm = (x, y) => [s("rect.bus-norm", { x: x - 9, y: y - 7, width: 18, height: 14, rx: 3 }), s("text.bus-name", { x, y: y + 4 }, "N")];

export class Bus {
  svg = s("svg.bus", { viewBox: "0 0 384 80", role: "img" });

  /** @param {{title: string, norms: string[]}} place @param {{sublayers: number, residual: boolean, alpha: boolean, final: boolean}} how */
  show({ title, norms }, { sublayers, residual, alpha, final }) {
    const [before, behind, after] = ["norm_in", "norm_branch", "norm_out"].map((name) => norms.includes(name));
    const label = `${title} as a bus. The stream is one line; each of ${sublayers} sublayers reads ${before ? "its norm" : "it"} and adds its write. `
      + `${after ? "A norm on the line follows each add" : "No norm is on the line"}${final ? `${after ? ", and" : " but"} one at its end` : ""}.`;
    const key = `${label}${residual}${alpha}${behind}`;
    if (this.svg.dataset.of === key) return;
    set(this.svg, { "aria-label": label, data: { of: key } });
    let x = 2;
    /** @type {any[]} */
    const parts = [];
    const wire = (/** @type {number} */ by, cut = false) => parts.push(s(cut ? "path.wire.stream.cut" : "path.wire.stream", { d: `M${x},${LINE}H${(x += by)}` }));
    for (let k = 1; k <= Math.min(sublayers, MOST); k += 1) {
      const isLast = k === MOST && sublayers > MOST;
      if (isLast) parts.push(s("text.bus-name.dark", { x: (x += 22) - 11, y: LINE + 3 }, "···"));
      wire(8);
      const [read, write] = [x, x + 44];
      wire(44, !residual);
      parts.push(s("path.wire", { d: `M${read},${LINE}V${TOP}H${write}V${LINE - 7}` }),
        s("rect.sublayer", { x: read + 7, y: TOP - 12, width: 30, height: 24, rx: 5 }), s("text.bus-name.dark", { x: read + 22, y: TOP + 4 }, `f${isLast ? sublayers : k}`));
      wire(after ? 36 : 26);
      parts.push(s("circle.plus", { cx: write, cy: LINE, r: 6 }), s("path.wire", { d: `M${write - 3},${LINE}h6m-3,-3v6` }),
        ...(before ? norm(read, 43) : []), ...(behind ? norm(write, 43) : []), ...(after ? norm(write + 20, LINE) : []));
      if (alpha) parts.push(s("text.bus-name.dark", { x: read + 22, y: LINE + 14 }, "α"));
    }
    wire(final ? 26 : 8);
    if (final) parts.push(...norm(x - 14, LINE));
    parts.push(s("path.wire.stream.arrow", { d: `M${x},${LINE}H${x + 10}` }));
    this.svg.replaceChildren(...parts);
  }
}
