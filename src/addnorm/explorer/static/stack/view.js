// @ts-check
/** The view "Stack": a stack before training, measured by the library each time its LayerNorm moves. */

import { get } from "../api.js";
import { chartGrid, settled } from "../chart/figure.js";
import { HeatMap } from "../chart/heat.js";
import { LineChart } from "../chart/lines.js";
import { chooseTones } from "../chart/looks.js";
import { h, updateChildren, labelled, announce, set, unique } from "../dom.js";
import { exportNote } from "../exported.js";
import { show } from "../numbers.js";
import { refresher } from "../refresh.js";
import { Slider } from "../slider.js";
import { fieldOf, whole } from "../state.js";
import { Bus } from "./bus.js";
import { Diagram } from "./diagram.js";
import { spread, summaries, verdict } from "./verdict.js";

/** Keys of the address, and what the library calls them. @type {Record<string, string>} */
const KEYS = {
  place: "placement", norm: "norm", S: "sublayers", d: "d_model", T: "tokens", gain: "gain", alpha: "alpha", seed: "seed", res: "residual", final: "final",
};
const PINS = 3;
const SEEDS = 8; // of which a survey is made
const REMEMBERED = 24;

/** @param {any} meta @returns {import("../state.js").Fields} */
function fields(meta) {
  const known = meta.stack.fields;
  /** @type {import("../state.js").Fields} */
  const result = {};
  for (const [key, name] of Object.entries(KEYS)) {
    result[key] = fieldOf(known[name]);
  }
  return { ...result, depth: whole(-1, -1, 200), pins: pinsOf(result) };
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
        const result = { ...initial };
        for (const pair of part.split(",")) {
          const [key, value] = pair.split(":");
          if (key === "as" && value === "first") continue;
          if (!Object.hasOwn(known, key) || value === undefined) throw new Error(`settings such as place:pre,S:48`);
          try {
            result[key] = known[key].parse(value);
          } catch (error) {
            throw new Error(`${key} to be ${/** @type {Error} */ (error).message}`);
          }
        }
        return result;
      }).filter((pin, at, all) => all.findIndex((other) => same(pin, other)) === at);
    },
    format: (pins) => pins.map((pin) => {
      const changed = Object.entries(known).filter(([key, field]) => field.format(pin[key]) !== field.format(field.initial));
      return changed.map(([key, field]) => `${key}:${field.format(pin[key])}`).join(",") || "as:first";
    }).join(";"),
  };
}

/** Whether two states ask for the same stack. @param {import("../state.js").State} a @param {import("../state.js").State} b */
const same = (a, b) => Object.keys(KEYS).every((key) => a[key] === b[key]);

/** @param {import("../state.js").State} state @returns {Record<string, any>} */
const toParams = (state) => Object.fromEntries(Object.entries(KEYS).map(([key, name]) => [name, state[key]]));

/** @type {{id: string, title: string, y: string, log: boolean, from?: number, stems?: boolean}[]} */
const CHARTS = [
  { id: "stream", title: "Residual stream", y: "L2 norm / √d, mean over tokens", log: true },
  { id: "gradient", title: "Gradient of the stream", y: "L2 norm", log: true },
  { id: "parameters", title: "Gradient of the weights", y: "L2 norm, by sublayer", log: true, stems: true },
  { id: "ratio", title: "Write / stream", y: "|write| / |stream|", log: true },
  { id: "similarity", title: "Token similarity", y: "mean cosine between two tokens", log: false, from: 0 },
  { id: "cosine", title: "Direction of the writes", y: "cosine between write and stream", log: false, from: 0 },
];

/** Key, label, and how its value is shown. @type {[string, string, (value: any, result: any, state: import("../state.js").State) => string][]} */
const SLIDERS = [
  ["S", "Sublayers", String],
  ["d", "d_model", String],
  ["T", "Tokens", String],
  ["gain", "Weight gain", (value) => show(value, 3)],
  ["alpha", "Residual α", (value, result, { res }) => (!res ? "cut" : value ? show(value, 3) : `own${result && result.alpha ? `: ${show(result.alpha, 3)}` : ""}`)],
  ["seed", "Seed", String],
];

/** Names of settings that differ from the present ones. @type {Record<string, (value: any) => string>} */
const DIFFERS = {
  norm: (value) => (value === "rms" ? "RMSNorm" : "LayerNorm"),
  S: (value) => `${value} sublayers`,
  d: (value) => `d ${value}`,
  T: (value) => (value === 1 ? "1 token" : `${value} tokens`),
  gain: (value) => `gain ${show(value, 3)}`,
  alpha: (value) => (value ? `α ${show(value, 3)}` : "the wiring's α"),
  seed: (value) => `seed ${value}`,
  res: (value) => (value ? "with the residual" : "without the residual"),
  final: (value) => (value === "own" ? "the wiring's final norm" : value === "on" ? "with a final norm" : "without a final norm"),
};

/** @type {[string, string][]} */
const WORDS = [
  ["stream", "The residual stream x, which every sublayer reads and adds to: d_model numbers for each token. x_0 is the input, here random."],
  ["sublayer", "Attention or feed-forward, in turn. Two sublayers are a layer."],
  ["write", "What a sublayer adds to the stream. The line past the sublayer is the residual connection."],
  ["N, LN", "The norm: LayerNorm gives a token mean 0 and L2 norm √d; RMSNorm gives it L2 norm √d."],
  ["L2 norm", "√(x₁² + … + x_d²). That of the stream is divided by √d: 1 for a token that was just normalized."],
  ["gradient", "The gradient of the loss with respect to the stream or the weights. The loss is each token's output along a random direction of L2 norm 1."],
  ["cosine", "1: same direction, 0: orthogonal, -1: opposite."],
  ["gain", "Weights are drawn from N(0, gain² / fan-in)."],
  ["α", "The factor of x at the add: 1, in DeepNorm (2L)^(1/4) for L layers. DeepNorm also scales its weights by β = (8L)^(-1/4), except queries and keys."],
];

/** @param {HTMLElement} root @param {import("../app.js").App} app @returns {import("../app.js").Mounted} */
function mount(root, app) {
  const { store } = app;
  const { fields: known, placements: places } = app.meta.stack;
  const titleOf = (/** @type {string} */ name) => places.find((/** @type {any} */ place) => place.name === name).title;
  /** @type {any} */
  let result; // what was measured of the present state
  let shown = store.state; // the state that it is of
  /** @type {{name: string, result: any} | null} */
  let earlier = null; // what a flip of the norm has replaced
  let surveyed = { of: "", text: "" }; // several seeds of one setting

  // The controls.
  const bus = new Bus();
  const diagram = new Diagram(places, (name) => store.set({ place: name }));
  const group = unique("place");
  const radios = places.map((/** @type {any} */ place, /** @type {number} */ k) =>
    h("label.choice", null, h("input", { type: "radio", name: group, value: place.name, onchange: () => store.set({ place: place.name }) }), place.title, h("kbd", { "aria-hidden": "true" }, k + 1)));
  const sliders = SLIDERS.map(([key, label, text]) => ({ key, text, slider: new Slider(store, key, known[KEYS[key]], label) }));
  const select = (/** @type {string} */ key, /** @type {string} */ label, /** @type {[string, string][]} */ options) => {
    const input = h("select", { onchange: () => store.set({ [key]: input.value }) }, ...options.map(([value, name]) => h("option", { value }, name)));
    return { key, input, element: labelled(label, input) };
  };
  const selects = [
    select("norm", "Norm", [["layer", "LayerNorm"], ["rms", "RMSNorm"]]),
    select("final", "Final norm", [["own", "as in the wiring"], ["on", "on"], ["off", "off"]]),
  ];
  const residual = h("input", { type: "checkbox", onchange: () => store.set({ res: residual.checked }) });
  const pin = h("button.plain", { type: "button", onclick: () => pinned() }, "Pin");
  const anotherSeed = () => {
    const { values, maximum } = known.seed;
    return values ? values[(values.indexOf(store.state.seed) + 1) % values.length] : Math.floor(Math.random() * (maximum + 1));
  };
  const dice = h("button.plain", { type: "button", onclick: () => store.set({ seed: anotherSeed() }) }, "Another seed");
  const survey = h("button.plain", { type: "button", onclick: () => measureSeeds() }, `${SEEDS} seeds`);
  survey.hidden = known.seed.values?.length < SEEDS;
  const use = h("p.stack-note.stack-use");
  const pins = h("ul.stack-pins", { "aria-label": "Pinned" });
  const equation = h("p.stack-equation");

  // What is shown.
  const words = h("div.stack-verdict", { role: "group", "aria-label": "Summary" });
  const trouble = h("p.wrong", { role: "alert", hidden: "" });
  /** @param {number} index @param {boolean} commit */
  const point = (index, commit) => {
    for (const chart of all) chart.cursor(index);
    if (commit) store.set({ depth: index }, { commit: false });
  };
  const lines = CHARTS.map((chart) => new LineChart({ ...chart, x: "depth, in sublayers", patient: true, onCursor: point }));
  const map = new HeatMap({ id: "map", title: "Sources of the stream", x: "depth", y: "share of each source: x_0 and the writes", patient: true, onCursor: point });
  const all = [...lines, map];
  const charts = chartGrid(...lines.slice(0, 4).map((chart) => chart.element), map.element, h("div.stack-pair", null, ...lines.slice(4).map((chart) => chart.element)));

  root.append(
    h("h2", null, "Move the LayerNorm of a stack"),
    h("p.lead.stack-lead", null, "A transformer stack before training. Drag the LayerNorm (LN), click a placement, or use the arrow keys. The charts show the residual stream by depth, and its gradient. ",
      h("button.link", { type: "button", onclick: () => store.set({ view: "streams" }) }, "Next: several streams"), "."),
    h("div.stack-layout", null,
      h("div.stack-side", null,
        h("figure.stack-block", null, diagram.svg, h("figcaption", null, equation)),
        h("fieldset", null, h("legend", null, "Placement of the norm"), h("div.choices.stack-places", null, ...radios)),
        h("figure.stack-bus", null, bus.svg, h("figcaption.stack-note", null, "The whole stack: the stream is one line, which all sublayers read and write.")),
        use, h("div.buttons.stack-buttons", null, pin, dice, survey), pins,
        h("fieldset.stack-settings", null, h("legend", null, "The stack"), ...sliders.map(({ slider }) => slider.element), ...selects.map((control) => control.element),
          h("label.choice", null, residual, "Residual connection"), exportNote(app.meta, "This exported page has some of the settings, measured beforehand. All others are measured on your machine:")),
        h("details.stack-words.stack-settings", null, h("summary", null, "Terms"), h("dl", null, ...WORDS.flatMap(([word, meaning]) => [h("dt", null, word), h("dd", null, meaning)]))),
        h("p.stack-note.stack-settings", null, "One seed gives the same weights for every placement (DeepNorm scales them by its β), the same x_0 and the same loss. Results differ between seeds: try several.")),
      h("div.stack-main", null, words, trouble, charts)));

  // What is computed.
  /** @type {Map<string, any>} */
  const remembered = new Map(); // the last used are at its end
  let line = Promise.resolve(); // one question after the other: the server would drop the older

  /** @param {import("../state.js").State} state @returns {any} */
  function recalled(state) {
    const key = JSON.stringify(toParams(state));
    const answer = remembered.get(key);
    if (answer && remembered.delete(key)) remembered.set(key, answer);
    return answer;
  }

  /** @param {import("../state.js").State} state @returns {Promise<any>} */
  async function measured(state) {
    const known = recalled(state);
    if (known) return known;
    const answer = line.then(() => recalled(state) ?? get("/api/stack", { body: toParams(state) }));
    line = answer.catch(() => {});
    remembered.set(JSON.stringify(toParams(state)), await answer);
    if (remembered.size > REMEMBERED) remembered.delete(/** @type {string} */ (remembered.keys().next().value));
    return answer;
  }

  const refresh = refresher(store, trouble, async (isOutdated) => {
    const { state } = store;
    const began = performance.now();
    const answer = await measured(state);
    if (isOutdated()) return;
    const isFlip = result && state.place !== shown.place && same({ ...shown, place: state.place }, state);
    earlier = isFlip ? { name: titleOf(shown.place), result } : same(shown, state) ? earlier : null;
    result = answer;
    shown = state;
    /** @type {{name: string, result: any}[]} */
    const others = [];
    for (const pin of state.pins) {
      // What is pinned is there, as a rule; while it is not, the present does not wait for it.
      if (!recalled(pin)) draw(state, [...others]);
      others.push({ name: nameOf(pin, state), result: await measured(pin) });
      if (isOutdated()) return;
    }
    draw(state, others);
    performance.measure("addnorm-stack", { start: began });
    const count = (/** @type {string} */ name) => { root.dataset[name] = String(Number(root.dataset[name] ?? 0) + 1); };
    count("drawn"); // what is in sight
    settled().then(() => count("ready")); // and the rest
  });

  /** What is surveyed: all of the state but the seed. @param {import("../state.js").State} state */
  const setting = (state) => JSON.stringify(toParams({ ...state, seed: 0 }));

  /** Measures several seeds of what is shown, and says how far apart they are. */
  async function measureSeeds() {
    const { state } = store;
    const of = setting(state);
    const results = [];
    try {
      for (let seed = 0; seed < SEEDS; seed += 1) {
        if (setting(store.state) !== of) return;
        surveyed = { of, text: `Seed ${seed + 1} of ${SEEDS} …` };
        if (result) showVerdict(shown);
        results.push(await measured({ ...state, seed }));
      }
      surveyed = { of, text: spread(results) };
      showVerdict(shown);
      announce(surveyed.text);
    } catch (error) {
      surveyed = { of: "", text: "" };
      set(trouble, { text: /** @type {Error} */ (error).message });
      trouble.hidden = false;
    }
  }

  /** The place, and in what else it differs from the present. @param {import("../state.js").State} pin @param {import("../state.js").State} [reference] */
  function nameOf(pin, reference) {
    const differs = Object.keys(KEYS).filter((key) => key !== "place" && reference && pin[key] !== reference[key]);
    return [titleOf(pin.place), ...differs.map((key) => DIFFERS[key](pin[key]))].join(", ");
  }

  /** @type {{name: string, result: any}[]} */
  let pinnedResults = [];
  let announced = ""; // of the verdict
  /** @param {import("../state.js").State} state @param {{name: string, result: any}[]} others */
  function draw(state, others) {
    pinnedResults = others;
    const name = nameOf(state);
    const texts = summaries(result);
    // Of a deeper ghost the charts end where the present stack does not: labels are the longer ones.
    const longest = [result, ...others.map((other) => other.result)].reduce((a, b) => (a.labels.length >= b.labels.length ? a : b));
    const tones = chooseTones([name, ...others.map((other) => other.name)]);
    CHARTS.forEach(({ id }, k) => {
      /** @type {import("../chart/lines.js").Series[]} */
      const series = [{ name, values: result[id], tone: tones[0], band: id === "stream" && result.low[0] !== result.high[0] ? [result.low, result.high] : undefined }];
      others.forEach((other, at) => series.push({ name: other.name === name ? `${name} (pinned)` : other.name, values: other.result[id], tone: tones[at + 1], ghost: true }));
      lines[k].show({ labels: longest.labels, kinds: longest.kinds, series, summary: texts[id], earlier: others.length || !earlier ? undefined : { name: earlier.name, values: earlier.result[id] } });
    });
    map.show({ columns: result.labels, rows: result.labels, values: result.map, summary: texts.map });
    if (store.state.depth >= 0) moveCursors(); // now there are as many places as the new stack has
    showVerdict(state);
    set(equation, { text: result.equation });
    controls(state);
  }

  /** Moves the cursors of all charts to the depth of the state, or removes them. */
  function moveCursors() {
    const { depth } = store.state;
    for (const chart of all) chart.cursor(depth < 0 ? null : depth);
  }

  /** The verdict, and of the survey what is of this setting. @param {import("../state.js").State} state */
  function showVerdict(state) {
    const sentences = verdict(nameOf(state), result, pinnedResults);
    updateChildren(words, [...sentences, ...(surveyed.of === setting(state) ? [surveyed.text] : [])], () => h("p"), (line, text) => set(line, { text }));
    if (sentences[0] !== announced) announce(sentences.join(" "));
    announced = sentences[0];
  }

  /** @param {import("../state.js").State} state */
  function controls(state) {
    const place = places.find((/** @type {any} */ placement) => placement.name === state.place);
    const alpha = Boolean(state.alpha && state.alpha !== 1) || (place.alpha && state.res);
    diagram.show(state.place, { residual: state.res, alpha, kind: state.norm, equation: place.equation });
    bus.show(place, { sublayers: state.S, residual: state.res, alpha, final: state.final === "own" ? place.final : state.final === "on" });
    for (const radio of radios) set(radio.firstElementChild, { checked: radio.firstElementChild.value === state.place });
    for (const { key, slider, text } of sliders) slider.show(state[key], text(state[key], result, state));
    for (const { key, input } of selects) set(input, { value: state[key] });
    set(residual, { checked: state.res });
    set(pin, { disabled: state.pins.length >= PINS || pinnedAlready(state) });
    set(use, { text: `Use it ${place.use} (${place.source})` });
    updateChildren(pins, state.pins, () => h("li", null, h("span"), h("button.quiet", { type: "button" }, "✕")), (item, pin, k) => {
      set(item.firstElementChild, { text: nameOf(/** @type {any} */ (pin), state) });
      const button = item.lastElementChild;
      button.setAttribute("aria-label", `Unpin ${nameOf(/** @type {any} */ (pin), state)}`);
      button.onclick = () => store.set({ pins: store.state.pins.filter((/** @type {any} */ _, /** @type {number} */ at) => at !== k) });
    });
  }

  /** @param {import("../state.js").State} state */
  const pinnedAlready = (state) => state.pins.some((/** @type {import("../state.js").State} */ pin) => same(pin, state));

  function pinned() {
    const { state } = store;
    if (state.pins.length >= PINS || pinnedAlready(state)) return;
    store.set({ pins: [...state.pins, Object.fromEntries(Object.keys(KEYS).map((key) => [key, state[key]]))] });
    announce(`${nameOf(state)} is pinned.`);
  }

  return {
    show(state, changed) {
      controls(state);
      if (changed.has("depth") || changed.has("view")) moveCursors();
      if ([...changed].some((key) => key in KEYS || key === "pins" || key === "view")) refresh();
    },
    code() {
      const { state } = store;
      const initial = Object.fromEntries(Object.entries(known).map(([name, of]) => [name, /** @type {any} */ (of).default]));
      const args = [["placement", JSON.stringify(state.place)]];
      for (const [key, name] of Object.entries(KEYS)) {
        if (key === "place" || state[key] === initial[name]) continue;
        if (name === "final") args.push(["final_norm", state.final === "on" ? "True" : "False"]);
        else args.push([name, typeof state[key] === "boolean" ? (state[key] ? "True" : "False") : JSON.stringify(state[key])]);
      }
      return [
        "from addnorm.lab import InitProbe", "",
        `probe = InitProbe(${args.map(([name, value]) => `${name}=${value}`).join(", ")})`,
        "print(probe.wiring)", "result = probe.measure()",
        'for label, stream, gradient in zip(result["labels"], result["stream"], result["gradient"]):',
        '    print(f"{label:18}{stream:10.4g}{gradient:10.4g}")', "",
      ].join("\n");
    },
    data: () => ({ params: toParams(shown), measured: result, pinned: pinnedResults }),
    key(key) {
      const place = places[Number(key) - 1];
      if (place) store.set({ place: place.name });
      else if (key === "p") pinned();
      else return false;
      return true;
    },
    keys: [["1 … 6", "choose the placement of the norm"], ["p", "pin the present stack"], ["← →", "on the norm in the diagram: move it to the next placement"]],
  };
}

/** @type {import("../app.js").View} */
export const view = { name: "stack", title: "Stack", fields, mount };
