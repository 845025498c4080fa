// @ts-check
/** Parsing of numbers and vectors, with the errors of Python's `_number` and `_vector` in calculation.py. */

import { show } from "../numbers.js";

const FLOAT = /^[+-]?(\d+(_\d+)*\.?(\d+(_\d+)*)?|\.\d+(_\d+)*)(e[+-]?\d+(_\d+)*)?$/i;
const WORDS = /^([+-]?)(inf|infinity|nan)$/i;

/**
 * A text as Python's float() reads it: no hexadecimals, and nothing is not 0.
 * @param {string} text
 * @returns {number | undefined}
 */
export function float(text) {
  const bare = text.trim();
  if (FLOAT.test(bare)) return Number(bare.replaceAll("_", ""));
  const [, sign, word] = WORDS.exec(bare) ?? [];
  if (word === undefined) return undefined;
  return word.toLowerCase() === "nan" ? NaN : sign === "-" ? -Infinity : Infinity;
}

/**
 * The entries of a vector as it is typed: with commas or spaces, with or without brackets; the comma of a number to come is nothing.
 * @param {string} text
 * @returns {string[]}
 */
export function entries(text) {
  let bare = text.trim().replaceAll("\u2212", "-");
  if (["[]", "()"].includes(bare.slice(0, 1) + bare.slice(-1))) bare = bare.slice(1, -1).trim();
  bare = bare.replace(/\s*,$/, "");
  return bare ? bare.split(/\s*,\s*|\s+/) : [];
}

/** Python's repr, to so many characters. @param {any} value @param {number} [most] */
export function repr(value, most = Infinity) {
  const text = typeof value === "string" ? quoted(value) : value == null ? "None" : String(value);
  return [...text].slice(0, most).join("");
}

/** @param {string} text */
function quoted(text) {
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const escapes = new Map([["\\", "\\\\"], ["\n", "\\n"], ["\r", "\\r"], ["\t", "\\t"], [quote, `\\${quote}`]]);
  return quote + [...text].map((character) => escapes.get(character) ?? character).join("") + quote;
}

/** @param {string} name @param {any} value @returns {number} */
export function number(name, value) {
  const parsed = typeof value === "string" ? float(value) : typeof value === "number" ? value : undefined;
  if (parsed === undefined) throw new Error(`${name} is ${repr(value, 60)}, expected a number: write it with digits, as in 1.5.`);
  if (!Number.isFinite(parsed)) {
    throw new Error(`${name} is ${show(parsed)}, expected a finite number.`);
  }
  return parsed;
}

/**
 * @param {string} name
 * @param {any} values  numbers, or texts of numbers
 * @param {number} [d]  how many there must be
 * @param {{scalar?: boolean}} [how]  scalar: one number stands for all
 * @returns {number[]}
 */
export function vector(name, values, d, { scalar = false } = {}) {
  const remedy = "pass a list of numbers, such as [1.5, -1, 4.5]";
  if (typeof values === "string") throw new Error(`${name} is the text ${repr(values, 60)}, expected numbers: ${remedy}.`);
  if (!Array.isArray(values)) {
    if (scalar && d !== undefined) return new Array(d).fill(number(name, values));
    throw new Error(`${name} is ${repr(values, 60)}, expected a vector: ${remedy}.`);
  }
  if (!values.length) throw new Error(`${name} is empty, expected at least one number: ${remedy}.`);
  const numbers = values.map((value, k) => number(`${name}[${k}]`, value));
  if (d !== undefined && numbers.length !== d) {
    const why = name === "sublayer" ? "they are added element by element" : "each feature has its own";
    const count = numbers.length === 1 ? "1 number" : `${numbers.length} numbers`;
    throw new Error(`${name} has ${count}, expected ${d}, the length of x: ${why}, so give both the same length.`);
  }
  return numbers;
}
