// @ts-check
/** Downloads: SVG with the colours and fonts of the page, CSV with all digits, JSON. */

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity", "font-family", "font-size", "font-weight", "text-anchor", "dominant-baseline"];

/** @param {string} name @param {string} type @param {string} content */
export function save(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000); // a browser on a busy machine reads it seconds later
}

/** The drawing with the colours and fonts that it has on the page. @param {SVGSVGElement} drawing @param {string} title */
export function svgText(drawing, title) {
  const copy = /** @type {SVGSVGElement} */ (drawing.cloneNode(true));
  const [from, to] = [drawing.querySelectorAll("*"), copy.querySelectorAll("*")];
  from.forEach((element, k) => {
    const style = getComputedStyle(element);
    for (const name of STYLES) {
      const value = style.getPropertyValue(name);
      if (value) to[k].setAttribute(name, value);
    }
    to[k].removeAttribute("class");
  });
  for (const gone of copy.querySelectorAll("[data-shown='no']")) gone.remove();
  const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const [name, value] of Object.entries({ width: "100%", height: "100%", fill: getComputedStyle(document.body).backgroundColor })) {
    paper.setAttribute(name, value);
  }
  const name = document.createElementNS("http://www.w3.org/2000/svg", "title");
  name.textContent = title;
  copy.prepend(name, paper);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  return new XMLSerializer().serializeToString(copy);
}

/** @param {string[]} head @param {(string | number | null)[][]} rows */
export function csvText(head, rows) {
  /** @param {string | number | null} cell */
  const quoted = (cell) => {
    const text = cell === null ? "" : String(cell);
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [head, ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}
