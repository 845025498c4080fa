// @ts-check
/** The view "Recording": a file of `addnorm record`, by depth, over the steps, and as a balance sheet. */

import { get, Latest, Trouble } from "../api.js";
import { chartGrid } from "../chart/figure.js";
import { HeatMap } from "../chart/heat.js";
import { LineChart } from "../chart/lines.js";
import { h, updateChildren, labelled, set } from "../dom.js";
import { choice, text, whole } from "../state.js";
import { Badges } from "./badges.js";
import { Balance, percent } from "./balance.js";
import { code } from "./code.js";
import { PANELS, logarithmic, sentence, there } from "./panels.js";

const WHAT = PANELS.flatMap((panel) => panel.lines);
const LAST = -1; // step: the last one; depth: none is chosen
const FAR = 1e15;
const COMMANDS = "addnorm record minilm --out minilm.json\naddnorm explore minilm.json";

/** @param {any} meta */
const files = (meta) => /** @type {{name: string, path: string, model: string, streams: string[], steps: number[], count: number}[]} */ (meta.recordings ?? []);

export const view = {
  name: "recording",
  title: "Recording",
  /** @param {any} meta */
  fields: (meta) => ({
    rec: whole(0, 0, Math.max(0, files(meta).length - 1)),
    rstep: whole(LAST, LAST, FAR),
    rstream: text("", 200),
    rdepth: whole(LAST, LAST, 1e6),
    rwhat: choice("out.rms", WHAT.map(([name]) => name)),
    rwith: choice("none", ["none", "first", ...files(meta).map((_, k) => String(k))]),
  }),
  /** @param {HTMLElement} root @param {any} app */
  mount: (root, app) => (files(app.meta).length ? mounted(root, app) : invitation(root)),
};

/** Without a file: how one is made. @param {HTMLElement} root */
function invitation(root) {
  root.append(
    h("div.recording-none", null,
      h("h2", null, "Recordings of your models"),
      h("p.lead", null, "A recording has statistics of every sublayer of a model: the residual stream, what each sublayer writes to it, "
        + "the gradients, and each source's share of the stream at its end. Record a model and open the file here:"),
      h("pre", { tabindex: 0 }, h("code", null, COMMANDS)),
      h("p.lead", null, "In your own training loop use ", h("code", null, "with addnorm.record(model) as rec:"), " and then ", h("code", null, 'rec.save("run.json")'), ".")),
  );
  return { show() {}, code: () => COMMANDS.split("\n").map((line) => `# ${line}`).join("\n"), data: () => null };
}

/** @param {HTMLElement} root @param {any} app */
function mounted(root, app) {
  const { store } = app;
  const all = files(app.meta);
  /** @type {any} */
  let answer = null;
  /** @type {any} */
  let other = null;

  // Controls.
  const titleOf = (/** @type {{name: string, model: string}} */ { name, model }) => (model ? `${name} (${model})` : name);
  const option = (/** @type {string} */ value, /** @type {string} */ name) => h("option", { value }, name);
  const file = h("select", { onchange: () => store.set({ rec: Number(file.value), rstep: LAST, rstream: "", rdepth: LAST }) },
    ...all.map((recording, k) => option(String(k), titleOf(recording))));
  const stream = h("select", { onchange: () => store.set({ rstream: stream.value, rdepth: LAST }) });
  const step = h("input", { type: "range", min: 0, step: 1, oninput: () => slid(false), onchange: () => slid(true) });
  const stepNow = h("output");
  const against = h("select", { onchange: () => store.set({ rwith: against.value }) });
  const fields = { file: labelled("Recording", file), stream: labelled("Stream", stream), step: labelled("Step", step, { output: stepNow }), against: labelled("Compare", against) };
  const slid = (/** @type {boolean} */ commit) => {
    const { steps } = all[store.state.rec];
    const at = Number(step.value);
    store.set({ rstep: at >= steps.length - 1 ? LAST : steps[at] }, { commit });
  };

  // What is shown.
  const wrong = h("p.wrong", { role: "alert", hidden: true });
  const badges = new Badges();
  const onCursor = (/** @type {number} */ index, /** @type {boolean} */ commit) => {
    point(index);
    if (commit) store.set({ rdepth: index });
  };
  const x = "depth in sublayers";
  const charts = PANELS.map((panel) => ({ panel, chart: new LineChart({ id: `recording-${panel.id}`, title: panel.title, x, y: panel.y, stems: panel.stems, onCursor }) }));
  const map = new HeatMap({
    id: "recording-map", title: "Sources of the stream", x, y: "share of each source; a column sums to 1",
    onCursor: (index, commit) => onCursor(answer?.map?.places[index] ?? index, commit),
  });
  const quiet = h("p.recording-quiet");
  const what = h("select", { onchange: () => store.set({ rwhat: what.value }) }, ...WHAT.map(([name, title]) => option(name, `${PANELS.find((panel) => panel.lines.some(([line]) => line === name))?.title}: ${title}`)));
  const time = new LineChart({ id: "recording-time", title: "Over the steps", x: "step", y: "", onCursor: (index, commit) => {
    if (commit && answer?.time) store.set({ rstep: answer.time.steps[index] === lastStep() ? LAST : answer.time.steps[index] });
  } });
  const timeBox = h("section.recording-time", { hidden: true }, labelled("Statistic", what), time.element);
  const balance = new Balance();
  const facts = h("dl.recording-facts");
  const results = h("div.recording-results", { hidden: true },
    badges.element,
    chartGrid(...charts.map(({ chart }) => chart.element)),
    quiet, timeBox, h("div.recording-made", null, map.element, balance.element),
    h("details.recording-how", null, h("summary", null, "Metadata"), facts));
  root.append(h("h2", null, all.length === 1 ? `A recording: ${titleOf(all[0])}` : "A recording of a model"), h("div.recording-controls", null, ...Object.values(fields)), wrong, results);

  const lastStep = () => all[answer.number].steps[all[answer.number].steps.length - 1];

  /** The linked cursor. @param {number | null} index */
  function point(index) {
    for (const { chart } of charts) chart.cursor(index);
    map.cursor(index === null || !answer?.map || index > answer.map.places[answer.map.places.length - 1] ? null : nearest(answer.map.places, index));
  }

  /** The number of the place that is nearest. @param {number[]} places @param {number} index */
  const nearest = (places, index) => places.reduce((best, place, k) => (Math.abs(place - index) < Math.abs(places[best] - index) ? k : best), 0);

  // One after the other: of a page the server keeps one question waiting, and a newer one would take its place.
  const newest = new Latest(async (/** @type {any[]} */ questions, signal) => {
    const answers = [];
    for (const question of questions) answers.push(await get("/api/recording", { body: question, signal }));
    return answers;
  });

  /** What a state can be compared with: its first or last step, and the other files. @param {any} state @returns {[string, string][]} */
  function comparisons({ rec }) {
    const several = all[rec].count > 1;
    const first = several ? [["first", `its first step, ${all[rec].steps[0]}`]] : [];
    const others = all.map((recording, k) => [String(k), k === rec ? "its last step" : `${recording.name}, last step`]);
    return /** @type {[string, string][]} */ ([["none", "nothing"], ...first, ...others.filter((_, k) => k !== rec || several)]);
  }

  /** @param {any} state */
  const compared = (state) => (comparisons(state).some(([value]) => value === state.rwith) ? state.rwith : "none");

  /** What to ask for a state: the recording, and what it is compared with. @param {any} state */
  function toRequests(state) {
    const stream = state.rstream ? { stream: state.rstream } : {};
    const step = state.rstep === LAST ? {} : { step: state.rstep };
    const depth = state.rdepth === LAST ? {} : { depth: state.rdepth };
    const time = all[state.rec].count > 1 ? { what: state.rwhat, ...depth } : {};
    const own = { recording: state.rec, ...stream, ...step, ...time };
    const chosen = compared(state);
    if (chosen === "none") return [own];
    return [own, chosen === "first" ? { recording: state.rec, ...stream, step: all[state.rec].steps[0] } : { recording: Number(chosen), ...stream }];
  }

  /**
   * Asks for a state and draws it. Steps and streams that a recording does not have are reported and replaced by the defaults.
   * @param {any} state @param {string} [refused]  what was wrong with the state of the address
   */
  async function load(state, refused = "") {
    try {
      const requests = toRequests(state);
      const answers = await newest.ask(requests);
      if (!answers) return;
      [answer, other] = [answers[0], answers[1] ?? null];
      set(wrong, { hidden: !refused, text: refused });
      draw();
      root.dataset.ready = String(Number(root.dataset.ready ?? 0) + 1);
    } catch (error) {
      if (!(error instanceof Trouble)) throw error;
      if (state.rstep !== LAST || state.rstream) {
        const instead = { ...state, rstep: LAST, rstream: "" };
        controls(instead);
        await load(instead, `${error.message} The last step of the first stream is shown.`);
        return;
      }
      results.hidden = true;
      set(wrong, { text: error.message });
      wrong.hidden = false;
    }
  }

  let timed = "";

  /** The chosen statistic over the steps, at the chosen depth: drawn again where these are others, not at every step. */
  function drawTime() {
    timeBox.hidden = all[answer.number].count < 2;
    if (timeBox.hidden) return;
    const of = [answer.number, answer.stream, store.state.rwhat, answer.time?.depth].join(" ");
    if (of !== timed) drawCurve();
    timed = of;
    const at = answer.time ? answer.time.steps.indexOf(answer.step) : -1;
    time.cursor(at < 0 ? null : at);
  }

  function drawCurve() {
    const { steps = [], values = [], meaning, depth, count } = answer.time ?? {};
    const [name, title] = /** @type {[string, string]} */ (WHAT.find(([quantity]) => quantity === store.state.rwhat));
    const panel = /** @type {import("./panels.js").Panel} */ (PANELS.find(({ lines }) => lines.some(([line]) => line === name)));
    const labels = steps.map((/** @type {number} */ step) => `step ${step}`);
    const counted = steps.every((/** @type {number} */ step, /** @type {number} */ k) => step === k);
    const log = logarithmic(panel, values);
    Object.assign(time.options, { x: counted ? "step" : "recorded steps, counted from 0", y: panel.y, log, from: log ? undefined : 0 });
    if (!answer.time) {
      time.show({ labels: [], series: [], summary: "Not recorded for this stream." });
      return;
    }
    const { label } = answer.sites[depth];
    const line = { name: `${title}, ${label}`, values, tone: /** @type {1} */ (1) };
    const bound = steps.length < count ? ` ${steps.length} of its ${count} steps are drawn.` : "";
    time.show({ labels, series: [line], summary: `${label}: ${meaning}. ${sentence([line], labels)}${bound}` });
  }

  function draw() {
    results.hidden = false;
    const labels = answer.sites.map((/** @type {any} */ site) => site.label);
    const kinds = answer.sites.map((/** @type {any} */ site) => site.kind);
    const ids = (/** @type {any} */ recording) => recording.sites.map((/** @type {any} */ site) => site.id).join("\n");
    const alike = other !== null && ids(other) === ids(answer);
    const notes = other !== null && !alike ? [`${all[other.number].name} has other sublayers and is not drawn`] : [];
    badges.show(answer.badges);
    /** @type {string[]} */
    const missing = [];
    for (const { panel, chart } of charts) {
      const lines = panel.lines.map(([name, title]) => ({ name: title, values: answer.series[name], of: name })).filter((line) => line.values).map((line, k) => ({ ...line, tone: /** @type {1 | 2 | 3 | 4} */ (k + 1) }));
      const values = lines.flatMap((line) => line.values);
      const worth = panel.threshold === undefined || Math.max(...there(values), 0) >= panel.threshold;
      chart.element.hidden = !lines.length || !worth;
      if (!lines.length) missing.push(panel.title.toLowerCase());
      else if (!worth && panel.quiet) notes.push(panel.quiet);
      if (chart.element.hidden) continue;
      const ghosts = alike ? lines.filter((line) => other.series[line.of]).map((line) => ({ ...line, name: `${line.name}, ${nameOf(other)}`, values: other.series[line.of], ghost: true })) : [];
      // Linear from 0: noise shall not look like much.
      const log = logarithmic(panel, [...values, ...ghosts.flatMap((line) => line.values)]);
      Object.assign(chart.options, { log, from: log ? undefined : 0 });
      chart.show({ labels, kinds, series: [...lines, ...ghosts], summary: [sentence(lines, labels), panel.more?.(answer.series, labels)].filter(Boolean).join(" ") });
    }
    if (missing.length) notes.push(`Not recorded at this step: ${missing.join(", ")}`);
    set(quiet, { text: notes.map((note) => `${note}.`).join(" ") });
    quiet.hidden = !notes.length;
    drawMap();
    drawTime();
    balance.show(answer.balance);
    const entries = Object.entries({ file: answer.path, ...answer.metadata });
    updateChildren(facts, entries.flat(), (_, k) => h(k % 2 ? "dd" : "dt"), (element, value) => set(element, { text: value }));
    point(store.state.rdepth === LAST ? null : store.state.rdepth);
  }

  let mapped = "";

  /** The map, which is the same at every step of a stream: it may have ten thousand cells. */
  function drawMap() {
    map.element.hidden = !answer.map;
    const of = [answer.number, answer.stream, answer.last].join(" ");
    if (!answer.map || of === mapped) return;
    mapped = of;
    const { sources, depths, shares, places, starts } = answer.map;
    const end = shares[shares.length - 1];
    const top = end.indexOf(Math.max(...end));
    const values = sources.map((/** @type {string} */ _, /** @type {number} */ row) => shares.map((/** @type {number[]} */ column) => column[row] || null));
    const when = answer.last ? "" : ` The map is that of the last step, ${lastStep()}.`;
    const total = answer.sites.filter((/** @type {any} */ site) => site.kind !== "final").length;
    const some = depths.length < total ? ` ${depths.length} of ${total} depths are drawn; neighbouring sources are added up.` : "";
    map.show({ columns: depths, rows: sources, at: places, from: starts, values, summary: `At the end ${percent(end[top])} of the stream is from ${sources[top]}${top ? `, ${percent(end[0])} from ${sources[0]}` : ""}.${when}${some}` });
  }

  const nameOf = (/** @type {any} */ place) => (place.number === answer.number ? `step ${place.step}` : all[place.number].name);

  /** @param {any} state */
  function controls(state) {
    const { steps, streams, count } = all[state.rec];
    fields.file.hidden = all.length < 2;
    fields.stream.hidden = streams.length < 2;
    fields.step.hidden = count < 2;
    set(file, { value: String(state.rec) });
    updateChildren(stream, streams, () => h("option"), (option, name) => set(option, { value: name, text: name }));
    set(stream, { value: state.rstream || streams[0] });
    const at = state.rstep === LAST ? steps.length - 1 : steps.findIndex((step) => step >= state.rstep);
    set(step, { max: steps.length - 1, value: String(at < 0 ? steps.length - 1 : at), "aria-valuetext": `step ${steps[at] ?? state.rstep}` });
    set(stepNow, { text: `${state.rstep === LAST ? steps[steps.length - 1] : state.rstep} of ${steps[steps.length - 1]}` });
    const choices = comparisons(state);
    updateChildren(against, choices, () => h("option"), (option, [value, name]) => set(option, { value, text: name }));
    set(against, { value: compared(state) });
    fields.against.hidden = choices.length < 2;
    set(what, { value: state.rwhat });
  }

  return {
    /** @param {any} state @param {Set<string>} changed */
    show(state, changed) {
      controls(state);
      const several = all[state.rec].count > 1;
      const reload = ["rec", "rstep", "rstream", "rwith", ...(several ? ["rdepth", "rwhat"] : [])].some((key) => changed.has(key));
      if (!answer || reload) return load(state);
      return point(state.rdepth === LAST ? null : state.rdepth);
    },
    code: () => (answer ? code(answer) : ""),
    data: () => ({ recording: answer, compared: other }),
    /** @param {string} key */
    key(key) {
      const { steps } = all[store.state.rec];
      const by = key === "[" ? -1 : key === "]" ? 1 : 0;
      if (!by || steps.length < 2) return false;
      const at = Math.max(0, Math.min(steps.length - 1, Number(step.value) + by));
      store.set({ rstep: at === steps.length - 1 ? LAST : steps[at] });
      return true;
    },
    keys: /** @type {[string, string][]} */ ([["[ ]", "previous step, next step"]]),
  };
}
