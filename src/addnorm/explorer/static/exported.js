// @ts-check
/** What an exported page says about what it lacks. */

import { h } from "./dom.js";

/**
 * A sentence and the lines that install and start the explorer; nothing on a page with a server.
 * @param {any} meta @param {string} sentence  ends with a colon
 */
export const exportNote = (meta, sentence) => meta.export && h("div.exported", null,
  h("p", null, sentence), h("pre", { tabindex: 0 }, h("code", null, `${meta.export.install}\naddnorm explore`)));
