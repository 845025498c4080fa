// What the theme leaves out: levels of headings, regions that scroll, and lists of parameters for keyboards and screen readers.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("[role=heading]:not([aria-level])").forEach((one) => one.setAttribute("aria-level", "2"));
  document.querySelectorAll(".highlight pre, .table-wrapper").forEach((one) => {
    one.tabIndex = 0;
    one.setAttribute("role", "region");
    one.setAttribute("aria-label", one.matches("pre") ? "Code" : "Table");
    one.classList.toggle("wraps", one.matches("pre") && !/[\u2500-\u257f]/.test(one.textContent)); // not a drawing
  });
  document.querySelectorAll(".sig > dl").forEach((one) => {
    one.setAttribute("role", "list"); // Sphinx writes the parameters of a long signature as a <dl> without terms
    [...one.children].forEach((parameter) => parameter.setAttribute("role", "listitem"));
  });
});
