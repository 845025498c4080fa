// @ts-check
/** Server-sent events of a streamed response, wherever its chunks are cut. */

import { Trouble } from "../api.js";
import { decoded } from "../numbers.js";

/**
 * Yields the events, each the JSON of its `data:` lines. An unfinished event is dropped.
 * Abort the request to stop: the generator then throws the AbortError. A broken connection throws Trouble.
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
    reader.cancel().catch(() => {}); // the server stops the race
  }
}
