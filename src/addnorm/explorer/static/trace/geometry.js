// @ts-check
/**
 * The norm as geometry, for three features: the plane orthogonal to (1, 1, 1), seen along (1, 1, 1), with the circle of radius √3
 * that LayerNorm puts every token on. RMSNorm takes no mean away and has a sphere: it is seen along the three axes.
 */

import { h, updateChildren, s, set } from "../dom.js";
import { show } from "../numbers.js";
import { dot, eigenvalues, input, jacobian, length, normOf, normalizedName, parts } from "./jacobian.js";
import { flat, step } from "./trace.js";

/** @typedef {import("./trace.js").Trace} Trace */
/** @typedef {{title: string, across: number[], up: number[]}} Viewpoint  where one looks from: two orthonormal directions */

const [R2, R3, R6] = [2, 3, 6].map(Math.sqrt);
/** The plane of the centred tokens, the first feature upwards; and the three axis views. @type {Record<string, Viewpoint[]>} */
const VIEWPOINTS = {
  layer: [{ title: "seen along (1, 1, 1)", across: [0, -1 / R2, 1 / R2], up: [2 / R6, -1 / R6, -1 / R6] }],
  rms: [
    { title: "features 1 and 2", across: [1, 0, 0], up: [0, 1, 0] },
    { title: "features 1 and 3", across: [1, 0, 0], up: [0, 0, 1] },
    { title: "features 2 and 3", across: [0, 1, 0], up: [0, 0, 1] },
  ],
};
const HALF = 150; // of the picture, in its own units
const GRADIENT = 0.6 * R3; // how long the longest arrow of a gradient is drawn

/** What is drawn: class, and what the legend label of it; of the token the norm decides. */
const LEGEND = [
  ["token", ""], ["push", "effect of the norm"], ["landed", "normalized token"],
  ["grad", "gradient g"], ["along", "its component along the token, removed"], ["rest", "the rest"],
];

export class Geometry {
  /** @param {(some: {times?: number, plus?: number}, how?: {commit: boolean}) => void} change */
  constructor(change) {
    /** @type {Record<string, {input: any, output: any}>} */
    this.sliders = {};
    this.title = h("h3");
    this.views = h("div.trace-views");
    this.legend = h("ul.trace-legend", null, ...LEGEND.map(([name, label]) => h("li", null, s(`svg.trace-key.${name}`, { viewBox: "0 0 24 10", "aria-hidden": "true" }, ...key(name)), h("span", null, label))));
    this.texts = h("div.trace-geometry-texts");
    this.moved = h("p.trace-moved");
    this.play = h(
      "div.trace-moves",
      null,
      this.#slider("times", "Scale by", 0.1, 5, 0.1, change),
      this.#slider("plus", "Add", -5, 5, 0.1, change),
      h("button.plain", { type: "button", onclick: () => change({ times: 1, plus: 0 }) }, "Reset"),
    );
    this.element = h("figure.trace-geometry", null, h("figcaption", null, this.title), this.views, this.legend, this.play, this.moved, this.texts);
  }

  /** @param {"times" | "plus"} name @param {string} label @param {number} min @param {number} max @param {number} step @param {Function} change */
  #slider(name, label, min, max, step, change) {
    const send = (/** @type {boolean} */ commit) => change({ [name]: Number(input.value) }, { commit });
    const input = h("input", { type: "range", min, max, step, oninput: () => send(false), onchange: () => send(true) });
    const output = h("output");
    this.sliders[name] = { input, output };
    return h("label.field", null, h("span.name", null, label), input, output);
  }

  /** @param {Trace} of @param {{times: number, plus: number}} move  the token that is drawn is its own, times and plus these */
  show(of, { times, plus }) {
    const token = input(of);
    const d = token.length;
    const n = flat(step(of, "normalized").value);
    const p = parts(of);
    const well = [...token, ...n, ...p.rest, ...p.g].every(Number.isFinite);
    const drawn = d === 3 && well;
    set(this.title, { text: TITLES[drawn ? of.norm : "none"] });
    for (const part of [this.views, this.legend, this.play, this.moved]) set(part, { hidden: !drawn });
    const values = d <= 3 && well ? eigenvalues(jacobian(of)) : [];
    this.#showTexts(well ? sentences(of, n, p, values) : ["A number is inf or nan and cannot be drawn. The notes of the steps say where it comes from."]);
    if (!drawn) return;
    for (const [name, value] of Object.entries({ times, plus })) {
      set(this.sliders[name].input, { value: String(value) });
      set(this.sliders[name].output, { text: show(value, 3) });
    }
    const moved = token.map((value) => value * times + plus);
    const landed = flat(step(normOf(of, moved), "normalized").value);
    const centre = of.norm === "layer" ? (/** @type {number[]} */ v) => v.map((value) => value - (v[0] + v[1] + v[2]) / 3) : (/** @type {number[]} */ v) => v;
    const frame = Math.min(4 * R3, Math.max(1.62 * R3, 1.15 * length(centre(token))));
    set(this.legend.firstChild.lastChild, { text: of.norm === "layer" ? "token minus its mean" : "token" });
    updateChildren(this.views, VIEWPOINTS[of.norm], () => view(), (element, viewpoint) => draw(element, viewpoint, { frame, from: centre(moved), was: centre(token), landed, n, p, name: normalizedName(of) }));
    this.#showMove(of, token, moved, n, landed, times, plus);
  }

  /** @param {string[]} texts */
  #showTexts(texts) {
    updateChildren(this.texts, texts, () => h("p"), (paragraph, text) => set(paragraph, { text }));
  }

  /** @param {Trace} of @param {number[]} token @param {number[]} moved @param {number[]} n @param {number[]} landed @param {number} times @param {number} plus */
  #showMove(of, token, moved, n, landed, times, plus) {
    const name = normalizedName(of);
    const [far, off] = [[moved, token], [landed, n]].map(([a, b]) => length(a.map((value, k) => value - b[k])));
    const still = off < 1e-3 * Math.max(length(n), 1e-300);
    const where = still ? "its normalized point does not move" : of.norm === "rms" && plus !== 0 ? "its normalized point moves, since RMSNorm does not subtract the mean" : "its normalized point moves, since ε matters for so small a variance";
    const text = `${name} · ${show(times, 3)} ${plus < 0 ? "−" : "+"} ${show(Math.abs(plus), 3)}: ${name} moves by ${show(far, 3)}, ${where} (by ${show(off, 2)}).`;
    set(this.moved, { text: far === 0 ? `Scale ${name} or add a constant, and watch the point on the ${of.norm === "rms" ? "sphere" : "circle"}.` : text });
  }
}

/** @type {Record<string, string>} */
const TITLES = {
  layer: "Normalized tokens lie on a circle",
  rms: "Normalized tokens lie on a sphere",
  none: "Geometry",
};

/**
 * The picture in words, with its numbers.
 * @param {Trace} of @param {number[]} n @param {ReturnType<typeof parts>} p @param {number[]} values  eigenvalues, of three features at most
 */
function sentences(of, n, p, values) {
  const d = n.length;
  const v = normalizedName(of);
  const most = Math.max(...values.map(Math.abs));
  const eigen = values.map((value) => (Math.abs(value) < 1e-14 * most ? "0" : show(value, 3))).join(", ");
  const at = `${v}_norm has L2 norm ${show(length(n), 5)}; √${d} = ${show(Math.sqrt(d), 5)}.`;
  const layer = of.norm === "layer";
  if (layer && d === 1) return ["One feature equals its own mean: the normalized token is 0, and so is its gradient."];
  if (layer && d === 2) {
    const signs = n.map((value) => show(value, 5)).join(" and ");
    return [
      `With two features only a sign is left: which of them is larger. They become ${signs} for every input.`,
      `The Jacobian's eigenvalues are ${eigen}: the gradient is 0 up to the effect of ε. With three features this panel draws a picture.`,
    ];
  }
  if (d !== 3) {
    const where = layer ? `a sphere of radius √${d} in the hyperplane orthogonal to (1, …, 1)` : `a sphere of radius √${d}`;
    const remaining = `${d - (layer ? 2 : 1)} of the gradient's ${d} dimensions remain`;
    return [`Every normalized token lies on ${where}: ${at} ${remaining}, those along that sphere. With three features this panel draws a picture.`];
  }
  const share = (/** @type {number[]} */ part) => show(length(part), 3);
  const removed = layer ? `${share(p.mean)} is along (1, 1, 1), orthogonal to the picture, and ${share(p.along)} along ${v}_norm: both are removed` : `${share(p.along)} is along ${v}_norm and is removed`;
  const left = `${share(p.rest)} remains along the ${layer ? "circle" : "sphere"}; divided by the root, ${show(p.root, 3)}, it is ${share(p.through)}`;
  const why = layer
    ? "0 along (1, 1, 1), 0 along the token up to the effect of ε, and 1/root along the circle"
    : "0 along the token up to the effect of ε, and 1/root in the two directions along the sphere";
  return [
    layer ? `Subtracting the mean projects ${v} onto the plane orthogonal to (1, 1, 1); dividing by the root moves it to the circle. ${at}` : `Dividing by the root moves ${v} to the sphere along its own direction. ${at}`,
    `The gradient g has L2 norm ${share(p.g)}. Of it ${removed}. ${left}.`,
    `The Jacobian's eigenvalues are ${eigen}: ${why}.`,
  ];
}

/** The empty picture: its marks, in the order in which they lie. */
function view() {
  const mark = (/** @type {string} */ name) => s(`path.trace-g.${name}`, { fill: "none" });
  const marks = Object.fromEntries(["axes", "push", "along", "grad", "rest"].map((name) => [name, mark(name)]));
  const circle = s("circle.trace-g.circle", { cx: 0, cy: 0 });
  const dots = Object.fromEntries(["was", "token", "landed"].map((name) => [name, s(`circle.trace-g.dot.${name}`, { r: name === "landed" ? 5.5 : 4.5 })]));
  const labels = [0, 1, 2].map((k) => s("text.trace-axis", null, k + 1));
  const names = [s("text.trace-name", null, s("tspan")), s("text.trace-name", null, "", s("tspan", { dy: 3 }, "norm"))];
  const caption = h("figcaption");
  const svg = s("svg", { viewBox: `${-HALF} ${-HALF} ${2 * HALF} ${2 * HALF}`, role: "img" }, marks.axes, circle, ...labels, marks.push, marks.grad, marks.along, marks.rest, dots.was, dots.token, dots.landed, ...names);
  return Object.assign(h("figure.trace-viewpoint", null, svg, caption), { parts: { svg, marks, circle, dots, labels, names, caption } });
}

/**
 * @param {any} element  from view() @param {Viewpoint} viewpoint
 * @param {{frame: number, from: number[], was: number[], landed: number[], n: number[], p: ReturnType<typeof parts>, name: string}} what
 */
function draw(element, viewpoint, { frame, from, was, landed, n, p, name }) {
  const { svg, marks, circle, dots, labels, names, caption } = element.parts;
  const unit = (HALF - 12) / frame;
  const place = (/** @type {number[]} */ v) => [unit * dot(v, viewpoint.across), -unit * dot(v, viewpoint.up)];
  const base = place(n);
  const size = Math.max(length(p.centred), length(p.rest));
  const gradient = size > 0 ? GRADIENT / size : 0;
  const tip = (/** @type {number[]} */ v) => place(n.map((value, k) => value + gradient * v[k]));
  const [token, beyond] = within(place(from));
  const [before] = within(place(was));
  const point = place(landed);

  set(circle, { r: unit * R3 });
  // Of the axes' pictures the sides that have nothing beyond the circle are left out, so that the rest is larger.
  const rim = unit * R3 + 14;
  const seen = [token, before, point, base, tip(p.centred), tip(p.rest)];
  const isAxes = viewpoint.across.includes(1);
  const left = isAxes && seen.every(([x]) => x > -rim) ? rim : HALF;
  const below = isAxes && seen.every(([, y]) => y < rim) ? rim : HALF;
  set(svg, { viewBox: `${-left} ${-HALF} ${left + HALF} ${HALF + below}` });
  set(marks.axes, { d: [0, 1, 2].map((k) => `M0 0L${at(axis(k, viewpoint, 126))}`).join("") });
  labels.forEach((/** @type {SVGElement} */ label, /** @type {number} */ k) => {
    const [x, y] = axis(k, viewpoint, 138);
    set(label, { x: x.toFixed(1), y: (y + 4).toFixed(1), visibility: x || y ? null : "hidden" });
  });
  set(marks.push, { d: arrow(token, point, 8), "stroke-dasharray": beyond ? "2 4" : null });
  set(marks.grad, { d: arrow(base, tip(p.centred)) });
  set(marks.along, { d: arrow(base, tip(p.along)) });
  set(marks.rest, { d: arrow(base, tip(p.rest)) });
  for (const [key, [x, y], value] of /** @type {[string, number[], number[]][]} */ ([["was", before, was], ["token", token, from], ["landed", point, landed]])) {
    set(dots[key], { cx: x.toFixed(2), cy: y.toFixed(2), data: { series: key, value: value.join(",") } });
  }
  const [beside, under] = labelled(token, point, tip(p.rest));
  set(names[0], { x: beside[0], y: beside[1] });
  set(names[0].firstChild, { text: beyond ? `${name}, outside` : name });
  set(names[1], { x: under[0], y: under[1] });
  names[1].firstChild.nodeValue = name;
  set(caption, { text: viewpoint.title });
  set(svg, { "aria-label": `${viewpoint.title}: the circle of radius √3, ${name} at ${pair(place(from), unit)}, ${name}_norm at ${pair(point, unit)}, the remaining gradient as an arrow along the circle.` });
}

/** @param {number[]} at @param {number} unit */
const pair = ([x, y], unit) => `${show(x / unit, 3)} across and ${show(-y / unit, 3)} up`;

/** The direction of a feature's axis, so long. @param {number} k @param {Viewpoint} viewpoint @param {number} long */
function axis(k, viewpoint, long) {
  const [x, y] = [viewpoint.across[k], -viewpoint.up[k]];
  const size = Math.hypot(x, y);
  return size ? [(x / size) * long, (y / size) * long] : [0, 0];
}

/** A point of the picture, and whether it had to be brought in from beyond. @param {number[]} point @returns {[number[], boolean]} */
function within(point) {
  const far = length(point);
  const most = HALF - 8;
  return far > most ? [point.map((value) => (value / far) * most), true] : [point, false];
}

/**
 * Where the names of the token and of its point stand: on the side of the circle that the gradient does not go to.
 * @param {number[]} token @param {number[]} point @param {number[]} tip
 */
function labelled(token, point, tip) {
  const far = length(point) || 1;
  const [ux, uy] = [point[0] / far, point[1] / far];
  const side = -uy * (tip[0] - point[0]) + ux * (tip[1] - point[1]) > 0 ? 1 : -1;
  const beside = (/** @type {number[]} */ [x, y], /** @type {number} */ by) => {
    const [bx, down] = [x + side * uy * by, y - side * ux * by];
    return [bx, down + 5].map((value) => Math.max(-HALF + 16, Math.min(HALF - 16, value)).toFixed(1));
  };
  const close = Math.hypot(token[0] - point[0], token[1] - point[1]) < 16;
  return [beside(close ? token.map((value, k) => value + [ux, uy][k] * (length(token) < far ? -14 : 14)) : token, 18), beside(point, 28)];
}

/** @param {number[]} point */
const at = ([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`;

/** A line with a tip; nothing where there is no way to go. @param {number[]} from @param {number[]} to @param {number} [short]  ends so much before */
function arrow(from, to, short = 0) {
  const [x, y] = [to[0] - from[0], to[1] - from[1]];
  const far = Math.hypot(x, y);
  if (far < short + 3) return "";
  const [ux, uy] = [x / far, y / far];
  const end = [to[0] - ux * short, to[1] - uy * short];
  const wing = (/** @type {number} */ side) => [end[0] - 7 * ux + side * 4 * uy, end[1] - 7 * uy - side * 4 * ux];
  return `M${at(from)}L${at(end)}M${at(wing(1))}L${at(end)}L${at(wing(-1))}`;
}

/** The mark of a legend's line. @param {string} name */
function key(name) {
  if (name === "token" || name === "landed") return [s(`circle.trace-g.dot.${name}`, { cx: 12, cy: 5, r: 4 })];
  return [s(`path.trace-g.${name}`, { d: "M1 5H22M17 2L22 5L17 8", fill: "none" })];
}
