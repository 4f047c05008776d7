// The shell: the bar, the pages by address, the keyboard.

import { h, link, setText } from "./dom.js";
import { ask, Refused, RunFeed } from "./live.js";
import * as compare from "./pages/compare.js";
import * as events from "./pages/events.js";
import * as metrics from "./pages/metrics.js";
import * as pipeline from "./pages/pipeline.js";
import * as run from "./pages/run.js";
import * as runs from "./pages/runs.js";
import * as settings from "./pages/settings.js";
import * as trajectories from "./pages/trajectories.js";

const OF_RUN = { "": ["Run", run], pipeline: ["Pipeline", pipeline], trajectories: ["Trajectories", trajectories], events: ["Events", events], settings: ["Settings", settings] };
const OTHERS = { "/": runs, "/compare": compare, "/metrics": metrics };
const HELP = [["1 … 6", "pages of the run, then Compare"], ["r", "all runs"], ["[  ]", "previous, next run"], ["/", "search or filter"],
  ["x", "charts by step or by time"], ["s", "smoothing of the charts"], ["n  p", "next, previous page of trajectories"], ["t", "dark or light"], ["?", "this help"]];

const bar = document.getElementById("bar"), page = document.getElementById("page");
const shell = { feed: null, runIds: [], leave: null };

// --- the bar -----------------------------------------------------------------------------------------------------
const picker = h("select", { "aria-label": "run", onchange: () => go(address(picker.value, place().page)) });
const tabs = h("nav", { "aria-label": "pages" });
const dot = h("i", { class: "dot" }), stateText = h("span", null, "");
const theme = h("button", { class: "quiet", title: "dark or light (t)", "aria-label": "dark or light", onclick: switchTheme }, "◐");
const help = h("button", { class: "quiet", title: "keyboard (?)", "aria-label": "keyboard", onclick: showHelp }, "?");
bar.append(
  h("div", { class: "first" }, link("/", { class: "brand", "aria-label": "all runs" }, h("img", { src: "/static/favicon.svg", alt: "" }), h("span", null, "slipstream")), picker),
  tabs, h("span", { class: "grow" }), h("span", { class: "state" }, dot, stateText), theme, help);

function address(id, name = "") {
  return `/runs/${encodeURIComponent(id)}${name ? `/${name}` : ""}`;
}

/** The run and the page that the address names. */
function place() {
  const [, first, id, name] = location.pathname.split("/");
  return first === "runs" ? { id: decodeURIComponent(id), page: name || "" } : { id: null, page: location.pathname };
}

function showBar() {
  const here = place(), id = here.id || shell.feed?.id;
  picker.replaceChildren(...(id ? [] : [h("option", { value: "" }, "choose a run")]),
    ...shell.runIds.map((each) => h("option", { value: each, selected: each === id }, each)));
  picker.classList.toggle("hidden", !shell.runIds.length);
  const own = id ? Object.entries(OF_RUN).map(([name, [title]]) => tab(address(id, name), title, here.id !== null && here.page === name)) : [];
  tabs.replaceChildren(...own, tab("/compare", "Compare", here.page === "/compare"));
  showState();
}

function tab(to, title, isHere) {
  return link(to, { "aria-current": isHere ? "page" : null }, title);
}

function showState() {
  const feed = place().id ? shell.feed : null;
  const [kind, text] = !feed ? ["", ""] : feed.state === "closed" ? ["bad", "not connected"]
    : feed.state === "connecting" ? ["warn", "connecting"] : feed.view?.is_live ? ["good", "live"] : ["", "not running"];
  dot.className = `dot ${kind}`;
  dot.classList.toggle("hidden", !feed);
  setText(stateText, text);
}

// --- pages -------------------------------------------------------------------------------------------------------
export function go(to, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", to);
  show();
}

function feedOf(id) {
  if (shell.feed?.id !== id) {
    shell.feed?.close();
    shell.feed = new RunFeed(id);
    for (const name of ["state", "view"]) shell.feed.addEventListener(name, showState);
  }
  return shell.feed;
}

async function show() {
  const here = place(), chosen = here.id === null ? OTHERS[here.page] : OF_RUN[here.page]?.[1];
  shell.leave?.();
  shell.leave = null;
  const context = { feed: here.id === null ? null : feedOf(here.id), go, address, runIds: shell.runIds };
  const root = h("div", null);
  page.replaceChildren(root);
  window.scrollTo(0, 0);
  document.title = here.id ? `${here.id} · slipstream` : "slipstream";
  showBar();
  if (!chosen) { root.append(h("p", { class: "notice bad" }, "404: there is no such page.")); return; }
  try {
    const cleanup = await chosen.show(root, context);
    // Left while it was being loaded.
    if (root.isConnected) shell.leave = cleanup; else cleanup?.();
  } catch (error) {
    root.append(h("p", { class: "notice bad" }, error instanceof Refused ? error.message : `The server does not answer (${error.message}).`));
    if (!(error instanceof Refused)) console.warn(error);
  }
}

async function refreshRuns() {
  try {
    const found = (await ask("/api/runs")).map((each) => each.id);
    const isNew = found.join() !== shell.runIds.join();
    shell.runIds.splice(0, shell.runIds.length, ...found);
    if (isNew) showBar();
  } catch { /* the state in the bar says that the server is away */ }
}

document.addEventListener("click", (event) => {
  const target = event.target.closest?.("a[href^='/']");
  if (!target || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  go(target.getAttribute("href"));
});
window.addEventListener("popstate", show);

// --- theme, help, keyboard ---------------------------------------------------------------------------------------
function switchTheme() {
  const root = document.documentElement, isDark = getComputedStyle(root).colorScheme === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not kept */ }
  show();
}

function showHelp() {
  const dialog = h("dialog", { onclose: () => dialog.remove(), onclick: (event) => event.target === dialog && dialog.close() },
    h("h2", null, "Keyboard"), h("dl", { class: "facts", css: { "margin-top": "10px" } }, HELP.map(([keys, text]) => [h("dt", null, h("kbd", null, keys)), h("dd", null, text)])));
  document.body.append(dialog);
  dialog.showModal();
}

function onKey(event) {
  if (event.metaKey || event.ctrlKey || event.altKey || event.target.matches("input, select, textarea") || document.querySelector("dialog")) {
    if (event.key === "Escape" && event.target.matches("input")) event.target.blur();
    return;
  }
  const id = place().id || shell.feed?.id, names = Object.keys(OF_RUN);
  const digit = Number(event.key);
  if (digit >= 1 && digit <= names.length && id) go(address(id, names[digit - 1]));
  else if (digit === names.length + 1) go("/compare");
  else if (event.key === "r") go("/");
  else if (event.key === "t") switchTheme();
  else if (event.key === "?") showHelp();
  else if (event.key === "/") page.querySelector("input[type=search]")?.focus();
  else if ((event.key === "[" || event.key === "]") && id) {
    const next = shell.runIds[shell.runIds.indexOf(id) + (event.key === "]" ? 1 : -1)];
    if (next) go(address(next, place().page.startsWith("/") ? "" : place().page));
  } else {
    page.dispatchEvent(new CustomEvent("shortcut", { detail: event.key }));
    return;
  }
  event.preventDefault();
}
document.addEventListener("keydown", onKey);

await refreshRuns();
// One run alone is what its reader wants to see.
if (location.pathname === "/" && shell.runIds.length === 1) history.replaceState(null, "", address(shell.runIds[0]));
show();
setInterval(() => document.hidden || refreshRuns(), 5000);
