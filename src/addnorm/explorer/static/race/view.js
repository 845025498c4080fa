// @ts-check
/** Race: two wirings trained side by side by the library, drawn while they run, and any step of it afterwards. */

import { ask, Trouble } from "../api.js";
import { chartGrid } from "../chart/figure.js";
import { LineChart } from "../chart/lines.js";
import { h, updateChildren, announce, set } from "../dom.js";
import { show as digits } from "../numbers.js";
import { Controls, fields, toSettings } from "./controls.js";
import { events } from "./events.js";
import { BY_DEPTH, History } from "./history.js";
import { Scrubber } from "./scrubber.js";

const FRAME = 120; // milliseconds between two drawings while it runs

/** @type {Record<import("./history.js").Name, {title: string, y: string, log: boolean, from?: number, stems?: boolean}>} */
const CHARTS = {
  stream: { title: "Residual stream", y: "root mean square", log: true },
  gradient: { title: "Gradient of the stream", y: "L2 norm, mean over tokens", log: true },
  parameters: { title: "Gradient of the weights", y: "L2 norm, by sublayer", log: true, stems: true },
  ratio: { title: "Write / stream", y: "|write| / |stream|", log: true },
  similarity: { title: "Token similarity", y: "mean cosine between two tokens", log: false, from: 0 },
};

/** @typedef {"idle" | "starting" | "running" | "stopped" | "failed" | "over"} Phase */

/** @param {HTMLElement} root @param {import("../app.js").App} app @returns {import("../app.js").Mounted} */
function mount(root, app) {
  const { store, meta } = app;
  /** @type {History | null} */
  let history = null;
  /** @type {Phase} */
  let phase = "idle";
  /** @type {AbortController | null} */
  let controller = null;
  let began = 0; // when the first step came
  let drawn = 0;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let waiting;
  const running = () => phase === "starting" || phase === "running";

  // The page.
  const controls = new Controls(meta, store);
  const go = h("button.main", { type: "button", onclick: () => (running() ? controller?.abort() : start()) }, "Start");
  const bar = h("progress", { "aria-label": "Progress of the race", hidden: true });
  const status = h("p.race-status");
  const trouble = h("p.wrong", { role: "alert", hidden: true });
  const stale = h("p.race-note", { hidden: true }, "The settings have changed: Start runs a race with the new ones.");
  const scrubber = new Scrubber((at, commit) => store.set({ at }, { commit }), () => draw());
  const words = h("div.race-verdict");
  const ended = h("div.race-verdict.race-end", { hidden: true });
  /** @param {number} index */
  const point = (index) => { for (const chart of Object.values(byDepth)) chart.cursor(index); };
  const loss = new LineChart({ id: "race-loss", title: "Loss", x: "step", y: "nats per character", onCursor: (index, commit) => scrubber.go(index, commit), height: 260 });
  const byDepth = Object.fromEntries(BY_DEPTH.map((name) => [name, new LineChart({ id: `race-${name}`, x: "depth, in sublayers", ...CHARTS[name], onCursor: point })]));
  const change = new LineChart({ id: "race-logit-change", title: "Change of the logits in a step", x: "step", y: "|change of the logits| / |logits|", log: true, onCursor: (index, commit) => scrubber.go(index, commit) });
  const charts = chartGrid(h("div.broad", null, loss.element), ...BY_DEPTH.map((name) => byDepth[name].element), change.element);
  const opening = h("div.race-before", null,
    h("p.lead", null, "Two models that differ only in their residual wiring learn the same text with the same seed, batches and learning rate, in turn a step of each. "
      + "The charts show their residual streams and gradients by depth at every step, while they train."),
    h("p.lead", null, "The text is the documentation of the Python language, one character per token. A race with the default settings takes about ten seconds; more layers or steps take minutes."),
    h("p.lead", null, `A lesson: at the default learning rate, ${meta.race.fields.lr.default}, post-LN learns no more than the frequencies of the characters (“post-LN fails”). `
      + `With a warm-up of ${meta.race.lesson.warm_up} steps it learns (“warm-up helps”), and at ${meta.race.lesson.rate} it does without (“both learn”).`),
    controls.drawings);
  const after = h("div", { hidden: true }, ended, words, h("div.race-bar", null, scrubber.element), charts);
  root.append(
    h("h2", null, "Race two wirings"),
    h("div.race-layout", null,
      h("div.race-side", null, h("div.buttons", null, go), bar, status, trouble, stale, controls.element),
      h("div.race-main", null, opening, after)));

  // The race.

  async function start() {
    const mine = (controller = new AbortController());
    const settings = toSettings(store.state);
    const before = history;
    history = new History(settings);
    become("starting");
    if (before && store.state.at >= 0) store.set({ at: -1 }, { commit: false });
    announce("The race starts.");
    try {
      const response = await ask("/api/race", { body: settings, signal: mine.signal });
      for await (const event of events(response)) {
        if (event.event === "failed") throw new Trouble(event.error);
        history.add(event);
        if (event.event === "start") {
          began = performance.now();
          become("running");
        }
        later();
      }
      if (!history.ended) throw new Trouble("The race ended early. Is `addnorm explore` still running in its terminal?");
      become("over");
      announce(`The race is over. ${history.ended.verdict.join(" ")}`);
    } catch (error) {
      if (!history.events.length && before) history = before; // nothing came: the race before stays
      if (mine.signal.aborted) {
        become("stopped");
        announce("The race was stopped.");
      } else {
        become("failed", /** @type {Error} */ (error).message);
        if (!(error instanceof Trouble)) console.error(error);
      }
    }
  }

  /** @param {Phase} next @param {string} [wrong] */
  function become(next, wrong = "") {
    phase = next;
    set(trouble, { text: wrong });
    trouble.hidden = !wrong;
    root.dataset.phase = phase;
    show(store.state, new Set());
  }

  /** Draws soon: steps may come faster than they can be drawn. */
  function later() {
    if (waiting !== undefined) return;
    waiting = setTimeout(() => { waiting = undefined; draw(); }, Math.max(0, drawn + FRAME - performance.now()));
  }

  // What is shown.

  /** @type {Record<Phase, (done: number, all: number) => string>} */
  const STATUS = {
    idle: () => "",
    starting: () => "Preparing the models…",
    running: (done, all) => `${done} of ${all} steps${left(done, all)}`,
    stopped: (done, all) => `Stopped after ${done} of ${all} steps.`,
    failed: (done, all) => (done ? `${done} of ${all} steps were finished.` : ""),
    over: (done) => `${done} steps, ${digits(/** @type {any} */ (history).ended.racers.reduce((/** @type {number} */ sum, /** @type {any} */ racer) => sum + racer.seconds, 0), 3)} seconds of training.`,
  };

  /** @param {number} done @param {number} all */
  function left(done, all) {
    const seconds = ((performance.now() - began) / 1000 / done) * (all - done);
    return done >= 3 ? `, about ${seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.ceil(seconds / 60)} min`} left` : "";
  }

  function draw() {
    if (!history || root.hidden) return;
    drawn = performance.now();
    const all = history.settings.steps;
    const done = history.newest + 1;
    set(status, { text: STATUS[phase](done, all) });
    bar.hidden = !running();
    if (phase === "running") set(bar, { max: all, value: done });
    else bar.removeAttribute("value");
    opening.hidden = done > 0;
    after.hidden = done === 0;
    if (!done) return;
    scrubber.newest = history.newest;
    scrubber.at = store.state.at;
    const { step } = scrubber;
    const sentences = history.sentences(step);
    scrubber.show(history.newest, store.state.at, sentences[0] ?? "");
    updateChildren(words, sentences, () => h("p"), (line, text) => set(line, { text }));
    ended.hidden = !history.ended;
    updateChildren(ended, history.ended?.verdict ?? [], () => h("p"), (line, text) => set(line, { text: String(text) }));
    const summaries = history.summaries(step);
    const range = history.range("loss");
    loss.options.log = range[1] > 5 * history.started.text.uniform; // one that diverges would leave no room for the other
    const steps = Array.from({ length: running() ? all : done }, (_, k) => `step ${k}`);
    loss.show({ labels: steps, series: history.byStep("loss"), summary: summaries.loss });
    change.show({ labels: steps, series: history.byStep("logit_change"), summary: summaries.logit_change });
    for (const chart of [loss, change]) chart.cursor(step);
    const { labels, kinds } = history.places;
    for (const name of BY_DEPTH) {
      byDepth[name].show({ labels, kinds, series: history.series(name, step), summary: summaries[name], range: history.range(name) });
    }
    root.dataset.step = String(step);
  }

  /** @param {import("../state.js").State} state @param {Set<string>} changed */
  function show(state, changed) {
    controls.show(state, changed, running());
    set(go, { text: running() ? "Stop" : history ? "Start again" : "Start" });
    stale.hidden = !history || running() || JSON.stringify(toSettings(state)) === JSON.stringify(history.settings);
    set(status, { text: "" });
    draw();
  }

  return {
    show,
    hide: () => scrubber.halt(),
    code() {
      const { left, right, num_layers, ...others } = named(store.state);
      const options = Object.entries({ num_layers, ...others }).map(([name, value]) => `${name}=${value}`);
      return [
        "from addnorm import lab", "",
        "text = lab.python_docs()",
        `for wiring in ("${left}", "${right}"):`,
        `    run = lab.Run(wiring, ${options.slice(0, 5).join(", ")},`,
        `                  ${[...options.slice(5), "every=1"].join(", ")})`,
        "    result = lab.train(run, text)",
        '    print(run, "validation loss:", result["validation"])',
        '    print("stream by depth at the last step:", result["recorded"]["stream"][-1])', "",
      ].join("\n");
    },
    data: () => ({ settings: toSettings(store.state), phase, raced: history && { settings: history.settings, events: history.events } }),
    key(key) {
      if (key === "[") scrubber.go(scrubber.step - 1, true);
      else if (key === "]") scrubber.go(scrubber.step + 1, true);
      else if (key === "p") scrubber.toggle();
      else if (key === "n") scrubber.follow.click();
      else return false;
      return true;
    },
    keys: [["[ ]", "previous step, next step"], ["p", "replay the race, or pause"], ["n", "go to the newest step"]],
  };

  /** The settings as `addnorm.lab.Run` calls them. @param {import("../state.js").State} state @returns {Record<string, any>} */
  function named(state) {
    const { layers, ...others } = toSettings(state);
    return { num_layers: layers, d_model: others.d_model, nhead: meta.race.heads, ...others };
  }
}

/** @type {import("../app.js").View} */
export const view = { name: "race", title: "Race", fields, mount };
