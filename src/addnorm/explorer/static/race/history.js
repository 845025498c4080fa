// @ts-check
/** The events of a race: all steps of both racers, the charts' series at each step, and sentences about them. */

import { chooseTones } from "../chart/looks.js";
import { show } from "../numbers.js";

/** @typedef {import("../chart/lines.js").Series} Series */
/** @typedef {"stream" | "gradient" | "parameters" | "ratio" | "similarity"} Name  what is there by depth */

/** @type {Name[]} */
export const BY_DEPTH = ["stream", "gradient", "parameters", "ratio", "similarity"];

const SMOOTH = 5; // steps before a step, and after it, of a mean

/** From this mean cosine on tokens count as alike. */
const ALIKE = 0.99;

/** @param {number} value */
const n = (value) => show(value, 3);

/** The mean around a step, of fewer steps near an end. @param {number[]} values @param {number} k */
function average(values, k) {
  const half = Math.min(SMOOTH, k, values.length - 1 - k);
  const some = values.slice(k - half, k + half + 1).filter(Number.isFinite);
  return Number.isFinite(values[k]) ? some.reduce((sum, value) => sum + value, 0) / some.length : values[k];
}

/** @param {any[] | null | undefined} values */
const last = (values) => (values ? values[values.length - 1] : null);

/** Of the weights of a layer, attention and feed-forward. @param {(number | null)[] | null} values @param {number} layer  0, or -1 */
function ofLayer(values, layer) {
  if (!values) return NaN;
  return Math.hypot(.../** @type {number[]} */ (layer < 0 ? values.slice(-2) : values.slice(1, 3)));
}

export class History {
  /** @param {Record<string, any>} settings  the settings */
  constructor(settings) {
    this.settings = settings;
    /** @type {any[]} */
    this.events = [];
    /** @type {any} */
    this.started = null;
    /** @type {any} */
    this.ended = null;
    /** @type {any[][]} of each racer, by step */
    this.steps = [[], []];
    /** @type {Map<string, [number, number]>} of all steps: while it is scrubbed a scale stays what it is */
    this.ranges = new Map();
  }

  /** @param {any} event  of `addnorm.explorer.race` */
  add(event) {
    this.events.push(event);
    if (event.event === "start") this.started = event;
    if (event.event === "end") this.ended = event;
    if (event.event !== "step") return;
    this.steps[event.racer].push(event);
    for (const name of BY_DEPTH) this.#widen(name, event[name] ?? []);
    for (const name of ["loss", "logit_change"]) this.#widen(name, [event[name]]);
  }

  /** @param {string} name @param {(number | null)[]} values */
  #widen(name, values) {
    const range = this.ranges.get(name) ?? [Infinity, -Infinity];
    for (const value of values) {
      if (value === null || !Number.isFinite(value) || (name !== "similarity" && value <= 0)) continue;
      range[0] = Math.min(range[0], value);
      range[1] = Math.max(range[1], value);
    }
    this.ranges.set(name, range);
  }

  /** @param {string} name @returns {number[]} */
  range(name) {
    return (this.ranges.get(name) ?? []).filter(Number.isFinite);
  }

  /** Whether a racer's loss became no number, so that it stopped. @param {number} racer */
  stopped(racer) {
    const step = last(this.steps[racer]);
    return Boolean(step) && !Number.isFinite(step.loss);
  }

  /** The last step that both have taken, or the one that still runs; -1: none. */
  get newest() {
    const running = [0, 1].filter((racer) => !this.stopped(racer));
    const lengths = (running.length ? running : [0, 1]).map((racer) => this.steps[racer].length);
    return (running.length ? Math.min(...lengths) : Math.max(...lengths)) - 1;
  }

  /** Of a racer at a step; of one that stopped before, its last. @param {number} racer @param {number} step @returns {any} */
  at(racer, step) {
    return this.steps[racer][step] ?? (this.stopped(racer) ? last(this.steps[racer]) : undefined);
  }

  /** @param {number} racer @returns {string} */
  name(racer) {
    return this.started.racers[racer].name;
  }

  /** The tones of the racers. */
  get tones() {
    return chooseTones([0, 1].map((racer) => this.name(racer)));
  }

  /** The names of the places by depth, and their kinds; of wirings that have others, both. */
  get places() {
    const [left, right] = this.started.racers.map((/** @type {any} */ racer) => racer.places);
    const longer = left.length >= right.length ? left : right;
    return {
      labels: longer.map((/** @type {any} */ site, /** @type {number} */ k) => {
        const [a, b] = [left[k]?.id ?? site.id, right[k]?.id ?? site.id];
        return a === b ? a : `${a} | ${b}`;
      }),
      kinds: longer.map((/** @type {any} */ site) => site.kind),
    };
  }

  /** @param {"loss" | "logit_change"} name @returns {Series[]} */
  byStep(name) {
    return [0, 1].map((racer) => {
      const values = this.steps[racer].map((step) => step[name]);
      const smooth = name === "loss" ? values.map((_, k) => average(values, k)) : undefined;
      return { name: this.name(racer), tone: this.tones[racer], values, smooth };
    });
  }

  /** By depth. @param {Name} name @param {number} step @returns {Series[]} */
  series(name, step) {
    return [0, 1].flatMap((racer) => {
      const event = this.at(racer, step);
      if (!event?.[name]) return [];
      const over = event.step < step;
      return [{ name: this.name(racer) + (over ? `, at its last step ${event.step}` : ""), tone: this.tones[racer], values: event[name], ghost: over }];
    });
  }

  // In words.

  /** A sentence part for each racer that has numbers. @param {number} step @param {(event: any) => string} describe */
  #describeEach(step, describe) {
    const parts = [0, 1].flatMap((racer) => {
      const event = this.at(racer, step);
      return event?.stream ? [`${describe(event)} in ${this.name(racer)}`] : [];
    });
    return parts.join(", ");
  }

  /** A sentence for each chart. @param {number} step @returns {Record<string, string>} */
  summaries(step) {
    const { entropy, uniform } = this.started.text;
    return {
      loss: `Training loss of each step's batch, with a line through means of ${2 * SMOOTH + 1} steps. Guessing uniformly gives ${n(uniform)}, the frequencies of the characters give ${n(entropy)}.`,
      stream: `Its norm at the end divided by that at x_0: ${this.#describeEach(step, (f) => n(last(f.stream) / f.stream[0]))}.`,
      gradient: `Its norm at x_0 divided by that at the end: ${this.#describeEach(step, (f) => n(f.gradient[0] / last(f.gradient)))}.`,
      parameters: `The first layer's norm divided by the last layer's: ${this.#describeEach(step, (f) => n(ofLayer(f.parameters, 0) / ofLayer(f.parameters, -1)))}.`,
      ratio: `The last write's norm divided by the stream's: ${this.#describeEach(step, (f) => n(last(f.ratio)))}.`,
      logit_change: `Relative change of the logits in this step: ${this.#describeEach(step, (f) => percent(f.logit_change))}.`,
      similarity: `Mean cosine between two tokens at the end: ${this.#describeEach(step, (f) => n(last(f.similarity)))}. 1 means identical directions.`,
    };
  }

  /** Sentences about a step: the losses, and how similar the tokens are. @param {number} step @returns {string[]} */
  sentences(step) {
    const [left, right] = [0, 1].map((racer) => this.at(racer, step));
    if (!left || !right) return [];
    const parts = [0, 1].flatMap((racer) => {
      const event = this.at(racer, step);
      return this.stopped(racer) && event.step <= step && event === last(this.steps[racer])
        ? [`${this.name(racer)} has stopped: its loss at step ${event.step} is ${show(event.loss)}.`] : [];
    });
    if (!parts.length) {
      const [ahead, behind] = left.loss <= right.loss ? [0, 1] : [1, 0];
      const gap = Math.abs(left.loss - right.loss);
      parts.push(gap < 0.0005
        ? `Step ${step}: both losses are ${n(left.loss)}.`
        : `Step ${step}: ${this.name(ahead)} has a loss of ${n(Math.min(left.loss, right.loss))}, ${this.name(behind)} of ${n(Math.max(left.loss, right.loss))}.`);
    }
    const alike = [left, right].map((event) => last(event.similarity));
    const those = [0, 1].filter((racer) => alike[racer] > ALIKE);
    if (those.length) {
      parts.push(`In ${those.map((racer) => this.name(racer)).join(" and in ")} the tokens have become nearly identical (mean cosine ${those.map((racer) => show(alike[racer], 4)).join(", ")}): attention can hardly distinguish them.`);
    }
    return parts;
  }
}

/** @param {number} share */
const percent = (share) => (Number.isFinite(share) ? `${share >= 1 ? Math.round(100 * share) : show(100 * share, 2)}%` : show(share));
