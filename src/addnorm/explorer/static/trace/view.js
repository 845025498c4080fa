// @ts-check
/** The view "Trace": one token through Add & Norm, with every number. All of its state is in the address. */

import { h, set } from "../dom.js";
import { show } from "../numbers.js";
import { choice, number, text, whole } from "../state.js";
import { Controls, keyOf, written } from "./controls.js";
import { formula, typeset } from "./formulas.js";
import { Geometry } from "./geometry.js";
import { entries, float } from "./parsing.js";
import { matching, noted } from "./presets.js";
import { Rows } from "./rows.js";
import { CHOICES, described, equation, flat, step, trace } from "./trace.js";
import { comparePlacements } from "./descriptions.js";
import { Diagram } from "./diagram.js";

/** @typedef {import("../state.js").State} State */
/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {import("./presets.js").Preset} Preset */

const MOST = 16;
const EPS = "1e-5";
/** Keys and the options of `trace` they are. */
const OPTIONS = { tplace: "placement", tnorm: "norm", var: "variance", epsat: "eps_place" };

/** @param {any} meta */
const fields = (meta) => {
  const [first] = /** @type {Preset[]} */ (meta.presets);
  return {
    x: text(first.x.map(written).join(","), 500), F: text(first.sublayer.map(written).join(","), 500),
    tplace: choice("post", CHOICES.placement), tnorm: choice("layer", CHOICES.norm),
    gamma: text("", 500), beta: text("", 500), eps: text(EPS, 30),
    var: choice("biased", CHOICES.variance), epsat: choice("inside", CHOICES.eps_place),
    g: text("", 500), rg: text("", 500), digits: whole(5, 2, 10), step: text("", 20),
    times: number(1, 0.1, 5), plus: number(0, -5, 5),
  };
};

/**
 * The arguments of `trace` that a state stands for.
 * @param {State} state
 * @returns {{x: string[], sublayer: string[], options: any}}
 * @throws {Error} more numbers than there is room for
 */
function toArguments(state) {
  const x = entries(state.x);
  if (x.length > MOST) throw new Error(`x has ${x.length} numbers, expected 1 to ${MOST} on this page: addnorm.trace takes more.`);
  const scale = (/** @type {string} */ text) => {
    const numbers = entries(text);
    return numbers.length === 1 && float(numbers[0]) !== undefined ? float(numbers[0]) : numbers;
  };
  /** @type {any} */
  const options = Object.fromEntries(Object.entries(OPTIONS).map(([key, name]) => [name, state[key]]));
  Object.assign(options, { eps: state.eps, digits: state.digits });
  if (state.gamma) options.weight = scale(state.gamma);
  if (state.beta) options.bias = scale(state.beta);
  if (state.g) options.grad = entries(state.g);
  if (state.rg && state.tplace === "pre") options.read_grad = entries(state.rg);
  return { x, sublayer: entries(state.F), options };
}

/** The state of a preset. @param {Preset} preset @returns {State} */
function stateOf({ x, sublayer, options }) {
  const vector = (/** @type {any} */ value) => (value === undefined ? "" : [value].flat().map(written).join(","));
  return {
    x: vector(x), F: vector(sublayer), gamma: vector(options.weight), beta: vector(options.bias),
    eps: options.eps === undefined ? EPS : written(options.eps), g: "", rg: "", step: "", times: 1, plus: 0,
    ...Object.fromEntries(Object.entries(OPTIONS).map(([key, name]) => [key, /** @type {any} */ (options)[name] ?? CHOICES[/** @type {keyof typeof CHOICES} */ (name)][0]])),
  };
}

/**
 * @param {HTMLElement} root
 * @param {{meta: any, store: import("../state.js").Store, announce: (text: string) => void}} app
 */
function mount(root, { meta, store, announce }) {
  /** @type {Preset[]} */
  const presets = meta.presets;
  const change = (/** @type {State} */ some, /** @type {{commit?: boolean}} */ how = {}) => store.set(some, how);
  const flip = () => {
    const tplace = store.state.tplace === "pre" ? "post" : "pre";
    change({ tplace });
    announce(`${tplace}-LN. ${comparison.textContent}`);
  };
  const controls = new Controls(presets, { change, preset: (preset) => change(stateOf(preset)) });
  const wire = new Diagram(flip);
  const rows = new Rows({ choose: (name, commit) => change({ step: name }, { commit }), announce });
  const geometry = new Geometry((some, how) => change(some, how));
  const line = formula(".trace-equation");
  const title = h("p.trace-title");
  const comparison = h("p.trace-comparison");
  const button = h("button", { type: "button", class: "plain", onclick: flip });
  const shape = h("button.plain.trace-shape", { type: "button", onclick: () => geometry.element.scrollIntoView({ block: "start" }) }, "Geometry ↓");
  const hero = h("header.trace-hero", null, title, line, h("div.trace-stage", null, controls.fields.tplace.box, button, shape), wire.element, comparison);
  const page = h("div.trace-page", null, hero, controls.element, rows.element, geometry.element);
  root.classList.add("trace");
  root.append(h("h2", null, "One token, every step"), page);

  /** The last that could be traced: first the first example. @type {{plain: Trace, call: any, preset: number}} */
  let last = follow(stateOf(presets[0]));

  /** @param {State} state */
  function follow(state) {
    const call = toArguments({ digits: 5, ...state });
    const plain = trace(call.x, call.sublayer, call.options);
    const preset = matching(presets, plain);
    return { plain: preset ? noted(plain, preset) : plain, call, preset: preset ? presets.indexOf(preset) : -1 };
  }

  /** @param {State} state @param {Set<string>} [changed] */
  function display(state, changed = new Set()) {
    /** @type {{key: string, text: string} | undefined} */
    let problem;
    try {
      last = follow(state);
    } catch (error) {
      const message = /** @type {Error} */ (error).message;
      problem = { key: keyOf(message), text: message };
      if (changed.size) announce(message);
    }
    const { plain } = last;
    controls.show(state, { preset: problem ? -1 : last.preset, problem });
    page.classList.toggle("stale", Boolean(problem));
    set(rows.element, { "aria-busy": problem ? "true" : null });
    const other = trace(last.call.x, last.call.sublayer, { ...last.call.options, placement: plain.placement === "post" ? "pre" : "post", read_grad: undefined });
    const [post, pre] = plain.placement === "post" ? [plain, other] : [other, plain];
    set(title, { text: plain.title || "Your own numbers" });
    typeset(line, equation(plain));
    set(button, { text: plain.placement === "post" ? "Move the norm before the sublayer" : "Move the norm after the add" });
    wire.show(/** @type {any} */ (plain), state.step);
    set(comparison, { text: comparePlacements(post, pre, (value) => show(value, 3)) });
    rows.show(plain, state.step, { flipped: changed.has("tplace") });
    geometry.show(plain, { times: state.times, plus: state.plus });
  }

  return {
    show: display,
    hide: () => rows.stop(),
    /** @param {string} key */
    key(key) {
      const does = { f: flip, j: () => rows.walkTo(1), k: () => rows.walkTo(-1) }[key];
      does?.();
      return Boolean(does);
    },
    keys: /** @type {[string, string][]} */ ([["f", "switch between post-LN and pre-LN"], ["j k", "next step, previous step"], ["← →", "in the steps: previous step, next step"]]),
    code: () => code(last, presets),
    data: () => described(last.plain),
  };
}

/** The Python that prints this trace. @param {{plain: Trace, call: any, preset: number}} last @param {Preset[]} presets */
function code({ plain, call, preset }, presets) {
  const vector = (/** @type {any} */ value) => (Array.isArray(value) ? `[${value.map((v) => python(Number(float(String(v))))).join(", ")}]` : python(Number(value)));
  const { options } = call;
  const free = ["grad", "read_grad"].filter((name) => options[name] !== undefined).map((name) => `${name}=${vector(options[name])}`);
  if (plain.digits !== 5) free.push(`digits=${plain.digits}`);
  if (preset >= 0) {
    return `from addnorm.trace import PRESETS\n\nprint(PRESETS["${presets[preset].name}"].trace(${free.join(", ")}))\n`;
  }
  const chosen = Object.entries(CHOICES).filter(([name, [usual]]) => options[name] !== usual).map(([name]) => `${name}="${options[name]}"`);
  const scales = ["weight", "bias"].filter((name) => options[name] !== undefined).map((name) => `${name}=${vector(options[name])}`);
  const eps = plain.eps === 1e-5 ? [] : [`eps=${python(plain.eps)}`];
  const args = [vector(flat(step(plain, "x").value)), vector(flat(step(plain, "sublayer").value)), ...chosen, ...scales, ...eps, ...free];
  return `from addnorm.trace import trace\n\nprint(trace(${args.join(", ")}))\n`;
}

/** A number as Python reads it back. @param {number} value */
const python = (value) => (Object.is(value, -0) ? "-0.0" : String(value));

export const view = { name: "trace", title: "Trace", fields, mount };
