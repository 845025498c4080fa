// @ts-check
/** Server-sent events out of a response that is still coming, wherever its pieces are cut: in a line, or in a character. */

import { Trouble } from "../api.js";
import { decoded } from "../numbers.js";

/**
 * The events as they come, each the JSON of its `data:` lines. What the server began and did not end is no event.
 * To stop, abort the request that the response belongs to: then this throws the AbortError. A connection that breaks is a Trouble.
 * @param {Response} response
 * @returns {AsyncGenerator<any, void, undefined>}
 */
export async function* events(response) {
  if (!response.body) return;
  const reader = response.body.getReader();
  const text = new TextDecoder();
  let line = "";
  /** @type {string[]} */
  let data = [];
  let ended = false; // the last character was \r: a \n after it belongs to it
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Trouble("The connection to the server broke. Is `addnorm explore` still running in its terminal?");
      });
      const piece = done ? text.decode() : text.decode(value, { stream: true });
      for (const part of piece.split(/(\r|\n)/)) {
        if (part === "\n" && ended) {
          ended = false;
        } else if (part === "\n" || part === "\r") {
          ended = part === "\r";
          if (line === "" && data.length) {
            yield decoded(JSON.parse(data.join("\n")));
            data = [];
          } else if (line.startsWith("data:")) {
            data.push(line.slice(line[5] === " " ? 6 : 5));
          }
          line = "";
        } else if (part) {
          ended = false;
          line += part;
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // nobody listens any more: the server stops
  }
}
