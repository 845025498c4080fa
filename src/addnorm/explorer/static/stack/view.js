// @ts-check
/** Stack: move the LayerNorm, and watch the stream and the gradients of a stack before training, computed by the library. */

import { ask, Latest } from "../api.js";
import { HeatMap } from "../chart/heat.js";
import { LineChart } from "../chart/lines.js";
import { h, join, labelled, say, set, unique } from "../dom.js";
import { decoded, show } from "../numbers.js";
import { choice, flag, number, whole } from "../state.js";
import { Diagram } from "./diagram.js";
import { summaries, verdict } from "./verdict.js";

/** Keys of the address, and what the library calls them. @type {Record<string, string>} */
const KEYS = {
  place: "placement", norm: "norm", S: "sublayers", d: "d", T: "tokens", gain: "gain", alpha: "alpha", seed: "seed", res: "residual", final: "final",
};
const PINS = 3;
const REMEMBERED = 24;
const DEBOUNCE = 30; // milliseconds, while a slider is dragged

/** @param {any} meta @returns {import("../state.js").Fields} */
function fields(meta) {
  const known = meta.stack.fields;
  /** @type {import("../state.js").Fields} */
  const found = {};
  for (const [key, name] of Object.entries(KEYS)) {
    const of = known[name];
    if (of.kind === "choice") found[key] = choice(of.initial, of.among);
    else if (of.kind === "flag") found[key] = flag(of.initial);
    else found[key] = of.step === null ? number(of.initial, of.least, of.most) : whole(of.initial, of.least, of.most, of.step);
  }
  return { ...found, depth: whole(-1, -1, 200), pins: pinsOf(found) };
}

/**
 * Settings that are pinned, in the address as place:pre,S:48;place:none
 * @param {import("../state.js").Fields} known
 * @returns {import("../state.js").Field<import("../state.js").State[]>}
 */
function pinsOf(known) {
  const initial = Object.fromEntries(Object.entries(known).map(([key, field]) => [key, field.initial]));
  return {
    initial: [],
    parse(text) {
      const parts = text.split(";").filter(Boolean);
      if (parts.length > PINS) throw new Error(`at most ${PINS} pinned settings`);
      return parts.map((part) => {
        const found = { ...initial };
        for (const pair of part.split(",")) {
          const [key, value] = pair.split(":");
          if (key === "as" && value === "first") continue;
          if (!Object.hasOwn(known, key) || value === undefined) throw new Error(`settings such as place:pre,S:48`);
          found[key] = known[key].parse(value);
        }
        return found;
      });
    },
    format: (pins) => pins.map((pin) => {
      const changed = Object.entries(known).filter(([key, field]) => field.format(pin[key]) !== field.format(field.initial));
      return changed.map(([key, field]) => `${key}:${field.format(pin[key])}`).join(",") || "as:first";
    }).join(";"),
  };
}

/** @param {import("../state.js").State} state @returns {Record<string, any>} */
const asked = (state) => Object.fromEntries(Object.entries(KEYS).map(([key, name]) => [name, state[key]]));

/** @type {{id: string, title: string, y: string, log: boolean, from?: number, stems?: boolean}[]} */
const CHARTS = [
  { id: "stream", title: "The stream", y: "length / √d, mean of the tokens", log: true },
  { id: "gradient", title: "Gradient at the stream", y: "length", log: true },
  { id: "parameters", title: "Gradient of the weights", y: "length, by sublayer", log: true, stems: true },
  { id: "ratio", title: "What a sublayer writes", y: "|write| / |stream|", log: true },
  { id: "similarity", title: "How alike the tokens are", y: "mean cosine of two tokens", log: false, from: 0 },
  { id: "cosine", title: "Where a write points", y: "cosine of write and stream", log: false, from: 0 },
];

/** @type {[string, string, string, (value: any, found: any) => string][]} key, label, hint, how its value is shown */
const SLIDERS = [
  ["S", "Sublayers", "attention and feed-forward in turn", String],
  ["d", "Width d", "features of a token", String],
  ["T", "Tokens", "of the one sequence", String],
  ["gain", "Weight gain", "weights are N(0, gain² / fan-in)", (value) => show(value, 3)],
  ["alpha", "Residual α", "factor of the residual; at the left end the wiring's own", (value, found) => (value ? show(value, 3) : `own${found && found.alpha ? `: ${show(found.alpha, 3)}` : ""}`)],
  ["seed", "Seed", "of weights, tokens and the loss's direction", String],
];

/** @param {HTMLElement} root @param {import("../app.js").App} app @returns {import("../app.js").Mounted} */
function mount(root, app) {
  const { store } = app;
  const { fields: known, places } = app.meta.stack;
  const titleOf = (/** @type {string} */ name) => places.find((/** @type {any} */ place) => place.name === name).title;
  /** @type {any} */
  let found; // what was measured of the present state
  /** @type {Map<string, any>} */
  const remembered = new Map();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let waiting;

  // The controls.
  const diagram = new Diagram(places, (name) => store.set({ place: name }));
  const group = unique("place");
  const radios = places.map((/** @type {any} */ place, /** @type {number} */ k) =>
    h("label.choice", { title: place.use }, h("input", { type: "radio", name: group, value: place.name, onchange: () => store.set({ place: place.name }) }), place.title, h("kbd", { "aria-hidden": "true" }, k + 1)));
  const sliders = SLIDERS.map(([key, label, hint, text]) => {
    const of = known[KEYS[key]];
    const input = h("input", {
      type: "range", min: of.least, max: of.most, step: of.step ?? 0.05, id: unique(key),
      oninput: () => store.set({ [key]: Number(input.value) }, { commit: false }), onchange: () => store.set({ [key]: Number(input.value) }),
    });
    const output = h("output", { for: input.id });
    return { key, input, output, text, element: labelled(label, input, { hint, output }) };
  });
  const select = (/** @type {string} */ key, /** @type {string} */ label, /** @type {[string, string][]} */ options) => {
    const input = h("select", { onchange: () => store.set({ [key]: input.value }) }, ...options.map(([value, name]) => h("option", { value }, name)));
    return { key, input, element: labelled(label, input) };
  };
  const selects = [
    select("norm", "Norm", [["layer", "LayerNorm"], ["rms", "RMSNorm"]]),
    select("final", "Final norm", [["own", "the wiring's"], ["on", "on"], ["off", "off"]]),
  ];
  const residual = h("input", { type: "checkbox", onchange: () => store.set({ res: residual.checked }) });
  const pin = h("button.plain", { type: "button", onclick: () => pinned() }, "Pin this");
  const dice = h("button.plain", { type: "button", onclick: () => store.set({ seed: Math.floor(Math.random() * (known.seed.most + 1)) }) }, "Another seed");
  const pins = h("ul.stack-pins", { "aria-label": "Pinned" });
  const equation = h("p.stack-equation");

  // What is shown.
  const words = h("div.stack-verdict", { role: "status", "aria-label": "Verdict" });
  const trouble = h("p.wrong", { role: "alert", hidden: "" });
  /** @param {number} index @param {boolean} commit */
  const point = (index, commit) => {
    for (const chart of all) chart.cursor(index);
    if (commit) store.set({ depth: index }, { commit: false });
  };
  const lines = CHARTS.map((one) => new LineChart({ ...one, x: "depth, in sublayers", onCursor: point }));
  const map = new HeatMap({ id: "map", title: "What the stream is made of", x: "depth", y: "share of each source: x_0 and every write", onCursor: point });
  const all = [...lines, map];
  const charts = h("div.charts", null, ...lines.slice(0, 4).map((chart) => chart.element), map.element, h("div.stack-pair", null, ...lines.slice(4).map((chart) => chart.element)));

  root.append(
    h("h2", null, "Move the norm, watch the stream"),
    h("div.stack-layout", null,
      h("div.stack-side", null,
        h("figure.stack-block", null, diagram.svg, h("figcaption", null, equation)),
        h("fieldset", null, h("legend", null, "Where the norm stands"), h("div.choices.stack-places", null, ...radios)),
        h("div.buttons", null, pin, dice), pins,
        h("fieldset.stack-set", null, h("legend", null, "The stack"), ...sliders.map((one) => one.element), ...selects.map((one) => one.element),
          h("label.choice", null, residual, "Residual connection")),
        h("p.stack-note", null, "The weights are the same at every place of the norm. They, x_0 and the loss's direction are those of the seed; the loss is the output along a random direction of length one.")),
      h("div.stack-main", null, words, trouble, charts)));

  // What is computed.
  /** @type {Latest<import("../state.js").State, any>} */
  const question = new Latest(async (state, signal) => decoded(await (await ask("/api/stack", { body: asked(state), signal })).json()));

  /** @param {import("../state.js").State} state */
  async function measured(state) {
    const key = JSON.stringify(asked(state));
    let answer = remembered.get(key);
    if (!answer) {
      answer = await question.ask(state);
      if (!answer) return undefined;
      remembered.set(key, answer);
      if (remembered.size > REMEMBERED) remembered.delete(/** @type {string} */ (remembered.keys().next().value));
    }
    return answer;
  }

  let turn = 0;
  /** Computes what is asked for and draws it; of what is overtaken nothing is drawn. */
  async function refresh() {
    const mine = ++turn;
    const state = store.state;
    const began = performance.now();
    try {
      const answer = await measured(state);
      if (!answer || mine !== turn) return;
      found = answer;
      draw(state, []);
      performance.measure("addnorm-stack", { start: began, detail: { dropped: question.dropped } });
      const others = [];
      for (const pin of state.pins) {
        const of = await measured(pin);
        if (!of || mine !== turn) return;
        others.push({ name: nameOf(pin, state), found: of });
      }
      if (others.length) draw(state, others);
      trouble.hidden = true;
      root.dataset.ready = String(Number(root.dataset.ready ?? 0) + 1);
    } catch (error) {
      if (mine !== turn) return;
      set(trouble, { text: /** @type {Error} */ (error).message });
      trouble.hidden = false;
    }
  }

  /** The place, and in what else it differs from the present. @param {import("../state.js").State} pin @param {import("../state.js").State} [beside] */
  function nameOf(pin, beside) {
    const differs = Object.keys(KEYS).filter((key) => key !== "place" && beside && pin[key] !== beside[key]);
    return [titleOf(pin.place), ...differs.map((key) => `${KEYS[key]} ${pin[key]}`)].join(", ");
  }

  /** @type {{name: string, found: any}[]} */
  let beside = [];
  /** @param {import("../state.js").State} state @param {{name: string, found: any}[]} others */
  function draw(state, others) {
    beside = others;
    const name = nameOf(state);
    const said = summaries(found);
    // Of a deeper ghost the charts end where the present stack does not: labels are the longer ones.
    const longest = [found, ...others.map((one) => one.found)].reduce((a, b) => (a.labels.length >= b.labels.length ? a : b));
    CHARTS.forEach(({ id }, k) => {
      /** @type {import("../chart/lines.js").Series[]} */
      const series = [{ name, values: found[id], tone: 1, band: id === "stream" && found.low[0] !== found.high[0] ? [found.low, found.high] : undefined }];
      others.forEach((one, at) => series.push({ name: one.name === name ? `${name} (pinned)` : one.name, values: one.found[id], tone: /** @type {any} */ (at + 2), ghost: true }));
      lines[k].show({ labels: longest.labels, kinds: longest.kinds, series, summary: said[id] });
    });
    map.show({ columns: found.labels, rows: found.labels, values: found.map, summary: said.map });
    for (const chart of all) if (state.depth >= 0) chart.cursor(state.depth);
    join(words, verdict(name, found, others), () => h("p"), (line, text) => set(line, { text }));
    set(equation, { text: found.equation });
    controls(state);
  }

  /** @param {import("../state.js").State} state */
  function controls(state) {
    const place = places.find((/** @type {any} */ one) => one.name === state.place);
    const alpha = Boolean(state.alpha && state.alpha !== 1) || (place.alpha && state.res);
    diagram.show(state.place, { residual: state.res, alpha, kind: state.norm, equation: place.equation });
    for (const radio of radios) set(radio.firstElementChild, { checked: radio.firstElementChild.value === state.place });
    for (const { key, input, output, text } of sliders) {
      set(input, { value: String(state[key]), "aria-valuetext": text(state[key], found) });
      set(output, { text: text(state[key], found) });
    }
    for (const { key, input } of selects) set(input, { value: state[key] });
    set(residual, { checked: state.res });
    set(pin, { disabled: state.pins.length >= PINS });
    join(pins, state.pins, () => h("li", null, h("span"), h("button.quiet", { type: "button" }, "✕")), (item, one, k) => {
      set(item.firstElementChild, { text: nameOf(/** @type {any} */ (one), state) });
      const button = item.lastElementChild;
      button.setAttribute("aria-label", `Unpin ${nameOf(/** @type {any} */ (one), state)}`);
      button.onclick = () => store.set({ pins: store.state.pins.filter((/** @type {any} */ _, /** @type {number} */ at) => at !== k) });
    });
  }

  function pinned() {
    const { state } = store;
    if (state.pins.length >= PINS) return;
    store.set({ pins: [...state.pins, Object.fromEntries(Object.keys(KEYS).map((key) => [key, state[key]]))] });
    say(`${nameOf(state)} is pinned.`);
  }

  return {
    show(state, changed) {
      controls(state);
      if (![...changed].some((key) => key in KEYS || key === "pins" || key === "view")) {
        if (changed.has("depth")) for (const chart of all) chart.cursor(state.depth < 0 ? null : state.depth);
        return;
      }
      if (changed.has("place") && changed.size === 1) say(`${titleOf(state.place)}: ${places.find((/** @type {any} */ one) => one.name === state.place).equation}`);
      clearTimeout(waiting);
      if (store.dragged === undefined) refresh();
      else waiting = setTimeout(refresh, DEBOUNCE);
    },
    code() {
      const { state } = store;
      const initial = Object.fromEntries(Object.entries(known).map(([name, of]) => [name, /** @type {any} */ (of).initial]));
      const given = [["placement", JSON.stringify(state.place)]];
      for (const [key, name] of Object.entries(KEYS)) {
        if (key === "place" || state[key] === initial[name]) continue;
        if (name === "final") given.push(["final_norm", state.final === "on" ? "True" : "False"]);
        else given.push([name, typeof state[key] === "boolean" ? (state[key] ? "True" : "False") : JSON.stringify(state[key])]);
      }
      return [
        "from addnorm.lab import Flip", "",
        `flip = Flip(${given.map(([name, value]) => `${name}=${value}`).join(", ")})`,
        "print(flip.wiring)", "found = flip.measure()",
        'for label, stream, gradient in zip(found["labels"], found["stream"], found["gradient"]):',
        '    print(f"{label:18}{stream:10.4g}{gradient:10.4g}")', "",
      ].join("\n");
    },
    data: () => ({ asked: asked(store.state), measured: found, pinned: beside }),
    key(key) {
      const place = places[Number(key) - 1];
      if (place) store.set({ place: place.name });
      else if (key === "p") pinned();
      else return false;
      return true;
    },
    keys: [["1 … 6", "the place of the norm"], ["p", "pin what is shown"], ["← →", "on the norm in the diagram: its next place"]],
  };
}

/** @type {import("../app.js").View} */
export const view = { name: "stack", title: "Stack", fields, mount };
