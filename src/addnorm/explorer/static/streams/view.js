// @ts-check
/** The view "Streams": a path from one residual stream to n streams, each step measured by the library before training. */

import { get } from "../api.js";
import { chartGrid, settled } from "../chart/figure.js";
import { HeatMap } from "../chart/heat.js";
import { LineChart } from "../chart/lines.js";
import { chooseTones } from "../chart/looks.js";
import { announce, h, set, updateChildren } from "../dom.js";
import { refresher } from "../refresh.js";
import { Controls, fields, KEYS, toParams } from "./controls.js";
import { Matrices } from "./matrices.js";
import { summaries, verdict } from "./words.js";

const REMEMBERED = 24;
const DEPTH = "depth, in sublayers";

/** @type {[string, string][]} */
const WORDS = [
  ["streams X", "n residual streams of d_model features for each token. They begin as copies of x_0."],
  ["C, read", "How much of each stream the sublayer reads: R = N(C X)."],
  ["B, write", "How much of the sublayer's output W is added to each stream."],
  ["A", "How the streams mix: the new streams are A X + B W. Row k has the weights of the old streams in the new stream k."],
  ["gain", "The largest absolute row sum of a matrix (forward), or column sum (backward): the most by which it can amplify. Forward it is that of A_l … A_1 at depth l, backward that of A_L … A_l."],
  ["direct path", "The factor with which a write reaches the output when the coefficients and norms stay as they are and no later sublayer is passed. In pre-LN it is 1."],
  ["full gradient", "The norm of the loss's gradient at a write, divided by that at the last read. It passes all later sublayers too."],
  ["perturbation", "The scale of the noise that is added to the parameters of A, B and C. At 0 they have their initial values."],
];

/** @type {Record<string, import("../chart/figure.js").Options>} */
const LINES = {
  sizes: { id: "streams-sizes", title: "Size of the streams", x: DEPTH, y: "root mean square", log: true },
  gradients: { id: "streams-gradients", title: "Gradient of the streams", x: DEPTH, y: "L2 norm", log: true },
  paths: { id: "streams-paths", title: "Direct path and full gradient", x: "x_0 and the writes, by sublayer", y: "factor, without its sign", log: true },
  gains: { id: "streams-gains", title: "Gain of the product of all A", x: DEPTH, y: "largest row or column sum", log: true },
};

/** Numbers of the sublayers at their places: there is none at x_0. @param {any[]} values */
const from = (values) => [null, ...values];

/** The lines of an equation: a definition a line, below the equation that it belongs to. @param {string} text */
function linesOf(text) {
  return text.split("\n").flatMap((line) => {
    const label = /^(?:[^=]*: +| +)?/.exec(line)?.[0] ?? "";
    return line.slice(label.length).split(/, {2,}|,$/).filter(Boolean).map((part, k) => (k ? " ".repeat(label.length) : label) + part);
  });
}

/** @param {HTMLElement} root @param {import("../app.js").App} app @returns {import("../app.js").Mounted} */
function mount(root, app) {
  const { store } = app;
  const { steps, wirings } = app.meta.streams;
  const controls = new Controls(app.meta, store);
  /** @type {any} */
  let result; // what was measured of the present state
  let shown = store.state; // the state that it is of

  // What is shown.
  const title = h("h3");
  const equation = h("p.streams-equation");
  const texts = h("div");
  const step = h("div.streams-step", { role: "group", "aria-label": "This step" }, title, equation, texts);
  const words = h("div.streams-verdict", { role: "group", "aria-label": "Summary" });
  const trouble = h("p.wrong", { role: "alert", hidden: "" });
  /** @param {number} place @param {boolean} commit */
  const point = (place, commit) => {
    moveCursors(place);
    if (commit) store.set({ sdepth: place }, { commit: false });
  };
  const lines = Object.fromEntries(Object.entries(LINES).map(([name, options]) => [name, new LineChart({ ...options, patient: true, onCursor: point })]));
  const matrices = new Matrices({ id: "streams-coefficients", title: "A, B and C of each sublayer", x: "sublayer", y: "mean over tokens", onCursor: (index, commit) => point(index + 1, commit) });
  const sources = new HeatMap({ id: "streams-sources", title: "C: what each sublayer reads", x: "sublayer, then the output", y: "weight of x_0 and each state", patient: true, onCursor: point });
  const charts = chartGrid(h("div.broad", null, matrices.element, matrices.numbers), h("div.broad.streams-map", null, sources.element), ...Object.values(lines).map((chart) => chart.element));

  root.append(
    h("h2", null, "From one residual stream to several"),
    h("p.lead.streams-lead", null, "In newer models the residual connection is three small matrices: C forms what a sublayer reads, B spreads what it writes, and A mixes the streams. "
      + "Follow the path: each step changes one thing. All steps have the same sublayers, before training."),
    h("div.streams-layout", null,
      h("div.streams-side", null, controls.path, controls.settings,
        h("p.streams-note.streams-settings", null, "Before training most wirings keep all streams identical, which hides what A, B and C do. The perturbation moves the coefficients, as training would, but at random."),
        h("details.streams-words.streams-settings", null, h("summary", null, "Terms"), h("dl", null, ...WORDS.flatMap(([word, meaning]) => [h("dt", null, word), h("dd", null, meaning)])))),
      h("div.streams-main", null, step, words, trouble, charts)));

  // What is computed.
  /** @type {Map<string, any>} */
  const remembered = new Map();

  /** @param {import("../state.js").State} state @returns {Promise<any>} */
  async function measured(state) {
    const key = JSON.stringify(toParams(state));
    if (!remembered.has(key)) remembered.set(key, await get("/api/streams", { body: toParams(state) }));
    if (remembered.size > REMEMBERED) remembered.delete(/** @type {string} */ (remembered.keys().next().value));
    return remembered.get(key);
  }

  const refresh = refresher(store, trouble, async (isOutdated) => {
    const { state } = store;
    const answer = await measured(state);
    if (!isOutdated()) draw(state, answer);
  });

  /** @param {import("../state.js").State} state @param {any} answer */
  function draw(state, answer) {
    [result, shown] = [answer, state];
    const { labels, kinds, coefficients, gains, keeps_states: keeps } = result;
    const sentences = summaries(result);
    const series = {
      sizes: keeps ? [{ name: "newest state", values: result.streams.map((/** @type {number[]} */ all) => all[all.length - 1]) }, { name: "read", values: from(result.reads.slice(0, -1)) }]
        : streamsOf(result.streams),
      gradients: keeps ? [{ name: "all states", values: result.gradient }] : streamsOf(result.gradients),
      paths: [{ name: "direct path", values: coefficients.direct_path.map(Math.abs) }, { name: "full gradient", values: result.write_gradients }],
      gains: gains ? [
        { name: "hyper-connections, forward", values: from(gains.hyper_connections.forward) },
        { name: "hyper-connections, backward", values: from(gains.hyper_connections.backward) },
        { name: "mHC, forward", values: from(gains.mhc.forward) },
        { name: "mHC, backward", values: from(gains.mhc.backward) },
      ] : [],
    };
    for (const [name, chart] of Object.entries(lines)) {
      const curves = /** @type {any} */ (series)[name];
      chart.element.hidden = !curves.length;
      const tones = chooseTones(curves.map((/** @type {any} */ curve) => curve.name));
      chart.show({ labels, kinds, series: curves.map((/** @type {any} */ curve, /** @type {number} */ k) => ({ ...curve, tone: tones[k] })), summary: sentences[name] ?? "" });
    }
    for (const [chart, hidden] of /** @type {[any, boolean][]} */ ([[matrices, keeps], [sources, !keeps]])) chart.element.hidden = chart.element.parentElement.hidden = hidden;
    if (keeps) showSources(sentences.sources);
    else matrices.show({ labels: labels.slice(1), sites: coefficients.sites, summary: sentences.coefficients });
    moveCursors(store.state.sdepth < 0 ? null : store.state.sdepth);
    showWords(state);
    root.dataset.drawn = String(Number(root.dataset.drawn ?? 0) + 1);
    settled().then(() => { root.dataset.ready = String(Number(root.dataset.ready ?? 0) + 1); });
  }

  /** A line for each stream; one that begins later has no number before. @param {number[][]} places */
  function streamsOf(places) {
    const most = Math.max(...places.map((all) => all.length));
    return Array.from({ length: most }, (_, j) => ({ name: most === 1 ? "the stream" : `stream ${j + 1}`, values: places.map((all) => all[j] ?? null) }));
  }

  /** The weights of the states: a column for each place, none at x_0, and one for the output. @param {string} summary */
  function showSources(summary) {
    const reads = [...result.coefficients.sites.map((/** @type {any} */ site) => site.collapse[0]), result.coefficients.head];
    const values = result.sources.map((/** @type {string} */ _, /** @type {number} */ j) => from(reads.map((read) => read[j] ?? null)));
    const sizes = values.flat().filter((/** @type {any} */ value) => value !== null);
    const diverging = sizes.some((/** @type {number} */ value) => value < 0 || value > 1);
    sources.show({ columns: [...result.labels, "the output"], rows: result.sources, values, summary, diverging });
  }

  /** @param {number | null} place  0 is x_0 */
  function moveCursors(place) {
    for (const chart of [...Object.values(lines), sources]) chart.cursor(place);
    matrices.cursor(place === null || place < 1 ? null : place - 1);
  }

  let announced = "";
  /** @param {import("../state.js").State} state */
  function showWords(state) {
    const sentences = verdict(result, state.moved, wirings[state.swiring].is_learned);
    updateChildren(words, sentences, () => h("p"), (line, text) => set(line, { text }));
    if (announced && announced !== sentences.join(" ")) announce(sentences.join(" "));
    announced = sentences.join(" ");
  }

  /** The text of the step, or of a wiring beside the path. @param {import("../state.js").State} state */
  function showStep(state) {
    const at = controls.at(state);
    const wiring = wirings[state.swiring];
    set(title, { text: at < 0 ? state.swiring : `${at + 1}. ${steps[at].title}` });
    updateChildren(equation, linesOf(wiring.equation), () => h("span"), (line, text) => set(line, { text }));
    const sentences = [...(at < 0 ? [] : [steps[at].change, steps[at].look]), `Use it ${wiring.use} (${wiring.source})`];
    updateChildren(texts, sentences, () => h("p"), (line, text, k) => set(line, { text, class: k === sentences.length - 1 ? "streams-note" : null }));
  }

  return {
    show(state, changed) {
      controls.show(state);
      showStep(state);
      if (result && (changed.has("sdepth") || changed.has("view"))) moveCursors(state.sdepth < 0 ? null : state.sdepth);
      if ([...changed].some((key) => key in KEYS || key === "view")) refresh();
    },
    code() {
      const { state } = store;
      const known = app.meta.streams.fields;
      const changed = Object.entries(KEYS).filter(([key, name]) => key !== "swiring" && state[key] !== known[name].default);
      const args = [JSON.stringify(state.swiring), ...changed.map(([key, name]) => `${name}=${JSON.stringify(state[key])}`)];
      return [
        "from addnorm.lab import StreamsProbe", "",
        `probe = StreamsProbe(${args.join(", ")})`,
        "print(probe.make_wiring())", "result = probe.measure()",
        'for label, streams, gradients in zip(result["labels"], result["streams"], result["gradients"]):',
        '    print(f"{label:18}", *(f"{value:10.4g}" for value in (*streams, *gradients)))',
        'for site in result["coefficients"]["sites"]:',
        '    print("A", site["mix"], "B", site["inject"], "C", site["collapse"])', "",
      ].join("\n");
    },
    data: () => ({ params: toParams(shown), measured: result }),
    key(key) {
      const step = steps[Number(key) - 1];
      if (step) store.set({ swiring: step.wiring });
      return Boolean(step);
    },
    keys: [["1 … 5", "choose the step of the path"]],
  };
}

/** @type {import("../app.js").View} */
export const view = { name: "streams", title: "Streams", fields, mount };
