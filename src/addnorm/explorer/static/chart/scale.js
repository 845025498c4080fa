// @ts-check
/** From values to places: linear and logarithmic scales with round ends, so that the same data always gives the same drawing. */

/**
 * @typedef {object} Scale
 * @property {[number, number]} domain
 * @property {(value: number) => number} place  0 at the lower end, 1 at the upper; beyond where the value is
 * @property {number[]} ticks
 */

const ROUND = [1, 2, 5, 10];

/** Of so many places, each how manieth is named where there is room for so many names. @param {number} count @param {number} room */
export function every(count, room) {
  const least = Math.max(1, Math.ceil((count - 1) / Math.max(1, Math.floor(room))));
  return [1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 100, 200, 250, 500, 1000].find((step) => step >= least) ?? least;
}

/** The least round number from a value on, or the greatest up to it. @param {number} value @param {boolean} up */
function round(value, up) {
  const power = 10 ** Math.floor(Math.log10(value));
  const steps = ROUND.map((step) => step * power);
  const slack = 1 + 1e-9;
  return up ? /** @type {number} */ (steps.find((step) => step * slack >= value)) : steps.filter((step) => step <= value * slack).pop() ?? power;
}

/** The finite values, for a logarithm the positive ones. @param {Iterable<number | null>} values @param {boolean} log */
function ends(values, log) {
  let least = Infinity;
  let most = -Infinity;
  for (const value of values) {
    if (value === null || !Number.isFinite(value) || (log && value <= 0)) continue;
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return least <= most ? [least, most] : null;
}

/**
 * @param {Iterable<number | null>} values
 * @param {{log?: boolean, from?: number, room?: number}} [how]  from: a value that must be on it; room: so many ticks at most
 * @returns {Scale}
 */
export function scaleOf(values, { log = false, from, room = 6 } = {}) {
  const range = ends(values, log) ?? (log ? [0.1, 1] : [0, 1]);
  let [least, most] = from === undefined ? range : [Math.min(range[0], from), Math.max(range[1], from)];
  return log ? logarithmic(least, most, room) : linear(least, most, room);
}

/** @param {number} least @param {number} most @param {number} room @returns {Scale} */
function logarithmic(least, most, room) {
  const low = round(Math.max(least, 1e-300), false);
  let high = round(Math.min(most, 1e300), true);
  if (high <= low) high = low * 10;
  const [start, span] = [Math.log10(low), Math.log10(high / low)];
  const every = Math.max(1, Math.ceil(span / room));
  /** @param {number[]} steps of each power of ten that is drawn */
  const ticksOf = (steps) => {
    const ticks = [];
    for (let power = Math.floor(start); power <= Math.ceil(start + span); power += 1) {
      if (power % every) continue;
      for (const step of steps) {
        const tick = step * 10 ** power;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    return ticks;
  };
  // 1, 2, 5 where there is room for them: a single tick gives no scale.
  const close = every === 1 ? ticksOf([1, 2, 5]) : [];
  const ticks = close.length && close.length <= room + 2 ? close : ticksOf([1]);
  return { domain: [low, high], place: (value) => (Math.log10(value) - start) / span, ticks };
}

/** @param {number} least @param {number} most @param {number} room @returns {Scale} */
function linear(least, most, room) {
  if (least === most) [least, most] = least === 0 ? [0, 1] : [Math.min(least, 0), Math.max(most, 0)];
  const step = round((most - least) / room, true);
  const [low, high] = [Math.floor(least / step + 1e-9) * step, Math.ceil(most / step - 1e-9) * step];
  const count = Math.round((high - low) / step);
  const ticks = Array.from({ length: count + 1 }, (_, k) => Number((low + k * step).toPrecision(12)));
  return { domain: [low, high], place: (value) => (value - low) / (high - low), ticks };
}
