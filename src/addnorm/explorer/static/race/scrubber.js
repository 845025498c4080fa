// @ts-check
/**
 * The displayed step: a slider that follows the newest step until it is moved, and replays a race.
 * During a replay the address does not change; it is updated at the end.
 */

import { h, labelled, set } from "../dom.js";

const WHOLE = 10_000; // milliseconds that a race takes when it is played
const FRAME = 60;

export class Scrubber {
  /**
   * @param {(at: number, commit: boolean) => void} chosen  -1: the newest
   * @param {() => void} redraw
   */
  constructor(chosen, redraw) {
    this.chosen = chosen;
    this.redraw = redraw;
    this.newest = -1;
    this.at = -1;
    /** @type {number | null} the step while it plays */
    this.position = null;
    /** @type {ReturnType<typeof setInterval> | undefined} */
    this.timer = undefined;
    const to = () => Number(this.input.value);
    this.input = h("input", { type: "range", min: 0, max: 0, step: 1, oninput: () => this.go(to(), false), onchange: () => this.go(to(), true) });
    this.output = h("output");
    this.playing = h("button.plain.race-play", { type: "button", onclick: () => this.toggle() }, "Play");
    this.back = h("button.plain", { type: "button", "aria-label": "Previous step", onclick: () => this.go(this.step - 1, true) }, "‹");
    this.forth = h("button.plain", { type: "button", "aria-label": "Next step", onclick: () => this.go(this.step + 1, true) }, "›");
    this.follow = h("button.plain", { type: "button", onclick: () => { this.pause(); this.chosen(-1, true); } }, "Newest");
    this.element = h("div.race-scrubber", { role: "group", "aria-label": "Displayed step" },
      labelled("Step", this.input, { output: this.output }),
      h("div.race-buttons", null, this.back, this.forth, this.playing, this.follow));
  }

  /** The step that is shown; -1: there is none. */
  get step() {
    if (this.position !== null) return Math.min(this.position, this.newest);
    return this.at < 0 ? this.newest : Math.min(this.at, this.newest);
  }

  /** @param {number} step @param {boolean} commit */
  go(step, commit) {
    this.halt();
    this.chosen(Math.max(0, Math.min(step, this.newest)), commit);
  }

  /** Plays from here, from the beginning where this is the end; or stops. */
  toggle() {
    if (this.position !== null) {
      this.pause();
      return;
    }
    if (this.newest < 1) return;
    this.position = this.step >= this.newest ? 0 : this.step;
    const each = Math.max(1, Math.round(((this.newest + 1) * FRAME) / WHOLE));
    const wait = Math.max(FRAME, Math.min(250, WHOLE / (this.newest + 1)));
    this.timer = setInterval(() => {
      this.position = /** @type {number} */ (this.position) + each;
      if (this.position >= this.newest) this.pause();
      else this.redraw();
    }, wait);
    this.redraw();
  }

  /** Stays where it plays. */
  pause() {
    if (this.position === null) return;
    const { step } = this;
    this.halt();
    this.chosen(step, true);
    this.redraw();
  }

  /** Plays no more, wherever it was. */
  halt() {
    clearInterval(this.timer);
    this.position = null;
  }

  /** @param {number} newest @param {number} at  of the address @param {string} text  description of the step */
  show(newest, at, text) {
    this.newest = newest;
    this.at = at;
    const { step } = this;
    const none = newest < 0;
    set(this.input, { max: Math.max(0, newest), disabled: none, "aria-valuetext": text });
    set(this.input, { value: String(Math.max(0, step)) });
    set(this.output, { text: none ? "" : `${step} of ${newest}` });
    set(this.playing, { text: this.position === null ? "Play" : "Pause", disabled: newest < 1 });
    set(this.back, { disabled: step <= 0 });
    set(this.forth, { disabled: step >= newest });
    set(this.follow, { "aria-pressed": String(at < 0 && this.position === null), disabled: none });
  }
}
