// A run at a glance: its figures, who waits for whom, its health, its curves.

import { Chart, color, smooth } from "../charts.js";
import { DASH, duration, fixed, h, link, percent, renew, setText, short, whole } from "../dom.js";
import { askOnce } from "../live.js";

const ACCURACY = "eval/accuracy_", MISMATCH = /^learner\/by_lag\/([^/]+)\/mismatch_k3$/;
const FIGURES = ["learner/reward_mean", "lag/mean", "lag/max", "generators/tokens_per_s", "learner/tokens_per_s", "learner/wait_s", "learner/train_s", "learner/publish_s"];
const RECENT = 20;
export const PHASES = { training: "good", running: "good", starting: "busy", finishing: "busy", finished: "", stopped: "warn", failed: "bad" };
const kept = (name, otherwise) => { try { return localStorage.getItem(name) ?? otherwise; } catch { return otherwise; } };
const keep = (name, value) => { try { localStorage.setItem(name, value); } catch { /* not kept */ } };

/** Name, state and progress of a run: the head of all of its pages. */
export function makeHead(root, feed) {
  const dot = h("i", { class: "dot" }), phase = h("span", null, "…"), detail = h("span", { class: "muted" }, ""), level = h("i", null);
  const notices = h("div", null);
  root.append(h("div", { class: "head" }, h("h1", null, feed.id), h("span", { class: "phase" }, dot, phase), detail),
    h("div", { class: "progress" }, level), notices);
  return () => {
    const { view } = feed;
    if (!view) return;
    const step = Math.max(view.step, feed.last("step") ?? 0);
    dot.className = `dot ${PHASES[view.phase] ?? ""}`;
    setText(phase, view.phase);
    const status = view.status, left = timeLeft(feed);
    const facts = [`step ${whole(step)}${view.max_steps ? ` of ${whole(view.max_steps)}` : ""}`, status && `version ${whole(status.version)}`,
      status?.checkpoint && `checkpoint at step ${whole(status.checkpoint.step)}`, left !== null && `at most ${duration(left)} left`];
    setText(detail, facts.filter(Boolean).join(" · "));
    level.style.width = `${view.max_steps ? Math.min(100, (100 * step) / view.max_steps) : 0}%`;
    renew(notices, [view.problem, view.phase, status?.detail], () => [
      status?.detail && h("p", { class: `notice ${view.phase === "failed" ? "bad" : ""}` }, status.detail),
      view.problem && (view.is_live || !view.num_rows) && h("p", { class: "notice" }, view.problem, status ? " What is shown of the roles is from before." : ""),
    ].filter(Boolean));
  };
}

/** Accuracies of the held-out sets, the sampled one first: it is the one that a run reports. */
const heldOut = (keys) => keys.filter((key) => key.startsWith(ACCURACY)).sort((a, b) => Number(b.endsWith("_sampled")) - Number(a.endsWith("_sampled")));

/** Seconds to the last step at the pace of the newest ones; null where that cannot be said. */
function timeLeft(feed) {
  const { view, columns } = feed;
  if (!view.is_live || !view.max_steps || feed.length < 2) return null;
  const from = Math.max(0, feed.length - RECENT), last = feed.length - 1;
  const steps = columns.step[last] - columns.step[from];
  return steps > 0 ? ((columns.time_s[last] - columns.time_s[from]) / steps) * (view.max_steps - columns.step[last]) : null;
}

export async function show(root, { feed }) {
  const updateHead = makeHead(root, feed);
  const figures = h("dl", { class: "figures" }), waits = h("div", null), times = h("div", { class: "bars" }), health = h("div", null);
  const section = (title, body, extra) => h("section", null, h("h2", null, title, extra), body);
  root.append(figures, h("div", { class: "two" },
    h("div", null, section("Who waits for whom", waits), section("Where the wall time goes", times)), section("Health", health)));
  const [meanings] = await Promise.all([askOnce("/api/meanings"), feed.want(FIGURES)]);
  const curves = new Curves(root, feed, meanings);

  function update() {
    updateHead();
    drawFigures(figures, feed);
    if (feed.view) { drawWaits(waits, feed); drawTimes(times, feed.view.times); drawHealth(health, feed.view); }
  }
  const onNews = () => { update(); curves.update(); };
  for (const name of ["view", "rows"]) feed.addEventListener(name, onNews);
  const page = root.parentElement;
  page.addEventListener("shortcut", curves.onKey);
  await curves.start();
  update();
  return () => {
    for (const name of ["view", "rows"]) feed.removeEventListener(name, onNews);
    page.removeEventListener("shortcut", curves.onKey);
    curves.destroy();
  };
}

// --- figures -----------------------------------------------------------------------------------------------------
function mean(feed, key, back = 0) {
  const column = feed.columns[key] || [], end = column.length - back;
  const found = column.slice(Math.max(0, end - 10), Math.max(0, end)).filter((value) => value !== null);
  return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
}

function drawFigures(element, feed) {
  const { view } = feed, status = view?.status, maxLag = view?.max_lag ?? null, sum = (key) => (feed.columns[key] || []).slice(-RECENT).reduce((total, value) => total + (value ?? 0), 0);
  const reward = mean(feed, "learner/reward_mean"), before = mean(feed, "learner/reward_mean", 10);
  const waited = sum("learner/wait_s"), whole_s = waited + sum("learner/train_s") + sum("learner/publish_s");
  const final = (!view?.is_live && view?.summary?.evaluation) || null;
  const accuracies = heldOut(final ? Object.keys(final) : feed.keys).map((key) => [key.slice(ACCURACY.length), final ? final[key] : feed.last(key)]);
  const monitored = feed.columns.step?.[(feed.columns[heldOut(feed.keys)[0]] ?? []).findLastIndex((value) => value !== null)];
  const prompts = view?.summary?.num_final_prompts?.[accuracies[0]?.[0]];
  const measured = final ? `final evaluation${prompts ? `, ${prompts} prompts` : ""}` : `monitored at step ${whole(monitored)}`;
  const change = reward !== null && before !== null ? `${reward >= before ? "+" : "−"}${Math.abs(reward - before).toFixed(3)} in 10 steps` : "mean of 10 steps";
  const perStep = feed.length > 1 ? whole_s / Math.min(RECENT, feed.length) : null;
  const busy = status && view.is_live ? status.generators_busy_fraction : null;
  const rows = [
    ["Reward", fixed(reward), "", change],
    ["Held-out accuracy", fixed(accuracies[0]?.[1]), accuracies[0]?.[0] ?? "", accuracies.length ? [...accuracies.slice(1).map(([name, value]) => `${fixed(value)} ${name}`), measured].join(" · ") : "no evaluation yet"],
    ["Lag", fixed(feed.last("lag/mean"), 2), "versions", `oldest ${short(feed.last("lag/max"))}${maxLag === null ? "" : `, bound ${maxLag}`}`],
    ["Generated", whole(feed.last("generators/tokens_per_s")), "tokens/s", busy === null ? "all generators" : `generators ${percent(busy)} busy`],
    ["Learned", whole(feed.last("learner/tokens_per_s")), "tokens/s", `${short(perStep)} s a step`],
    ["Learner waits", percent(whole_s ? waited / whole_s : null), "", `of its last ${Math.min(RECENT, feed.length)} steps`],
    ["Discarded", percent(status?.waste_fraction, 1), "", status ? `of the tokens; length bias ${fixed(status.length_bias, 2)}` : "of the tokens"],
  ];
  renew(element, rows, () => rows.map(([name, value, unit, note]) =>
    h("div", null, h("dt", null, name), h("dd", { class: "value" }, value, unit && value !== DASH ? h("small", null, unit) : null), h("dd", { class: "note", title: note }, note))));
}

// --- waits, times, health ----------------------------------------------------------------------------------------
function drawWaits(element, feed) {
  const { view } = feed, waits = (view.is_live && !view.problem && view.status?.waits) || [];
  renew(element, [waits, view.is_live, Boolean(view.status)], () => {
    if (!view.is_live) return h("p", { class: "empty" }, "The run is over: nobody waits.");
    if (!view.status) return h("p", { class: "empty" }, "Not known: this run has no store that answers.");
    if (!waits.length) return h("p", { class: "empty" }, h("i", { class: "dot good" }), " Nobody waits.");
    return h("ul", { class: "list" }, waits.map((wait) => h("li", null, h("i", { class: "dot warn" }), " ", h("span", { class: "name" }, wait.waiter),
      h("span", { class: "muted" }, " for "), h("span", { class: "name" }, wait.blocked_on), h("span", { class: "muted" }, `: ${wait.reason}`))));
  });
}

const PHASE_COLORS = { waiting: "--orange", prompts: "--orange", store: "--red", compute: "--blue", working: "--blue", routing: "--blue", busy: "--blue", batch: "--teal", updating: "--violet",
  publishing: "--violet", optimizer: "--green", storing: "--teal", evaluating: "--gold", committing: "--grey", checkpoint: "--red", rest: "--strong" };
const PHASE_WORDS = { waiting: "waiting", prompts: "waiting for prompts", store: "blocked by the store", compute: "forward and backward", working: "engine at work", batch: "preparing batches",
  updating: "updating weights", evaluating: "evaluating", checkpoint: "checkpoints" };

function drawTimes(element, times) {
  renew(element, times, () => {
    if (!times.roles) return h("p", { class: "empty" }, "No step yet.");
    return times.roles.map((role) => {
      const shares = Object.entries(role.shares).filter(([name, share]) => share >= 0.005 && !(role.role === "broker" && name === "waiting")).sort((a, b) => b[1] - a[1]);
      const name = role.count === 1 ? role.role : `${role.count} ${role.role}s`;
      return [h("span", { title: `${fixed(role.cpu_s)} processor seconds for each step` }, name),
        h("div", { class: "bar" }, shares.map(([phase, share]) => h("i", { title: `${PHASE_WORDS[phase] ?? phase} ${percent(share)}`, css: { width: `${100 * share}%`, background: `var(${PHASE_COLORS[phase] ?? "--grey"})` } }))),
        h("div", { class: "keys" }, shares.slice(0, 5).map(([phase, share]) => h("span", null, h("i", { css: { background: `var(${PHASE_COLORS[phase] ?? "--grey"})` } }), `${PHASE_WORDS[phase] ?? phase} ${percent(share)}`)))];
    });
  });
}

function drawHealth(element, view) {
  renew(element, view.warnings, () => {
    if (!view.warnings.length) return h("p", { class: "empty" }, h("i", { class: "dot good" }), " Every watched metric is in its healthy range.");
    return h("ul", { class: "list" }, view.warnings.map((each) => h("li", null, h("i", { class: "dot warn" }), " ",
      link(`/metrics#${each.metric}`, { class: "mono" }, each.metric), ` is ${short(each.value)}`, h("span", { class: "muted" }, `, healthy ${each.healthy}, since step ${whole(each.since_step)}`), h("div", null, each.advice))));
  });
}

// --- curves ------------------------------------------------------------------------------------------------------
class Curves {
  constructor(root, feed, meanings) {
    Object.assign(this, { feed, charts: [], specs: [] });
    this.meanings = new Map(meanings.map((each) => [each.key, each]));
    this.axis = kept("axis", "step");
    this.width = Number(kept("smooth", "10"));
    this.own = JSON.parse(kept("charts", "[]"));
    this.grid = h("div", { class: "charts" });
    this.tools = h("div", { class: "tools" });
    this.onKey = (event) => {
      if (event.detail === "x") this.choose("axis", this.axis === "step" ? "time" : "step");
      if (event.detail === "s") this.choose("smooth", { 1: 10, 10: 50, 50: 1 }[this.width]);
    };
    root.append(this.tools, this.grid);
  }

  specify() {
    const { keys } = this.feed, has = (key) => keys.includes(key);
    const accuracies = heldOut(keys), lags = keys.filter((key) => MISMATCH.test(key)).sort((a, b) => parseInt(MISMATCH.exec(a)[1], 10) - parseInt(MISMATCH.exec(b)[1], 10));
    const named = (key, label) => ({ key, label });
    return [
      { title: "Reward", about: "learner/reward_mean", smooth: true, keys: [named("learner/reward_mean", "mean of the step")] },
      { title: "Held-out accuracy", about: "eval/accuracy_sampled", floor: 0, ceiling: 1, points: true, keys: accuracies.map((key) => named(key, key.slice(ACCURACY.length))) },
      { title: "Lag, versions", about: "lag/mean", floor: 0, marks: (this.feed.view?.max_lag ?? null) === null ? [] : [{ value: this.feed.view.max_lag, label: "bound" }], keys: [named("lag/mean", "mean"), named("lag/max", "oldest")] },
      { title: "Tokens per second", about: "learner/tokens_per_s", floor: 0, format: whole, keys: [named("generators/tokens_per_s", "generated"), named("learner/tokens_per_s", "learned")] },
      { title: "Seconds of a step", about: "learner/wait_s", floor: 0, keys: [named("learner/train_s", "training"), named("learner/wait_s", "waiting"), named("learner/publish_s", "publishing")] },
      { title: "Mismatch k3 by lag, nats", about: "learner/mismatch_k3", log: true, keys: lags.map((key) => named(key, MISMATCH.exec(key)[1])) },
      { title: "Entropy, nats", about: "learner/entropy", floor: 0, smooth: true, keys: [named("learner/entropy", "at the sampled tokens")] },
      { title: "Gradient norm", about: "learner/grad_norm", floor: 0, smooth: true, keys: [named("learner/grad_norm", "before clipping")] },
      { title: "Effective sample size", about: "learner/ess", floor: 0, ceiling: 1, keys: [named("learner/ess", "tokens"), named("learner/ess_trajectories", "trajectories")] },
      { title: "Loss", about: "learner/loss", smooth: true, keys: [named("learner/loss", "mean over updates"), named("eval/loss", "held out")] },
      { title: "Weights on their way, seconds", about: "weights/sync_s", floor: 0, keys: [named("weights/sync_s", "whole"), named("weights/pause_s", "longest pause")] },
      { title: "Shares of the data", about: "buffer/waste_fraction", floor: 0, keys: [named("learner/idle_fraction", "clipped"), named("learner/stale_fraction", "too old"), named("buffer/filtered_fraction", "filtered"), named("buffer/waste_fraction", "discarded")] },
      ...this.own.map((key) => ({ title: key, about: key, smooth: true, isOwn: true, keys: [named(key, "")] })),
    ].map((spec) => ({ ...spec, keys: spec.keys.filter(({ key }) => has(key)) })).filter((spec) => spec.keys.length);
  }

  async start() {
    this.drawTools();
    await this.rebuild();
  }

  /** Make the charts anew: when a metric appears for the first time, or when the reader wants others. */
  async rebuild() {
    const specs = this.specify(), shown = JSON.stringify(specs);
    this.shown = shown;
    await this.feed.want(specs.flatMap((spec) => spec.keys.map(({ key }) => key)));
    // Left, or wanted otherwise, while the columns were read.
    if (!this.grid.isConnected || this.shown !== shown) return;
    this.specs = specs;
    for (const chart of this.charts) chart.destroy();
    this.charts = this.specs.map((spec) => this.make(spec));
    this.grid.replaceChildren(...this.charts.map((chart) => chart.element));
    if (!this.charts.length) this.grid.append(h("p", { class: "empty" }, "The curves begin with the first step."));
    this.draw();
  }

  make(spec) {
    const isSmooth = spec.smooth && this.width > 1;
    const lines = spec.keys.flatMap(({ label }, index) => isSmooth
      ? [{ label, color: color(index), faint: true }, { label: `mean of ${this.width}`, color: color(index) }]
      : [{ label, color: color(index), points: spec.points }]);
    const about = this.meanings.get(spec.about);
    const title = [link(`/metrics#${spec.about}`, { title: about ? `${spec.about}: ${about.meaning}` : spec.about }, spec.title),
      spec.isOwn && h("button", { class: "quiet", title: "remove this chart", "aria-label": `remove ${spec.title}`, onclick: () => this.remove(spec.about) }, "×")];
    return new Chart({ ...spec, title, lines, x: this.axis === "step" ? "step" : "second" });
  }

  update() {
    if (JSON.stringify(this.specify()) !== this.shown) { this.rebuild(); return; }
    // Rows may come faster than the screen is drawn.
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  draw() {
    const { columns } = this.feed, x = columns[this.axis === "step" ? "step" : "time_s"];
    this.charts.forEach((chart, index) => {
      const spec = this.specs[index], isSmooth = spec.smooth && this.width > 1;
      chart.set(x, spec.keys.flatMap(({ key }) => (isSmooth ? [columns[key], smooth(columns[key], this.width)] : [columns[key]])));
    });
  }

  drawTools() {
    const choice = (name, options, value) => h("span", { class: "choice", role: "group", "aria-label": name }, options.map(([key, text]) =>
      h("button", { "aria-pressed": String(key === value), onclick: () => this.choose(name, key) }, text)));
    const input = h("input", { type: "search", list: "metric-keys", placeholder: "add a metric", "aria-label": "add a metric", onchange: () => this.add(input.value) });
    this.tools.replaceChildren(choice("axis", [["step", "by step"], ["time", "by time"]], this.axis),
      choice("smooth", [[1, "as measured"], [10, "mean of 10"], [50, "of 50"]], this.width), h("span", { class: "grow" }), input,
      h("datalist", { id: "metric-keys" }, this.feed.keys.map((key) => h("option", { value: key }))));
  }

  choose(name, value) {
    if (name === "axis") this.axis = value; else this.width = value;
    keep(name, value);
    this.drawTools();
    this.rebuild();
  }

  add(key) {
    if (!this.feed.keys.includes(key)) return;
    this.setOwn([...new Set([...this.own, key])]);
    this.drawTools();
  }

  remove(key) {
    this.setOwn(this.own.filter((each) => each !== key));
  }

  setOwn(keys) {
    this.own = keys;
    keep("charts", JSON.stringify(keys));
    this.rebuild();
  }

  destroy() {
    cancelAnimationFrame(this.frame);
    for (const chart of this.charts) chart.destroy();
  }
}
