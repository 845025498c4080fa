// What the theme leaves out for keyboards and screen readers: levels of headings, and regions that scroll.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("[role=heading]:not([aria-level])").forEach((one) => one.setAttribute("aria-level", "2"));
  document.querySelectorAll(".highlight pre, .table-wrapper").forEach((one) => {
    one.tabIndex = 0;
    one.setAttribute("role", "region");
    one.setAttribute("aria-label", one.matches("pre") ? "Code" : "Table");
  });
});
