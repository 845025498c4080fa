// @ts-check
/** The steps as rows, and the player that walks through them. */

import { h, updateChildren, set } from "../dom.js";
import { show, showAll } from "../numbers.js";
import { bars, drawBars, longest } from "./bars.js";
import { formula, typeset } from "./formulas.js";
import { SECTIONS } from "./trace.js";
import { HEADINGS, straight, words } from "./descriptions.js";

/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {import("./trace.js").Step} Step */

/** How long the player stays at a step, in milliseconds. */
const PACE = 1800;

/** How long after a number has changed the rows out of sight are drawn, in milliseconds: those in sight are at once. */
const DELAY = 40;

/** All rows, in three sections. */
export class Rows {
  /**
   * @param {{choose: (name: string, commit: boolean) => void, announce: (text: string) => void}} on
   */
  constructor(on) {
    this.on = on;
    this.current = "";
    /** @type {Record<string, HTMLElement>} */
    this.lists = {};
    /** @type {Map<string, string>} */
    this.before = new Map();
    /** @type {(() => void)[]} */
    this.pending = [];
    this.sight = new IntersectionObserver(
      (seen) => { for (const { target, isIntersecting } of seen) /** @type {any} */ (target).away = !isIntersecting; },
      { rootMargin: "50%" },
    );
    addEventListener("beforeprint", () => this.#drawPending());
    const sections = SECTIONS.map((section) => {
      const list = (this.lists[section] = h("ol.trace-steps", { "aria-label": `${HEADINGS[section][0]}, steps` }));
      return h(`section.trace-section.${section}`, null, h("h3", null, HEADINGS[section][0], h("small", null, HEADINGS[section][1])), list);
    });
    this.play = h("button", { type: "button", class: "main trace-play", onclick: () => this.#playing(!this.timer) }, "Play");
    this.previous = h("button.plain", { type: "button", "aria-label": "Previous step", onclick: () => this.walkTo(-1) }, "‹");
    this.following = h("button.plain", { type: "button", "aria-label": "Next step", onclick: () => this.walkTo(1) }, "›");
    this.place = h("p.trace-place");
    this.walk = h(
      "div.trace-walk",
      { role: "group", "aria-label": "Steps: left and right arrow keys go through them", tabindex: "0", onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event) },
      ...sections,
    );
    this.player = h("div.trace-player", { role: "group", "aria-label": "Step by step", onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event) }, this.previous, this.play, this.following, this.place);
    this.element = h("div.trace-walker", null, this.player, this.walk);
  }

  /**
   * @param {Trace} of @param {string} current  the name of the step that is looked at
   * @param {{flipped?: boolean}} [how]  flipped: mark what the other placement changed
   */
  show(of, current, { flipped = false } = {}) {
    const described = of.steps.map((step, k) => ({ step, place: k + 1, ...words(step.name, of) }));
    const most = longest(of, (name) => words(name, of).scale);
    const fresh = (/** @type {Step} */ step) => flipped && this.before.size > 0 && this.before.get(step.name) !== String(step.value);
    this.names = of.steps.map((step) => step.name);
    this.trace = of;
    /** @type {(() => void)[]} */
    const pending = [];
    for (const section of SECTIONS) {
      updateChildren(this.lists[section], described.filter(({ step }) => step.section === section), () => this.#row(), (row, { step, place, title, description, scale }) => {
        set(row, { class: `trace-step${straight(step.name, of) ? " straight" : ""}${fresh(step) ? " fresh" : ""}`, "data-step": step.name });
        const { number, name, description: sentence } = row.parts;
        set(number, { text: place, "aria-label": `Step ${place}, ${title}` });
        set(name, { text: title });
        set(sentence, { text: description });
        const draw = () => drawn(row, step, { scale, most: most[scale] ?? 0, digits: of.digits });
        if (row.away) pending.push(draw);
        else draw();
      });
    }
    this.before = new Map(of.steps.map((step) => [step.name, String(step.value)]));
    this.pending = pending;
    set(this.element, { "data-pending": pending.length > 0 });
    clearTimeout(this.later);
    this.later = setTimeout(() => this.#drawPending(), DELAY);
    this.#mark(current);
  }

  /** Draws the rows that are out of sight. */
  #drawPending() {
    for (const draw of this.pending) draw();
    this.pending = [];
    set(this.element, { "data-pending": false });
  }

  /** One step on, or back; from nowhere to the first. @param {number} by */
  move(by) {
    const at = this.names?.indexOf(this.current) ?? -1;
    const next = Math.min((this.names?.length ?? 1) - 1, Math.max(0, at + by));
    this.#choose(next);
  }

  /** One step on or back by hand: the player stops. @param {number} by */
  walkTo(by) {
    this.stop();
    this.move(by);
  }

  /** Stops the player. */
  stop() {
    if (this.timer) this.#playing(false);
  }

  /** @param {number} index @param {boolean} [commit] */
  #choose(index, commit = true) {
    const name = this.names?.[index];
    const step = this.trace?.steps[index];
    if (!name || !step || !this.trace) return;
    this.on.choose(name, commit);
    const value = Array.isArray(step.value) ? showAll(step.value, this.trace.digits) : show(step.value, this.trace.digits);
    const { title, description } = words(name, this.trace);
    this.on.announce(`Step ${index + 1} of ${this.names?.length}, ${title}: ${value}. ${description}${step.note ? ` ${step.note}.` : ""}`);
  }

  /** @param {boolean} on */
  #playing(on) {
    clearInterval(this.timer);
    this.timer = undefined;
    set(this.play, { text: on ? "Pause" : "Play" });
    if (!on || !this.names) return;
    const last = this.names.length - 1;
    if (this.names.indexOf(this.current) === last) this.#choose(0, false);
    else this.move(1);
    this.timer = setInterval(() => {
      const at = this.names?.indexOf(this.current) ?? last;
      this.#choose(at + 1, at + 1 >= last);
      if (at + 1 >= last) this.#playing(false);
    }, PACE);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = (this.names?.length ?? 1) - 1;
    /** @type {Record<string, () => void>} */
    const keys = {
      ArrowRight: () => this.move(1), ArrowLeft: () => this.move(-1), Home: () => this.#choose(0), End: () => this.#choose(last),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    this.stop();
    keys[event.key]();
  }

  /** Marks the row and brings it into sight if it is another. @param {string} current */
  #mark(current) {
    const rows = this.element.querySelectorAll(".trace-step");
    const moved = current !== this.current;
    this.current = current;
    for (const row of rows) {
      const here = /** @type {HTMLElement} */ (row).dataset.step === current;
      set(/** @type {HTMLElement} */ (row), { "aria-current": here ? "step" : null });
      if (here && moved) row.scrollIntoView({ block: "center", behavior: calm() ? "instant" : "smooth" });
    }
    const at = this.names?.indexOf(current) ?? -1;
    const title = this.trace && at >= 0 ? words(current, this.trace).title : "";
    set(this.place, { text: at < 0 ? `${this.names?.length} steps` : `${at + 1} of ${this.names?.length}: ${title}` });
    set(this.previous, { disabled: at === 0 });
    set(this.following, { disabled: at === (this.names?.length ?? 0) - 1 });
  }

  #row() {
    const number = h("button.trace-number", { type: "button", onclick: () => this.#choose(Number(number.textContent) - 1) });
    const name = h("h4");
    const description = h("p.trace-description");
    const note = h("p.trace-note", null, h("span"), h("span.trace-lesson"));
    const symbol = formula(".trace-symbol");
    const numbers = formula(".trace-numbers");
    const list = bars();
    const row = h(
      "li",
      null,
      h("div.trace-head", null, number, name),
      h("div.trace-text", null, description, note),
      h("div.trace-math", null, symbol, numbers),
      list,
    );
    this.sight.observe(row);
    return Object.assign(row, { parts: { number, name, description, note, symbol, numbers, list }, away: false });
  }
}

/**
 * What a row shows of its numbers.
 * @param {any} row @param {Step} step @param {{scale: any, most: number, digits: number}} how
 */
function drawn(row, step, how) {
  const { note, symbol, numbers, list } = row.parts;
  const lesson = Math.max(0, `${step.note} the lesson prints`.indexOf("the lesson prints"));
  set(note, { hidden: !step.note });
  set(note.firstChild, { text: step.note.slice(0, lesson) });
  set(note.lastChild, { text: step.note.slice(lesson) });
  typeset(symbol, step.formula ? `${step.symbol} = ${step.formula}` : step.symbol);
  set(numbers, { hidden: !step.numbers });
  if (step.numbers) typeset(numbers, `= ${step.numbers}`);
  drawBars(list, { name: step.name, value: step.value, ...how });
}

/** Whether little should move. */
const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
