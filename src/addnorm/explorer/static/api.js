// @ts-check
/** Requests to the server, with JSON, or to the files of an exported page. A newer request of a kind cancels the older one. */

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
export async function get(path, how = {}) {
  const isExported = "export" in document.documentElement.dataset;
  return decoded(isExported ? await readExport(path, how.body) : await (await ask(path, how)).json());
}

// The files of an exported page are scripts that call addnormExport: a page of file:// can load nothing else.

/** Their contents, or what is loaded. @type {Map<string, Promise<any>>} */
const files = new Map();
/** @type {Map<string, (content: any) => void>} */
const loading = new Map();
/** @type {any} */ (globalThis).addnormExport = (/** @type {string} */ name, /** @type {any} */ content) => loading.get(name)?.(content);

/** @param {string} name @returns {Promise<any>} */
function load(name) {
  const known = files.get(name);
  if (known) return known;
  const file = new Promise((resolve, reject) => {
    const script = document.createElement("script");
    const ended = () => { loading.delete(name); script.remove(); };
    loading.set(name, resolve);
    script.src = `data/${name}.js`;
    script.addEventListener("load", ended);
    script.addEventListener("error", () => {
      ended();
      files.delete(name);
      reject(new Trouble(`The file data/${name}.js of this exported page cannot be loaded: try again, or export the page again.`));
    });
    document.head.append(script);
  });
  files.set(name, file);
  return file;
}

/** What the server would answer, from the files. @param {string} path @param {any} body @returns {Promise<any>} */
async function readExport(path, body) {
  const kind = path.split("/")[2];
  const meta = await load("meta");
  if (kind === "meta") return structuredClone(meta);
  return structuredClone(kind === "recording" ? await readRecording(meta, body) : await readSetting(meta[kind], kind, body));
}

/** @param {any} described  the parameters of the view @param {string} view @param {any} body */
async function readSetting({ fields, files: inName }, view, body) {
  const { places, answers, shared } = await load([view, ...inName.map((/** @type {string} */ name) => body[name])].join("-"));
  let place = 0; // of the setting in the file: see Grid.each_setting
  for (const [name, { values }] of /** @type {[string, any][]} */ (Object.entries(fields))) {
    if (!inName.includes(name)) place = place * values.length + values.indexOf(body[name]);
  }
  const answer = { ...shared, ...answers[places[place]] };
  const padded = (/** @type {number[]} */ row) => [...Array(answer.labels.length - row.length).fill(null), ...row];
  return answer.map ? { ...answer, map: answer.map.map(padded) } : answer;
}

/** @param {any} meta @param {any} body */
async function readRecording(meta, { recording, stream, step, what = "", depth = -1 }) {
  const { streams } = meta.recordings[recording];
  stream ??= streams[0];
  if (!streams.includes(stream)) throw new Trouble(`stream is '${stream}', expected one of ${streams.join(", ")}.`);
  const { base, steps, series, meanings } = await load(`recording-${recording}-${streams.indexOf(stream)}`);
  step ??= base.step;
  if (!steps.includes(step)) throw new Trouble(`step is ${step}, which this exported page does not have.`);
  const at = (/** @type {number} */ place) => series.map((/** @type {any} */ one) => one[what]?.[place] ?? null);
  const isRecorded = (/** @type {number} */ place) => at(place).some((/** @type {any} */ value) => value !== null);
  // Where the asked place has no value, the last one that has is answered, as by the server.
  const place = [depth, ...[...base.sites.keys()].reverse()].find(isRecorded);
  const values = place === undefined ? [] : at(place);
  const present = steps.filter((/** @type {number} */ _, /** @type {number} */ k) => values[k] !== null);
  const time = { depth: place, what, meaning: meanings[what], steps: present, values: values.filter((/** @type {any} */ value) => value !== null), count: present.length };
  return { ...base, step, last: step === base.step, series: series[steps.indexOf(step)], time: place === undefined ? null : time };
}

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
