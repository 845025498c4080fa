// @ts-check
/** A loop that draws the newest state of a view, without a queue of the states between. */

import { set } from "./dom.js";

/**
 * A function that draws the present state. Calls during a drawing start one more after it, of the state at that time.
 * @param {import("./state.js").Store} store
 * @param {HTMLElement} trouble  shows the sentence of an error; it is hidden after a drawing without one
 * @param {(isOutdated: () => boolean) => Promise<void>} draw  may end early when what it draws is outdated: under the hand
 *   something moves at once, else the last state alone is drawn
 */
export function refresher(store, trouble, draw) {
  let busy = false;
  let again = false;
  return async function refresh() {
    again = busy;
    if (busy) return;
    busy = true;
    do {
      again = false;
      try {
        await draw(() => again && store.dragged === undefined);
        trouble.hidden = true;
      } catch (error) {
        set(trouble, { text: /** @type {Error} */ (error).message });
        trouble.hidden = false;
      }
      // Sentences and charts of an earlier state are dimmed together.
      trouble.parentElement?.classList.toggle("stale", !trouble.hidden);
    } while (again);
    busy = false;
  };
}
