// @ts-check
/** Numbers as text, as Python's library shows them; and as they come from it, since JSON has no inf and nan. */

/**
 * To so many significant digits, as the library does: rounded half to even, without trailing zeros, in powers of ten as 1e-5.
 * @param {number} value
 * @param {number} [digits]
 * @returns {string}
 */
export function show(value, digits = 5) {
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (value === 0) return "0";
  const [mantissa, exponent] = scientific(value, digits).split("e");
  const power = Number(exponent);
  if (power < -4 || power >= digits) {
    return `${trimmed(mantissa)}e${power}`;
  }
  return trimmed(shifted(mantissa, power));
}

/** The mantissa with its point moved: its digits are right already, and no number is rounded twice. @param {string} mantissa @param {number} power */
function shifted(mantissa, power) {
  const sign = mantissa.startsWith("-") ? "-" : "";
  const figures = mantissa.replace(/[-.]/g, "");
  if (power < 0) return `${sign}0.${"0".repeat(-power - 1)}${figures}`;
  return `${sign}${figures.slice(0, power + 1)}.${figures.slice(power + 1)}`;
}

/** A vector, both ends of a long one. @param {number[]} values @param {number} [digits] */
export function showAll(values, digits = 5) {
  const shown = (values.length <= 12 ? values : [...values.slice(0, 4), values[values.length - 1]]).map((v) => show(v, digits));
  if (values.length <= 12) return `[${shown.join(", ")}]`;
  return `[${shown.slice(0, 4).join(", ")}, …, ${shown[4]}] (${values.length} numbers)`;
}

/** Digits and exponent; JavaScript rounds a tie away from zero, Python to the even digit. @param {number} value @param {number} digits */
function scientific(value, digits) {
  const up = value.toExponential(digits - 1);
  if (!/5e/.test(value.toExponential(digits))) return up; // one digit more would be a 5 if it were a tie
  const exact = value.toExponential(100);
  const [mantissa] = exact.split("e");
  const rest = mantissa.replace(/[-.]/g, "").slice(digits);
  if (!/^50*$/.test(rest)) return up;
  const last = Number(mantissa.replace(/[-.]/g, "")[digits - 1]);
  if (last % 2) return up;
  const [, exponent] = exact.split("e");
  return `${mantissa.slice(0, mantissa.length - rest.length).replace(/\.$/, "")}e${exponent}`;
}

/** @param {string} text */
const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0*$/, "") : text);

const WORDS = new Map([["NaN", NaN], ["Infinity", Infinity], ["-Infinity", -Infinity]]);

/**
 * What the server sent, with the words for numbers that JSON lacks as numbers again. Changes it in place.
 * @param {any} value
 * @returns {any}
 */
export function decoded(value) {
  if (typeof value === "string") return WORDS.has(value) ? WORDS.get(value) : value;
  if (value && typeof value === "object") for (const key of Object.keys(value)) value[key] = decoded(value[key]);
  return value;
}

/** What decoded understands. @param {any} value @returns {any} */
export function encoded(value) {
  if (typeof value === "number" && !Number.isFinite(value)) return String(value);
  if (Array.isArray(value)) return value.map(encoded);
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, of]) => [key, encoded(of)]));
  return value;
}
