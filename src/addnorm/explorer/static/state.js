// @ts-check
/**
 * The state of the page: one flat record, the same in the address (#v=1&view=stack&place=pre) and in memory.
 *
 * Every key has a field that says what it may be. What an address has besides is told to the reader and dropped, what is out
 * of bounds is brought back into them: no address breaks the page.
 */

export const VERSION = "1";

/**
 * @template T
 * @typedef {object} Field
 * @property {T} initial  what is not in the address
 * @property {(text: string) => T} parse  throws an Error whose message ends the sentence "place is 'x', expected ..."
 * @property {(value: T) => string} format
 */

/** @typedef {Record<string, Field<any>>} Fields */
/** @typedef {Record<string, any>} State */

/** One of a few words. @param {string} initial @param {readonly string[]} among @returns {Field<string>} */
export const choice = (initial, among) => ({
  initial,
  parse(text) {
    if (!among.includes(text)) throw new Error(`one of ${among.join(", ")}`);
    return text;
  },
  format: String,
});

/**
 * A number within bounds.
 * @param {number} initial @param {number} least @param {number} most @param {{whole?: boolean, step?: number}} [kind]
 * @returns {Field<number> & {least: number, most: number, step?: number}}
 */
export const number = (initial, least, most, { whole = false, step } = {}) => ({
  initial,
  least,
  most,
  step,
  parse(text) {
    const value = Number(text.replace("\u2212", "-"));
    const expected = `a ${whole ? "whole " : ""}number from ${least} to ${most}`;
    if (text.trim() === "" || Number.isNaN(value)) throw new Error(expected);
    let found = Math.min(most, Math.max(least, value));
    if (step) found = Math.min(most, least + Math.round((found - least) / step) * step);
    else if (whole) found = Math.round(found);
    if (found !== value) throw Object.assign(new Error(`${expected}${step ? ` in steps of ${step}` : ""}`), { instead: found });
    return found;
  },
  format: String,
});

/** A whole number within bounds. @param {number} initial @param {number} least @param {number} most @param {number} [step] */
export const whole = (initial, least, most, step) => number(initial, least, most, { whole: true, step });

/** Yes or no, 1 or 0 in the address. @param {boolean} initial @returns {Field<boolean>} */
export const flag = (initial) => ({
  initial,
  parse(text) {
    if (text !== "0" && text !== "1") throw new Error("0 or 1");
    return text === "1";
  },
  format: (value) => (value ? "1" : "0"),
});

/** Text, so many characters at most. @param {string} initial @param {number} most @returns {Field<string>} */
export const text = (initial, most) => ({
  initial,
  parse(given) {
    if (given.length > most) throw new Error(`at most ${most} characters`);
    return given;
  },
  format: String,
});

/**
 * The state of an address, and a sentence for each thing in it that could not be taken.
 * @param {string} fragment  with or without #
 * @param {Fields} fields
 * @returns {{state: State, notices: string[]}}
 */
export function parse(fragment, fields) {
  /** @type {State} */
  const state = Object.fromEntries(Object.entries(fields).map(([key, field]) => [key, field.initial]));
  /** @type {string[]} */
  const notices = [];
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const version = given.get("v");
  if (version !== null && version !== VERSION) {
    notices.push(`The address is of version ${short(version)}, expected ${VERSION}: what this page knows of it was taken.`);
  }
  const seen = new Set(["v"]);
  for (const [key, value] of given) {
    if (seen.has(key)) {
      if (key !== "v") notices.push(`${short(key)} came more than once in the address: the first was taken.`);
      continue;
    }
    seen.add(key);
    const field = Object.hasOwn(fields, key) ? fields[key] : undefined;
    if (!field) {
      notices.push(`${short(key)} in the address is unknown here, and was left out.`);
      continue;
    }
    try {
      state[key] = field.parse(value);
    } catch (error) {
      const instead = /** @type {any} */ (error).instead ?? field.initial;
      state[key] = instead;
      const taken = field.format(instead);
      notices.push(`${key} is ${short(value)} in the address, expected ${/** @type {Error} */ (error).message}: ${taken || "nothing"} was taken.`);
    }
  }
  return { state, notices };
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

/** The state in memory, the address kept in step; who subscribes is told of every change. */
export class Store {
  /** @param {Fields} fields @param {(notices: string[]) => void} tell */
  constructor(fields, tell) {
    this.fields = fields;
    this.tell = tell;
    /** @type {Set<(state: State, changed: Set<string>) => void>} */
    this.listeners = new Set();
    const { state, notices } = parse(location.hash, fields);
    this.state = state;
    this.tell(notices);
    // A bad address is left as it is until something is chosen, so that what was wrong with it can be read.
    for (const event of ["popstate", "hashchange"]) window.addEventListener(event, () => this.read());
  }

  /** Takes over the address, after Back, Forward, or an edit of it. */
  read() {
    if (location.hash === this.written) return;
    const { state, notices } = parse(location.hash, this.fields);
    this.written = location.hash;
    this.tell(notices);
    this.#become(state);
  }

  /**
   * Changes some of it.
   * @param {State} some
   * @param {{commit?: boolean}} [how]  commit: Back comes back to what was before; not while a slider is dragged
   */
  set(some, { commit = true } = {}) {
    const before = format(this.state, this.fields);
    const state = { ...this.state, ...some };
    const address = format(state, this.fields);
    if (address !== before || (commit && this.dragged)) {
      // While a slider is dragged the address follows in place; its end is one step of Back's, from where the drag began.
      if (!commit && this.dragged === undefined) this.dragged = before;
      if (commit && this.dragged !== undefined) history.replaceState(null, "", this.dragged);
      if (commit) history.pushState(null, "", address);
      else history.replaceState(null, "", address);
      if (commit) this.dragged = undefined;
      this.written = address;
    }
    this.#become(state);
  }

  /** @param {(state: State, changed: Set<string>) => void} listener */
  subscribe(listener) {
    this.listeners.add(listener);
  }

  /** @param {State} state */
  #become(state) {
    const changed = new Set(Object.keys(state).filter((key) => this.fields[key].format(state[key]) !== this.fields[key].format(this.state[key])));
    this.state = state;
    if (changed.size) for (const listener of this.listeners) listener(state, changed);
  }
}
