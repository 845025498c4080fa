// @ts-check
/** Requests to the server, with JSON. A newer request of a kind cancels the older one. */

import { decoded } from "./numbers.js";

/** Name of this page: the server computes one request of each client at a time. */
const CLIENT = crypto.randomUUID?.() ?? String(Math.random());

/** An error with a sentence for the reader. */
export class Trouble extends Error {}

/**
 * @param {string} path
 * @param {{body?: any, signal?: AbortSignal}} [how]  with a body it is a POST
 * @returns {Promise<Response>}
 */
export async function ask(path, { body, signal } = {}) {
  /** @type {Response} */
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: { "Addnorm-Client": CLIENT, ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Trouble("The server does not answer. Is `addnorm explore` still running in its terminal?");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    throw Object.assign(new Trouble(body.error ?? `The server returned status ${response.status}.`), { status: response.status });
  }
  return response;
}

/** @param {string} path @param {{body?: any, signal?: AbortSignal}} [how] @returns {Promise<any>} */
export const get = async (path, how) => decoded(await (await ask(path, how)).json());

/**
 * Requests of one kind, of which only the newest is answered.
 * @template Q, A
 */
export class Latest {
  /** @param {(question: Q, signal: AbortSignal) => Promise<A>} put */
  constructor(put) {
    this.put = put;
    this.dropped = 0;
  }

  /**
   * @param {Q} question
   * @returns {Promise<A | undefined>}  undefined where a newer request came meanwhile
   */
  async ask(question) {
    this.controller?.abort();
    const controller = (this.controller = new AbortController());
    try {
      const answer = await this.put(question, controller.signal);
      if (controller === this.controller) return answer;
    } catch (error) {
      if (controller === this.controller) throw error;
    }
    this.dropped += 1;
    return undefined;
  }
}
