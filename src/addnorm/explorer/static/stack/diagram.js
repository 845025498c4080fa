// @ts-check
/**
 * The block diagram that is the control: a sublayer, its residual connection, and the chip of the norm in one of its places.
 *
 *     x ──┬──────(α)──────⊕──[out]──► x'
 *         │               │
 *        [in]──[ f ]──[branch]
 *
 * The chip moves by drag, by a click on a place, and by the arrow keys; it is a slider over the placements.
 */

import { s, set } from "../dom.js";

const WIDTH = 320;
const HEIGHT = 262;

/** Where a norm can stand. @type {Record<string, [number, number]>} */
const NORMS = { norm_in: [62, 112], norm_branch: [212, 112], norm_out: [266, 172] };

/** Where the chip is dropped for each placement, and what is written there. @type {Record<string, {at: [number, number], label: [number, number, string]}>} */
const SLOTS = {
  post: { at: [266, 172], label: [266, 202, "post-LN"] },
  pre: { at: [62, 112], label: [30, 92, "pre-LN"] },
  sandwich: { at: [137, 56], label: [137, 24, "sandwich: both sides"] },
  reordered: { at: [212, 112], label: [250, 92, "reordered"] },
  deepnorm: { at: [137, 172], label: [137, 202, "DeepNorm: α"] },
  none: { at: [137, 236], label: [186, 240, "none"] },
};

export class Diagram {
  /**
   * @param {{name: string, title: string, equation: string, norms: string[]}[]} places
   * @param {(name: string) => void} choose
   */
  constructor(places, choose) {
    this.places = places;
    this.choose = choose;
    this.name = places[0].name;
    const wire = (/** @type {string} */ d, /** @type {string} */ more = "") => s(`path.wire${more}`, { d });
    this.skip = wire("M62,172H202");
    this.alpha = s("g.alpha", null, s("circle", { cx: 137, cy: 172, r: 13 }), s("text", { x: 137, y: 176.5, "text-anchor": "middle" }, "α"));
    this.slots = places.map((place) => {
      const { at, label } = SLOTS[place.name];
      return s("g.slot", { data: { place: place.name }, onclick: () => this.choose(place.name) },
        place.name === "sandwich" ? s("rect", { x: 88, y: 32, width: 98, height: 48, rx: 11 }) : s("rect", { x: at[0] - 29, y: at[1] - 17, width: 58, height: 34, rx: 9 }),
        s("text", { x: label[0], y: label[1], "text-anchor": "middle" }, label[2]));
    });
    // The frame is for fingers: larger than what is seen.
    const box = () => [s("rect.frame", { x: -25, y: -22, width: 50, height: 44 }), s("rect", { x: -25, y: -14, width: 50, height: 28, rx: 7 }), s("text", { y: 4.5, "text-anchor": "middle" }, "LN")];
    this.second = s("g.chip.second", { "aria-hidden": "true" }, ...box());
    this.chip = s("g.chip", {
      role: "slider", tabindex: 0, "aria-label": "Placement of the norm", "aria-valuemin": 1, "aria-valuemax": places.length, "aria-orientation": "horizontal",
    }, ...box());
    this.svg = s("svg.diagram", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": "One sublayer: the norm can be moved" },
      s("defs", null, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, s("path", { d: "M0,0.8L7,4L0,7.2z" }))),
      wire("M12,172H62"), this.skip, wire("M222,172H309", ".arrow"), wire("M62,172V56H212V162"),
      s("rect.sublayer", { x: 92, y: 36, width: 90, height: 40, rx: 8 }),
      s("text.name", { x: 137, y: 61, "text-anchor": "middle" }, "sublayer f"),
      ...this.slots,
      s("circle.plus", { cx: 212, cy: 172, r: 10 }), wire("M207,172H217M212,167V177", ".cross"),
      this.alpha,
      s("text.name", { x: 14, y: 162 }, "x"), s("text.name", { x: 303, y: 160 }, "x′"),
      this.second, this.chip);
    this.#listen();
  }

  /**
   * @param {string} name  of the placement
   * @param {{residual: boolean, alpha: boolean, kind: string, equation: string}} how
   */
  show(name, { residual, alpha, kind, equation }) {
    this.name = name;
    const at = this.places.findIndex((place) => place.name === name);
    const place = this.places[at];
    const [first, other] = place.norms.length ? place.norms.map((norm) => NORMS[norm]) : [SLOTS.none.at];
    this.#put(this.chip, first);
    this.second.toggleAttribute("hidden", !other);
    if (other) this.#put(this.second, other);
    for (const chip of [this.chip, this.second]) set(/** @type {any} */ (chip.querySelector("text")), { text: kind === "rms" ? "RMS" : "LN" });
    this.alpha.toggleAttribute("hidden", !alpha || !residual);
    set(this.skip, { class: residual ? "wire" : "wire cut" });
    set(this.chip, { "aria-valuenow": at + 1, "aria-valuetext": `${place.title}: ${equation}`, class: place.norms.length ? "chip" : "chip off" });
    for (const slot of this.slots) slot.classList.toggle("chosen", slot.dataset.place === name);
  }

  /** @param {any} chip @param {[number, number]} at */
  #put(chip, at) {
    set(chip, { transform: `translate(${at[0]},${at[1]})` });
  }

  #listen() {
    const names = this.places.map((place) => place.name);
    this.chip.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      const at = names.indexOf(this.name);
      const last = names.length - 1;
      const to = { ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1, Home: 0, End: last }[event.key];
      if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      this.choose(names[Math.max(0, Math.min(last, to))]);
    });
    /** @param {PointerEvent} event @returns {[number, number]} */
    const point = (event) => {
      const box = this.svg.getBoundingClientRect();
      return [((event.clientX - box.left) / box.width) * WIDTH, ((event.clientY - box.top) / box.height) * HEIGHT];
    };
    /** @param {[number, number]} at */
    const nearest = (at) => names.reduce((best, name) => (distance(SLOTS[name].at, at) < distance(SLOTS[best].at, at) ? name : best));
    for (const chip of [this.chip, this.second]) {
      chip.addEventListener("pointerdown", (/** @type {PointerEvent} */ event) => {
        chip.setPointerCapture(event.pointerId);
        this.svg.classList.add("dragged");
      });
      chip.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
        if (!chip.hasPointerCapture(event.pointerId)) return;
        const at = point(event);
        this.#put(chip, at);
        for (const slot of this.slots) slot.classList.toggle("near", slot.dataset.place === nearest(at));
      });
      const drop = (/** @type {PointerEvent} */ event) => {
        if (!this.svg.classList.contains("dragged")) return;
        this.svg.classList.remove("dragged");
        for (const slot of this.slots) slot.classList.remove("near");
        this.choose(event.type === "pointerup" ? nearest(point(event)) : this.name);
      };
      chip.addEventListener("pointerup", drop);
      chip.addEventListener("pointercancel", drop);
    }
  }
}

/** @param {[number, number]} a @param {[number, number]} b */
const distance = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);
