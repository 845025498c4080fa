// @ts-check
/**
 * The state of the page: one flat record, the same in the address (#v=1&view=stack&place=pre) and in memory.
 *
 * Every key has a field with its default and its bounds. Unknown keys of an address are reported and dropped, values out of
 * bounds are clamped: no address breaks the page.
 */

export const VERSION = "1";
const RUN_MS = 1000; // milliseconds between two changes of a run
const MAX_NOTICES = 8; // sentences about an address

/**
 * @template T
 * @typedef {object} Field
 * @property {T} initial  what is not in the address
 * @property {(text: string) => T} parse  throws an Error whose message ends the sentence "place is 'x', expected ..."
 * @property {(value: T) => string} format
 */

/** @typedef {Record<string, Field<any>>} Fields */
/** @typedef {Record<string, any>} State */

/** One of a few words. @param {string} initial @param {readonly string[]} choices @returns {Field<string>} */
export const choice = (initial, choices) => ({
  initial,
  parse(text) {
    if (!choices.includes(text)) throw new Error(`one of ${choices.join(", ")}`);
    return text;
  },
  format: String,
});

/**
 * A number within bounds.
 * @param {number} initial @param {number} minimum @param {number} maximum @param {{whole?: boolean, step?: number}} [kind]
 * @returns {Field<number> & {minimum: number, maximum: number, step?: number}}
 */
export const number = (initial, minimum, maximum, { whole = false, step } = {}) => ({
  initial,
  minimum,
  maximum,
  step,
  parse(text) {
    const value = Number(text.replace("\u2212", "-"));
    const expected = `a ${whole ? "whole " : ""}number from ${minimum} to ${maximum}`;
    if (text.trim() === "" || Number.isNaN(value)) throw new Error(expected);
    let nearest = Math.min(maximum, Math.max(minimum, value));
    if (step) nearest = Math.min(maximum, minimum + Math.round((nearest - minimum) / step) * step);
    else if (whole) nearest = Math.round(nearest);
    if (nearest !== value) throw Object.assign(new Error(`${expected}${step ? ` in steps of ${step}` : ""}`), { instead: nearest });
    return nearest;
  },
  format: String,
});

/** A whole number within bounds. @param {number} initial @param {number} minimum @param {number} maximum @param {number} [step] */
export const whole = (initial, minimum, maximum, step) => number(initial, minimum, maximum, { whole: true, step });

/**
 * One of a few numbers, of which the nearest is taken.
 * @param {number} initial @param {readonly number[]} values  in order
 * @returns {Field<number> & {minimum: number, maximum: number}}
 */
export const listed = (initial, values) => ({
  initial,
  minimum: values[0],
  maximum: values[values.length - 1],
  parse(text) {
    const value = Number(text.replace("\u2212", "-"));
    if (values.includes(value)) return value;
    const instead = Number.isNaN(value) ? initial : values.reduce((best, one) => (Math.abs(one - value) < Math.abs(best - value) ? one : best));
    throw Object.assign(new Error(`${values.join(" or ")} in this exported page`), { instead });
  },
  format: String,
});

/** Yes or no, 1 or 0 in the address. @param {boolean} initial @returns {Field<boolean>} */
export const flag = (initial) => ({
  initial,
  parse(text) {
    if (text !== "0" && text !== "1") throw new Error("0 or 1");
    return text === "1";
  },
  format: (value) => (value ? "1" : "0"),
});

/** The field of a parameter, of which an exported page has some values. @param {any} described  by the server @returns {Field<any>} */
export function fieldOf({ kind, default: initial, minimum, maximum, step, choices, values }) {
  if (kind === "choice") return choice(initial, choices);
  if (kind === "flag") return flag(initial);
  if (values) return listed(initial, values);
  return step === null ? number(initial, minimum, maximum) : whole(initial, minimum, maximum, step);
}

/** Text, so many characters at maximum. @param {string} initial @param {number} maximum @returns {Field<string>} */
export const text = (initial, maximum) => ({
  initial,
  parse(value) {
    if (value.length > maximum) throw new Error(`at most ${maximum} characters`);
    return value;
  },
  format: String,
});

/**
 * The state of an address, and a sentence for each thing in it that could not be used.
 * @param {string} fragment  with or without #
 * @param {Fields} fields
 * @returns {{state: State, notices: string[]}}
 */
export function parse(fragment, fields) {
  /** @type {State} */
  const state = Object.fromEntries(Object.entries(fields).map(([key, field]) => [key, field.initial]));
  /** @type {string[]} */
  const notices = [];
  const params = new URLSearchParams(fragment.replace(/^#/, ""));
  const version = params.get("v");
  if (version !== null && version !== VERSION) {
    notices.push(`The address has version ${short(version)}, expected ${VERSION}: known settings were used.`);
  }
  const seen = new Set(["v"]);
  for (const [key, value] of params) {
    if (seen.has(key)) {
      if (key !== "v") notices.push(`${short(key)} occurs more than once in the address: the first value was used.`);
      continue;
    }
    seen.add(key);
    const field = Object.hasOwn(fields, key) ? fields[key] : undefined;
    if (!field) {
      notices.push(`${short(key)} in the address is unknown and was ignored.`);
      continue;
    }
    try {
      state[key] = field.parse(value);
    } catch (error) {
      const instead = /** @type {any} */ (error).instead ?? field.initial;
      state[key] = instead;
      const used = field.format(instead);
      notices.push(`${key} is ${short(value)} in the address, expected ${/** @type {Error} */ (error).message}: ${used || "the default"} was used.`);
    }
  }
  const more = notices.length - MAX_NOTICES;
  return { state, notices: more > 0 ? [...notices.slice(0, MAX_NOTICES), `And ${more} more.`] : notices };
}

/** The address of a state; what is as at first is left out. @param {State} state @param {Fields} fields */
export function format(state, fields) {
  const parts = new URLSearchParams({ v: VERSION });
  for (const [key, field] of Object.entries(fields)) {
    const value = field.format(state[key]);
    if (value !== field.format(field.initial)) parts.set(key, value);
  }
  return `#${parts.toString().replaceAll("%2C", ",").replaceAll("%3A", ":").replaceAll("%3B", ";")}`;
}

/** @param {string} value */
const short = (value) => `'${value.length > 40 ? `${value.slice(0, 40)}…` : value}'`;

/** The state in memory and in the address. Subscribers are called after every change. */
export class Store {
  /** @param {Fields} fields @param {(notices: string[]) => void} onNotices */
  constructor(fields, onNotices) {
    this.fields = fields;
    this.onNotices = onNotices;
    /** @type {Set<(state: State, changed: Set<string>) => void>} */
    this.listeners = new Set();
    const { state, notices } = parse(location.hash, fields);
    this.state = state;
    /** @type {string | undefined} */
    this.written = undefined; // the address that is known
    /** @type {{keys: string, from: string} | undefined} */
    this.dragged = undefined; // what is dragged, and the address where that began
    /** @type {{keys: string, at: number} | undefined} */
    this.last = undefined; // step of Back's
    this.onNotices(notices);
    // A bad address is left as it is until something is chosen, so that what was wrong with it can be read.
    for (const event of ["popstate", "hashchange"]) window.addEventListener(event, () => this.read());
  }

  /** Takes over the address, after Back, Forward, or an edit of it. */
  read() {
    if (location.hash === this.written) return;
    const { state, notices } = parse(location.hash, this.fields);
    this.written = location.hash;
    this.dragged = this.last = undefined;
    this.onNotices(notices);
    this.#apply(state);
  }

  /**
   * Changes some of it.
   *
   * While something is dragged the address follows in place; the end of the drag, which changes the same keys, is one step of
   * Back's, from where it began. So is a run of keys on a slider: numbers that change again within a second.
   * @param {State} some
   * @param {{commit?: boolean}} [how]  commit: Back comes back to what was before; not while a slider is dragged
   */
  set(some, { commit = true } = {}) {
    const keys = Object.keys(some).join();
    const before = format(this.state, this.fields);
    const state = { ...this.state, ...some };
    const address = format(state, this.fields);
    if (this.dragged?.keys !== keys) this.dragged = undefined; // it has no end: what it left in the address stays there
    const from = this.dragged?.from ?? before;
    if (!commit) {
      if (address !== before) {
        this.dragged ??= { keys, from };
        history.replaceState(null, "", address);
      }
    } else if (address !== from && this.#continuesRun(keys)) {
      history.replaceState(null, "", address);
    } else {
      if (from !== before) history.replaceState(null, "", from);
      if (address !== from) history.pushState(null, "", address);
    }
    if (commit) {
      if (address !== from) this.last = { keys, at: performance.now() };
      this.dragged = undefined;
    }
    if (address !== before) this.written = location.hash;
    this.#apply(state);
  }

  /** Whether the last step changed the same numbers a moment ago. @param {string} keys */
  #continuesRun(keys) {
    const quick = this.last?.keys === keys && performance.now() - this.last.at < RUN_MS;
    return quick && keys.split(",").every((key) => "minimum" in this.fields[key]);
  }

  /** @param {(state: State, changed: Set<string>) => void} listener */
  subscribe(listener) {
    this.listeners.add(listener);
  }

  /** @param {State} state */
  #apply(state) {
    const changed = new Set(Object.keys(state).filter((key) => this.fields[key].format(state[key]) !== this.fields[key].format(this.state[key])));
    this.state = state;
    if (changed.size) for (const listener of this.listeners) listener(state, changed);
  }
}
