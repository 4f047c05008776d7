// Runs over each other: curves, final values, settings that differ.

import { Chart, color, smooth } from "../charts.js";
import { DASH, h, plain, renew, short, table } from "../dom.js";
import { ask, askOnce, runPath } from "../live.js";

const DEFAULT_KEYS = ["eval/accuracy_sampled", "learner/reward_mean", "lag/mean", "generators/tokens_per_s", "learner/entropy", "learner/mismatch_k3"];
const SMOOTH = /reward_mean|loss|grad_norm|entropy/;
const PLACE = new Set(["name", "runs_dir", "resume"]);
const MAX_RUNS = 8, POLL_MS = 3000;
const split = (text) => (text || "").split(",").filter(Boolean);

export async function show(root, { go, runIds }) {
  const asked = new URLSearchParams(location.search);
  const runs = split(asked.get("runs")).filter((id) => runIds.includes(id)).slice(0, MAX_RUNS);
  const keys = asked.has("keys") ? split(asked.get("keys")) : DEFAULT_KEYS, axis = asked.get("x") === "time" ? "time" : "step";
  const open = (changes) => {
    const next = { runs, keys, x: axis, ...changes };
    go(`/compare?runs=${next.runs.map(encodeURIComponent).join(",")}&keys=${next.keys.map(encodeURIComponent).join(",")}&x=${next.x}`, { replace: true });
  };
  const toggle = (list, value) => (list.includes(value) ? list.filter((each) => each !== value) : [...list, value]);
  const dot = (id) => h("i", { class: "dot", css: { background: runs.includes(id) ? color(runs.indexOf(id)) : "transparent", "box-shadow": "inset 0 0 0 1px var(--strong)" } });
  root.append(h("div", { class: "head" }, h("h1", null, "Compare")),
    h("div", { class: "tools" }, runIds.slice(0, 40).map((id) => h("label", { class: "check" },
      h("input", { type: "checkbox", checked: runs.includes(id), disabled: !runs.includes(id) && runs.length >= MAX_RUNS, onchange: () => open({ runs: toggle(runs, id) }) }), dot(id), id))));
  if (!runs.length) { root.append(h("p", { class: "empty" }, runIds.length ? "Choose the runs to compare." : "No run yet.")); return null; }

  const charts = h("div", { class: "charts" }), finals = h("div", null), differences = h("div", null);
  const input = h("input", { type: "search", list: "compare-keys", placeholder: "add a metric", "aria-label": "add a metric", onchange: () => known().includes(input.value) && open({ keys: [...new Set([...keys, input.value])] }) });
  const choices = h("datalist", { id: "compare-keys" });
  root.append(h("div", { class: "tools" }, h("span", { class: "choice", role: "group", "aria-label": "axis" }, [["step", "by step"], ["time", "by time"]].map(([name, text]) =>
    h("button", { "aria-pressed": String(name === axis), onclick: () => open({ x: name }) }, text))), h("span", { class: "grow" }), input, choices),
  charts, h("section", null, h("h2", null, "Newest and final values"), finals), h("section", null, h("h2", null, "Settings that differ"), differences));

  const data = new Map();
  const known = () => [...new Set([...data.values()].flatMap((each) => each.keys))].sort();
  const wanted = ["step", "time_s", ...keys].map(encodeURIComponent).join(",");
  async function load(id) {
    const [series, summary] = await Promise.all([ask(runPath(id, `/series?keys=${wanted}`)), ask(runPath(id, "/summary"))]);
    const before = data.get(id);
    data.set(id, { ...series, summary });
    return before?.position !== series.position || JSON.stringify(before.summary) !== JSON.stringify(summary);
  }
  await Promise.all(runs.map(load));
  renew(choices, known(), () => known().map((key) => h("option", { value: key })));

  const drawn = keys.map((key) => {
    const title = [key, h("button", { class: "quiet", title: "remove this chart", "aria-label": `remove ${key}`, onclick: () => open({ keys: toggle(keys, key) }) }, "×")];
    return new Chart({ title, lines: runs.map((id, index) => ({ label: id, color: color(index) })), floor: /accuracy|tokens_per_s|lag/.test(key) ? 0 : null, ceiling: key.includes("accuracy") ? 1 : null, x: axis === "step" ? "step" : "second" });
  });
  charts.append(...drawn.map((chart) => chart.element));

  function draw() {
    const x = axis === "step" ? "step" : "time_s";
    keys.forEach((key, number) => {
      const tables = runs.map((id) => {
        const { columns, length } = data.get(id), values = columns[key] || new Array(length).fill(null);
        return [columns[x] || [], SMOOTH.test(key) ? smooth(values, 10) : values];
      });
      const joined = tables.some(([steps]) => steps.length) ? uPlot.join(tables, tables.map(() => [1])) : [[], ...tables.map(() => [])];
      // Holes that come from joining are undefined, those of a run null: a line spans both.
      drawn[number].set(joined[0], joined.slice(1).map((values) => values.map((value) => value ?? null)));
    });
    drawFinals();
  }

  function drawFinals() {
    const last = (id, key) => [...(data.get(id).columns[key] || [])].reverse().find((value) => value !== null);
    const names = [...new Set(runs.flatMap((id) => Object.entries(data.get(id).summary).filter(([, value]) => typeof value === "number").map(([name]) => name)))];
    const columns = [{ name: "", class: "key" }, ...runs.map((id) => ({ name: id, class: "num" }))];
    const rows = [["steps", ...runs.map((id) => short(last(id, "step") ?? null))], ...keys.map((key) => [key, ...runs.map((id) => short(last(id, key) ?? null))]),
      ...names.filter((name) => name !== "steps").map((name) => [`summary: ${name}`, ...runs.map((id) => short(data.get(id).summary[name] ?? null))])];
    renew(finals, rows, () => table(columns, rows, { class: "fit" }));
  }

  async function drawSettings() {
    const all = await Promise.all(runs.map(async (id) => new Map((await askOnce(runPath(id, "/settings")).catch(() => [])).map((row) => [row.key, plain(row.value)]))));
    const names = [...new Set(all.flatMap((each) => [...each.keys()]))].filter((key) => !PLACE.has(key) && new Set(all.map((each) => each.get(key))).size > 1);
    const columns = [{ name: "", class: "key" }, ...runs.map((id) => ({ name: id, class: "cell" }))];
    differences.replaceChildren(names.length ? table(columns, names.map((key) => [key, ...all.map((each) => each.get(key) ?? DASH)]), { class: "fit" }) : h("p", { class: "empty" }, runs.length > 1 ? "None." : "Choose a second run."));
  }

  const onKey = (event) => event.detail === "x" && open({ x: axis === "step" ? "time" : "step" });
  root.parentElement.addEventListener("shortcut", onKey);
  const page = root.parentElement;
  draw();
  await drawSettings();
  const timer = setInterval(async () => {
    if (document.hidden) return;
    try {
      if ((await Promise.all(runs.map(load))).some(Boolean)) draw();
    } catch { /* asked again */ }
  }, POLL_MS);
  return () => {
    clearInterval(timer);
    page.removeEventListener("shortcut", onKey);
    for (const chart of drawn) chart.destroy();
  };
}
