// @ts-check
/** The page: views as tabs, the state in the address, and the tools of all views (link, code, JSON, theme, help). */

import { get } from "./api.js";
import { save } from "./chart/download.js";
import { h, announce, set, unique } from "./dom.js";
import { exportNote } from "./exported.js";
import { encoded } from "./numbers.js";
import { view as race } from "./race/view.js";
import { view as recording } from "./recording/view.js";
import { view as stack } from "./stack/view.js";
import { choice, format, Store } from "./state.js";
import { view as streams } from "./streams/view.js";
import { view as trace } from "./trace/view.js";

/**
 * @typedef {object} App
 * @property {any} meta  parameters, wirings, examples and recordings, from the server
 * @property {Store} store
 * @property {(text: string) => void} announce
 */

/**
 * @typedef {object} Mounted
 * @property {(state: import("./state.js").State, changed: Set<string>) => any} show
 * @property {() => void} [hide]
 * @property {() => string} code  Python that computes the same numbers
 * @property {() => any} data  the numbers of the view, as JSON types
 * @property {(key: string) => boolean} [key]  handles a letter or digit; returns whether it has a meaning here
 * @property {[string, string][]} [keys]  the keys and their meaning, for the help
 */

/**
 * @typedef {object} View
 * @property {string} name
 * @property {string} title
 * @property {(meta: any) => import("./state.js").Fields} fields
 * @property {(root: HTMLElement, app: App) => Mounted} mount
 */

/** @type {View[]} */
const VIEWS = [stack, streams, trace, recording, race];

/** Preferences that outlive the page. */
const preferences = {
  get: (/** @type {string} */ name) => { try { return localStorage.getItem(name); } catch { return null; } },
  set: (/** @type {string} */ name, /** @type {string} */ value) => { try { localStorage.setItem(name, value); } catch { /* not stored */ } },
};

/** @param {string[]} notices */
function showNotices(notices) {
  const place = /** @type {HTMLElement} */ (document.getElementById("notices"));
  place.replaceChildren(...notices.map((text) => {
    const line = h("p", null, h("span", null, text), h("button.quiet", { type: "button", "aria-label": "Dismiss", onclick: () => line.remove() }, "✕"));
    return line;
  }));
}

async function start() {
  const main = /** @type {HTMLElement} */ (document.getElementById("main"));
  theme(preferences.get("addnorm-theme") ?? "auto");
  // The address is the state's: a jump within the page must leave it.
  document.querySelector(".skip")?.addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  let meta;
  try {
    meta = await get("/api/meta");
  } catch (error) {
    main.append(h("p.wrong", { role: "alert" }, /** @type {Error} */ (error).message));
    return;
  }
  const fields = Object.assign({ view: choice(VIEWS[0].name, VIEWS.map((view) => view.name)) }, ...VIEWS.map((view) => view.fields(meta)));
  const store = new Store(fields, showNotices);
  /** @type {App} */
  const app = { meta, store, announce };
  const panels = VIEWS.map((view) => ({
    view,
    tab: h("button", { type: "button", role: "tab", id: `tab-${view.name}`, "aria-controls": `panel-${view.name}`, onclick: () => store.set({ view: view.name }) }, view.title),
    root: h("section", { role: "tabpanel", id: `panel-${view.name}`, "aria-labelledby": `tab-${view.name}`, hidden: "" }),
    /** @type {Mounted | undefined} */
    mounted: undefined,
  }));
  const tabs = /** @type {HTMLElement} */ (document.getElementById("tabs"));
  tabs.append(...panels.map((panel) => panel.tab));
  main.append(...panels.map((panel) => panel.root));
  const current = () => /** @type {typeof panels[number]} */ (panels.find((panel) => panel.view.name === store.state.view));
  tabs.addEventListener("keydown", (event) => {
    const at = panels.indexOf(current());
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: panels.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const panel = panels[(to + panels.length) % panels.length];
    store.set({ view: panel.view.name });
    panel.tab.focus();
  });

  /** @param {import("./state.js").State} state @param {Set<string>} changed */
  function show(state, changed) {
    for (const panel of panels) {
      const here = panel.view.name === state.view;
      set(panel.tab, { "aria-selected": String(here), tabindex: here ? 0 : -1 });
      if (!here && !panel.root.hidden) panel.mounted?.hide?.();
      panel.root.hidden = !here;
      if (here) {
        document.title = `${panel.view.title} · addnorm explorer`;
        set(/** @type {HTMLElement} */ (document.getElementById("heading")), { text: `addnorm explorer: ${panel.view.title}` });
        panel.mounted ??= meta.export && panel.view === race ? absent(panel.root, meta) : panel.view.mount(panel.root, app);
        panel.mounted.show(state, changed);
      }
    }
  }
  tools(app, () => /** @type {Mounted} */ (current().mounted), () => current().view);
  store.subscribe(show);
  show(store.state, new Set(Object.keys(fields)));
}

/** In place of the race, which needs a server, on an exported page. @param {HTMLElement} root @param {any} meta @returns {Mounted} */
function absent(root, meta) {
  root.append(h("h2", null, "Two wirings, trained side by side"), exportNote(meta, "A race trains two small models, so it runs on your own machine:"));
  return { show() {}, code: () => `# ${meta.export.install}\n# addnorm explore`, data: () => null };
}

/** @param {App} app @param {() => Mounted} mounted @param {() => View} view */
function tools(app, mounted, view) {
  const place = /** @type {HTMLElement} */ (document.getElementById("tools"));
  const copied = h("span.unseen", { role: "status" });
  /** @param {string} text @param {string} what */
  const copy = async (text, what) => {
    try {
      await navigator.clipboard.writeText(text);
      copied.textContent = `${what} copied.`;
    } catch {
      copied.textContent = `${what} could not be copied: the browser blocks access to the clipboard.`;
    }
    announce(copied.textContent);
    showNotices([copied.textContent]);
  };
  const link = () => new URL(location.pathname, location.href).href + format(app.store.state, app.store.fields);
  const button = (/** @type {string} */ text, /** @type {() => void} */ onclick, /** @type {any} */ more = {}) => h("button.plain", { type: "button", onclick, ...more }, text);
  const themes = ["auto", "light", "dark"];
  const themed = button(`Theme: ${preferences.get("addnorm-theme") ?? "auto"}`, () => {
    const next = themes[(themes.indexOf(preferences.get("addnorm-theme") ?? "auto") + 1) % themes.length];
    preferences.set("addnorm-theme", next);
    theme(next);
    themed.textContent = `Theme: ${next}`;
  });
  place.append(
    button("Copy link", () => copy(link(), "The link")),
    button("Show code", () => codeDialog(mounted().code(), copy)),
    button("JSON", () => save(`addnorm-${view().name}.json`, "application/json", JSON.stringify(encoded(mounted().data()), null, 1))),
    themed,
    button("?", () => helpDialog(app, mounted()), { "aria-label": "Help and keys" }),
    copied,
  );
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const at = /** @type {HTMLElement} */ (event.target);
    if (preferences.get("addnorm-keys") === "off" || at.matches?.("input:not([type=range]):not([type=radio]):not([type=checkbox]), select, textarea")) return;
    if (event.key === "?") helpDialog(app, mounted());
    else if (!mounted().key?.(event.key)) return;
    event.preventDefault();
  });
}

/** @param {string} title @param {...any} children */
function dialog(title, ...children) {
  const id = unique("dialog");
  const box = h("dialog", { "aria-labelledby": id, onclose: () => box.remove() }, h("h2", { id }, title), ...children);
  document.body.append(box);
  box.showModal();
  return box;
}

/** @param {string} code @param {(text: string, what: string) => void} copy */
function codeDialog(code, copy) {
  const box = dialog(
    "Python code for this view",
    h("pre", { tabindex: 0 }, h("code", null, code)),
    h("div.buttons", null,
      h("button.plain", { type: "button", onclick: () => { box.close(); copy(code, "The code"); } }, "Copy"),
      h("button.main", { type: "button", onclick: () => box.close() }, "Close")),
  );
}

/** @param {App} app @param {Mounted} mounted */
function helpDialog({ meta }, mounted) {
  /** @type {[string, string][]} */
  const keys = [
    ...(mounted.keys ?? []),
    ["← →", "in a chart: move the data cursor; with Shift by ten places"],
    ["↑ ↓", "in a chart: choose the series that is read out"],
    ["Home End", "in a chart: go to the first or the last place"],
    ["?", "show this help"],
  ];
  const on = preferences.get("addnorm-keys") !== "off";
  const box = dialog(
    "Keys",
    h("dl.keys", null, ...keys.flatMap(([key, meaning]) => [h("dt", null, ...key.split(" ").flatMap((label) => [h("kbd", null, label), " "])), h("dd", null, meaning)])),
    h("label.choice", null,
      h("input", { type: "checkbox", ...(on ? { checked: true } : {}), onchange: (/** @type {any} */ event) => preferences.set("addnorm-keys", event.target.checked ? "on" : "off") }),
      "Enable single-key shortcuts"),
    h("p.lead", null, "The address of the page holds all settings. Each chart has its numbers as a table and as files. "
      + (meta.export ? `The numbers were computed beforehand by addnorm ${meta.version}; nothing is sent anywhere.` : "Everything is computed on this machine by addnorm; nothing is sent anywhere else.")),
    h("div.buttons", null, h("button.main", { type: "button", onclick: () => box.close() }, "Close")),
  );
}

/** @param {string} name */
function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

start();
