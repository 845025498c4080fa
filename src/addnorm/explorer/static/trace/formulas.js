// @ts-check
/**
 * A formula set as MathML: what the trace writes as text, with its fractions, roots, sums and columns.
 *
 *     √(σ² + ε)                    a root over a sum, its parentheses gone
 *     (1.5 + 1 + 4.5) / 3 = 7 / 3  two fractions
 *     [1.5 - 2.3, …, 4.5 - 2.3]    a column, an entry a line
 *
 * The text is read, not written a second time: picture and text cannot say different things. A formula that changes keeps the
 * elements that it has, so that a number under a moving hand is one text node changed.
 */

import { h, updateChildren, m, set } from "../dom.js";

/** @typedef {{tag: string, text?: string, of?: Part[], props?: Record<string, any>}} Part  an element to be */

/** A number, a name, or one sign: ₖ, ᵀ and Σ are letters to Unicode and signs to us. */
const TOKEN = /\s*(?:(\d+(?:\.\d+)?(?:e[+-]\d+)?|inf|nan)|((?:(?![ₖᵀΣ])[\p{L}_])+)|(\S))/gu;
/** The names that are marked: where the norm stands is what this is about. */
const MARKED = /^(LayerNorm|RMSNorm)$/;
/** Words, which stand upright; other names are symbols. */
const WORDS = /^(Sublayer|LayerNorm|RMSNorm|Jacobian|mean|variance|expected|read|straight|ms)$/;
const ENDS = new Set(["", ")", "]", ",", "=", "+", "-", "·", "⊙", "/"]);

/** @param {string} tag @param {string} text @param {Record<string, any>} [props] @returns {Part} */
const leaf = (tag, text, props) => ({ tag, text, props });
/** @param {string} tag @param {Part[]} of @param {Record<string, any>} [props] @returns {Part} */
const branch = (tag, of, props) => ({ tag, of, props });
const SPACE = leaf("mspace", "", { width: "0.17em" });
/** @param {string} text */
const operator = (text) => leaf("mo", text);

/** Reads a formula from left to right, one method for each strength of binding. */
class Reader {
  /** @param {string} text */
  constructor(text) {
    /** @type {{kind: "number" | "name" | "sign", text: string, glued: boolean}[]} */
    this.tokens = [];
    for (const [piece, number, name, sign] of text.matchAll(TOKEN)) {
      const kind = number !== undefined ? "number" : name !== undefined ? "name" : "sign";
      this.tokens.push({ kind, text: number ?? name ?? sign, glued: !/^\s/.test(piece) });
    }
    this.at = 0;
    this.depth = 0; // inside a column fractions stay on their line
  }

  get next() {
    return this.tokens[this.at]?.text ?? "";
  }

  /** @param {string} text */
  took(text) {
    if (this.next !== text || this.at >= this.tokens.length) return false;
    this.at += 1;
    return true;
  }

  /** Sides of an equation, or things with commas between. @returns {Part[]} */
  line() {
    const parts = this.next === "=" ? [] : this.sum();
    while (this.next === "=" || this.next === ",") parts.push(operator(this.tokens[this.at++].text), ...this.sum());
    return parts;
  }

  /** @returns {Part[]} */
  sum() {
    const parts = this.took("-") ? [branch("mrow", [operator("−"), ...this.product()])] : this.product();
    while (this.next === "+" || this.next === "-") {
      parts.push(operator(this.tokens[this.at++].text === "-" ? "−" : "+"), ...this.product());
    }
    return parts;
  }

  /** Fractions side by side, with a sign between them or none. @returns {Part[]} */
  product() {
    const parts = this.fraction();
    for (;;) {
      if (this.next === "·" || this.next === "⊙") parts.push(operator(this.tokens[this.at++].text), ...this.fraction());
      else if (!ENDS.has(this.next)) parts.push(SPACE, ...this.fraction());
      else return parts;
    }
  }

  /** @returns {Part[]} */
  fraction() {
    let over = this.power();
    while (this.took("/")) {
      const under = this.power();
      over = this.depth ? [...over, operator("/"), ...under] : [branch("mfrac", [row(bare(over)), row(bare(under))])];
    }
    return over;
  }

  /** @returns {Part[]} */
  power() {
    let parts = this.atom();
    for (;;) {
      if (this.took("²")) parts = [branch("msup", [row(parts), leaf("mn", "2")])];
      else if (this.took("ᵀ")) parts = [branch("msup", [row(parts), leaf("mi", "T", { mathvariant: "normal" })])];
      else if (this.took("ₖ")) parts = [indexed(parts)];
      else return parts;
    }
  }

  /** @returns {Part[]} */
  atom() {
    const token = this.tokens[this.at++];
    if (!token) return [];
    if (token.kind === "number") return [figure(token.text)];
    if (token.kind === "name") return this.named(token.text);
    if (token.text === "√") return [branch("msqrt", bare(this.power()))];
    if (token.text === "Σ") {
      return [branch("munder", [leaf("mo", "∑", { movablelimits: "false" }), leaf("mi", "k")]), ...this.product()];
    }
    if (token.text === "(") {
      const inside = this.line();
      this.took(")");
      const alone = inside.length === 1 && inside[0].tag === "mfrac";
      return alone ? inside : [branch("mrow", [operator("("), ...inside, operator(")")])];
    }
    if (token.text === "[") return [this.column()];
    return [operator(token.text)];
  }

  /** @param {string} name @returns {Part[]} */
  named(name) {
    const parts = [symbol(name)];
    const call = this.tokens[this.at];
    if (call?.text !== "(" || !call.glued) return parts;
    this.at += 1;
    const inside = this.line();
    this.took(")");
    return [branch("mrow", [...parts, operator("("), ...inside, operator(")")])];
  }

  /** An entry a line; what is left out of a long one is a line of dots. */
  column() {
    this.depth += 1;
    /** @type {Part[]} */
    const rows = [];
    do {
      const entry = this.sum();
      const dots = entry.length === 1 && entry[0].text === "…";
      rows.push(branch("mtr", [branch("mtd", dots ? [operator("⋮")] : entry)]));
    } while (this.took(","));
    this.took("]");
    this.depth -= 1;
    return branch("mtable", rows, { class: "trace-column" }); // its brackets are borders: few fonts have any that grow
  }
}

/** One element of several. @param {Part[]} parts */
const row = (parts) => (parts.length === 1 ? parts[0] : branch("mrow", parts));

/** Without the parentheses that a bar makes needless. @param {Part[]} parts */
function bare(parts) {
  const of = parts.length === 1 && parts[0].tag === "mrow" ? parts[0].of : undefined;
  return of && of[0].text === "(" && of[of.length - 1].text === ")" ? of.slice(1, -1) : parts;
}

/** A number; a power of ten as one is written by hand. @param {string} text */
function figure(text) {
  const [digits, exponent] = text.split("e");
  if (text === "inf") return leaf("mn", "∞");
  if (exponent === undefined || text === "nan") return leaf("mn", text);
  const power = exponent.replace(/^\+?(-?)0*/, "$1").replace("-", "−");
  return branch("mrow", [leaf("mn", digits), operator("×"), branch("msup", [leaf("mn", "10"), leaf("mn", power)])]);
}

/** A name: z_norm has an index, dz a d before it, a word stands upright. @param {string} name @returns {Part} */
function symbol(name) {
  const [base, index] = name.split("_");
  if (index !== undefined) return branch("msub", [symbol(base), leaf("mtext", index)]);
  const gradient = /^d(.+)$/u.exec(name)?.[1];
  if (gradient) {
    const d = leaf("mi", "d", { mathvariant: "normal" });
    if (gradient === "norm") return branch("msub", [d, leaf("mtext", "norm")]);
    return branch("mrow", [d, ...(WORDS.test(gradient) ? [SPACE] : []), symbol(gradient)]);
  }
  if (WORDS.test(name)) return leaf("mi", name, { class: MARKED.test(name) ? "trace-norm" : undefined, mathvariant: "normal" });
  return leaf("mi", name);
}

/** With the index k: of z_norm the second one. @param {Part[]} parts */
function indexed(parts) {
  const [only] = parts;
  const k = leaf("mi", "k");
  if (only.tag === "msub" && only.of) return branch("msub", [only.of[0], branch("mrow", [only.of[1], operator(","), k])]);
  return branch("msub", [row(parts), k]);
}

/** Text of a formula to the parts of its picture. @param {string} text */
export const parsed = (text) => new Reader(text).line();

/** @type {ResizeObserver | undefined} */
let observer;

/**
 * A place for a formula, whose sides go to the next line where there is no room beside each other. What is still too wide can be
 * reached and scrolled by keyboard; what is not is no stop of the tab key.
 * @param {string} [classes]
 */
export function formula(classes = "") {
  observer ??= new ResizeObserver((seen, watching) => {
    /** @type {Set<HTMLElement>} */
    const boxes = new Set();
    for (const { target } of seen) {
      const box = /** @type {HTMLElement | null} */ (target.closest(".trace-scroll"));
      if (box) boxes.add(box);
      else watching.unobserve(target); // a side that its formula no longer has
    }
    const wide = new Map([...boxes].map((box) => [box, box.scrollWidth > box.clientWidth + 1]));
    for (const [box, is] of wide) set(box, { tabindex: is ? "0" : null, role: is ? "group" : null, "aria-label": is ? "Wide formula" : null });
  });
  const box = h(`div.trace-scroll${classes}`);
  observer.observe(box);
  return box;
}

/**
 * Shows a formula, each side of its equation a math element, with as few changes as can be.
 * @param {Element & {shows?: string}} box  from formula()
 * @param {string} text
 */
export function typeset(box, text) {
  if (box.shows === text) return;
  box.shows = text;
  const sides = text.split(/ (?==)/);
  updateChildren(box, sides, () => observed(m("math")), (/** @type {Element & {shows?: string}} */ math, side) => {
    if (math.shows === side) return;
    math.shows = side;
    set(/** @type {any} */ (math), { alttext: side, "aria-label": side });
    patch(math, parsed(side));
  });
}

/** @param {Element} math */
function observed(math) {
  observer?.observe(math);
  return math;
}

/** @param {Element} parent @param {Part[]} parts */
function patch(parent, parts) {
  while (parent.childNodes.length > parts.length) /** @type {ChildNode} */ (parent.lastChild).remove();
  parts.forEach((part, k) => {
    let element = /** @type {Element} */ (parent.childNodes[k]);
    if (element?.localName !== part.tag) {
      const fresh = m(part.tag);
      if (element) element.replaceWith(fresh);
      else parent.append(fresh);
      element = fresh;
    }
    for (const name of ["class", "mathvariant", "width", "movablelimits"]) {
      const value = part.props?.[name];
      if (value === undefined) element.removeAttribute(name);
      else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
    }
    if (part.of) {
      if (element.firstChild?.nodeType === Node.TEXT_NODE) element.textContent = "";
      patch(element, part.of);
    } else if (element.childNodes.length !== 1 || element.firstChild?.nodeValue !== part.text) {
      const only = element.firstChild;
      if (element.childNodes.length === 1 && only?.nodeType === Node.TEXT_NODE) only.nodeValue = part.text ?? "";
      else element.textContent = part.text ?? "";
    }
  });
}
