// @ts-check
/**
 * Elements of HTML, SVG and MathML, made in one line each. No function takes markup as text.
 */

/** @typedef {Record<string, any>} Props  attributes; `on...` is a listener, `text` the text, `data` an object of data-... */
/** @typedef {Node | string | number | null | undefined | false} Child */

const NAMESPACES = {
  html: "http://www.w3.org/1999/xhtml",
  svg: "http://www.w3.org/2000/svg",
  math: "http://www.w3.org/1998/Math/MathML",
};

/**
 * @param {keyof typeof NAMESPACES} language
 * @returns {(tag: string, props?: Props | null, ...children: Child[]) => any}  "p.lead.wide" is a p of two classes
 */
function maker(language) {
  return (tag, props, ...children) => {
    const [name, ...classes] = tag.split(".");
    const element = document.createElementNS(NAMESPACES[language], name);
    if (classes.length) element.setAttribute("class", classes.join(" "));
    set(/** @type {any} */ (element), props ?? {});
    element.append(.../** @type {(Node | string)[]} */ (
      children.filter((child) => child != null && child !== false).map((child) => (typeof child === "number" ? String(child) : child))
    ));
    return element;
  };
}

export const h = maker("html");
export const s = maker("svg");
export const m = maker("math");

/**
 * Sets properties that have changed; null and false remove an attribute.
 * @param {HTMLElement | SVGElement} element
 * @param {Props} props
 */
export function set(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "text") {
      if (element.textContent !== String(value)) element.textContent = String(value);
    } else if (name === "data") {
      for (const [key, of] of Object.entries(value)) element.dataset[key] = String(of);
    } else if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else if (name === "value" || name === "checked" || name === "disabled" || name === "open") {
      if (/** @type {any} */ (element)[name] !== value) /** @type {any} */ (element)[name] = value;
    } else if (value === null || value === undefined || value === false) {
      element.removeAttribute(name);
    } else {
      const text = value === true ? "" : String(value);
      if (element.getAttribute(name) !== text) element.setAttribute(name, text);
    }
  }
  return element;
}

/** What `mark` set last. @type {WeakMap<Element, Record<string, string>>} */
const marked = new WeakMap();

/**
 * Sets the attributes that have changed, without asking the element: for the many marks that are drawn anew at every move, whose
 * attributes are changed only here.
 * @param {SVGElement} element
 * @param {Record<string, string | number>} attributes
 */
export function mark(element, attributes) {
  let last = marked.get(element);
  if (!last) marked.set(element, (last = {}));
  for (const name in attributes) {
    const text = String(attributes[name]);
    if (last[name] !== text) element.setAttribute(name, (last[name] = text));
  }
}

/**
 * One child for each datum; existing children are reused (the data join of D3).
 * @template T
 * @param {Element} parent  has no other children
 * @param {T[]} data
 * @param {(datum: T, index: number) => any} make  a new child
 * @param {(element: any, datum: T, index: number) => void} update  gives it what it shows
 */
export function updateChildren(parent, data, make, update) {
  while (parent.children.length > data.length) /** @type {Element} */ (parent.lastElementChild).remove();
  data.forEach((datum, index) => {
    const element = parent.children[index] ?? parent.appendChild(make(datum, index));
    update(element, datum, index);
  });
}

/** @type {ReturnType<typeof setTimeout> | undefined} */
let waiting;

/**
 * Announces a text to screen readers, in the page's live region. Of several texts in quick succession the last one counts.
 * @param {string} text
 */
export function announce(text) {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    const region = document.getElementById("live");
    if (region) region.textContent = text;
  }, 150);
}

/**
 * An input with its label.
 * @param {string} label
 * @param {any} input
 * @param {{hint?: string, output?: any}} [more]
 */
export function labelled(label, input, { hint, output } = {}) {
  input.id ||= unique("input");
  return h("div.field", { title: hint || null }, h("label.name", { for: input.id }, label), input, output);
}

let count = 0;

/** An id that no other element has. @param {string} name */
export const unique = (name) => `${name}-${++count}`;
