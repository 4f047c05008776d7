// The pipeline of a run, live: prompts, generators, buffer, learner, store; each opens with a click.

import { bytes, DASH, duration, fixed, h, link, percent, renew, short, table, whole } from "../dom.js";
import { describe, drawFlow } from "../flow.js";
import { act, runPath } from "../live.js";
import { makeHead } from "./run.js";

const NARROW = 760;
const TITLES = { prompts: "Prompts", generators: "Generators", buffer: "Buffer", learner: "Learner", store: "Store" };

export async function show(root, { feed }) {
  const updateHead = makeHead(root, feed), picture = h("div", null), details = h("section", null), controls = h("div", null), roles = h("section", null);
  const drains = new Map();
  root.append(picture, details, controls, roles);
  let chosen = TITLES[location.hash.slice(1)] ? location.hash.slice(1) : "generators";

  function choose(id) {
    chosen = id;
    history.replaceState(null, "", `#${id}`);
    draw();
  }

  function draw() {
    updateHead();
    const { view } = feed;
    if (!view) return;
    if (!view.status) {
      renew(picture, view.problem, () => h("p", { class: "empty" }, `There is nothing to draw. ${view.problem}`));
      return;
    }
    const narrow = root.clientWidth < NARROW;
    // Ages alone are no reason to draw anew: the animation would begin again.
    renew(picture, [narrow, chosen, view.is_live, view.phase, view.problem, view.step, view.status.counts, view.status.admission, view.status.ready_by_lag, view.status.memory, view.status.version,
      view.status.announced_version, view.status.waits.map((wait) => [wait.waiter, wait.blocked_on]), view.status.roles.map((role) => [role.name, role.liveness, role.version, role.tokens_per_s, role.running, role.capacity, role.kv_usage])],
    () => keepFocus(picture, () => drawFlow(view, { narrow, chosen, choose })));
    const { pairs, key, make } = DETAILS[chosen](view, describe(view), feed);
    renew(details, [chosen, pairs], () => [h("h2", null, TITLES[chosen]), facts(pairs)]);
    // What a user types and what an action answered stay there when the numbers change.
    renew(controls, [chosen, key], make ?? (() => []));
    drawRoles(roles, view, feed, drains);
  }
  const resized = new ResizeObserver(draw);
  resized.observe(root);
  feed.addEventListener("view", draw);
  feed.addEventListener("rows", updateHead);
  await feed.want(["generators/tokens_per_s", "learner/tokens_per_s"]);
  draw();
  return () => { resized.disconnect(); feed.removeEventListener("view", draw); feed.removeEventListener("rows", updateHead); };
}

/** The station that has the keyboard keeps it when the picture is drawn anew. */
function keepFocus(picture, make) {
  const label = picture.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  const made = make();
  if (label) queueMicrotask(() => picture.querySelector(`g[aria-label="${CSS.escape(label)}"]`)?.focus());
  return made;
}

// --- what a click shows ------------------------------------------------------------------------------------------
const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [h("dt", null, name), h("dd", null, value)]));
const tally = (counts) => Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([name, count]) => `${whole(count)} ${name}`).join(", ") || "none";

const DETAILS = {
  prompts: (view, { status, counts }) => {
    const pairs = [["admitted", `${whole(status.admission.admitted)} of ${whole(status.admission.limit)}: pacing admits no more than the learner will consume in time`],
      ["more are admitted", status.admission.reason || "yes"], ["leased", `${whole(counts.leased)} prompts are with generators`], ["to lease again", `${whole(counts.returned)} came back: their generator left, died or was too slow`],
      ["in short groups", `${whole(counts.open)} groups have some of their answers (${whole(counts.open_members)})`], ["curriculum", Object.keys(counts.curriculum).length ? tally(counts.curriculum) : null]];
    return { pairs };
  },
  generators: (view, flow, feed) => {
    const { status } = flow, scales = view.is_live && status.generators_target !== null;
    const pairs = [["target", status.generators_target === null ? "no launcher keeps their number" : `${whole(status.generators_target)}, kept by the launcher`], ["busy", `${percent(status.generators_busy_fraction)} of their capacity`], ["join", status.address || null]];
    return { pairs, key: scales, make: () => [scales ? scaleForm(feed, status) : null] };
  },
  buffer: (view, { status, counts }) => {
    const complete = counts.became_ready + (Object.entries(counts.reasons).reduce((sum, [name, count]) => sum + (/^rejected: (zero_advantage|no_reward|too_hard|too_easy)/.test(name) ? count : 0), 0));
    const pairs = [["ready by lag", Object.entries(status.ready_by_lag).map(([lag, count]) => `lag ${lag}: ${whole(count)}`).join(", ") || "none"], ["claimed", `${whole(counts.claimed)} groups are with the learner`],
      ["used", `${whole(counts.used)} groups wait for a checkpoint that covers their step${counts.reusable ? `; ${whole(counts.reusable)} may be used again` : ""}`], ["over", tally(counts.outcomes)], ["reasons", tally(counts.reasons)],
      ["became ready", `${whole(counts.became_ready)} of ${whole(complete)} complete groups`], ["trajectories", `${whole(counts.accepted)} accepted, ${whole(counts.trained)} trained on, ${whole(counts.duplicates)} came twice, ${whole(counts.superseded)} came too late`],
      ["refused", tally(counts.refused)], ["length bias", `${fixed(status.length_bias, 3)}: mean length of what was trained on / of what arrived`], ["discarded", `${percent(status.waste_fraction, 1)} of the tokens`]];
    return { pairs };
  },
  learner: (view, { status, learner }, feed) => {
    const row = status.last_row, pairs = [["now", learner ? learner.reason || learner.state : "not there"], ["waits", `${percent(status.learner_wait_fraction)} of its last steps`],
      ["last step", row.step ? `waited ${short(row["learner/wait_s"])} s, trained ${short(row["learner/train_s"])} s, published ${short(row["learner/publish_s"])} s` : "none yet"],
      ["version", `${whole(status.version)} is with all generators${status.announced_version > status.version ? `, ${whole(status.announced_version)} is on its way` : ""}`],
      ["checkpoint", status.checkpoint ? `step ${whole(status.checkpoint.step)}, ${status.checkpoint.name}` : "none yet"], ["lag of its tokens", Object.entries(view.lag_tokens).map(([lag, count]) => `${lag}: ${whole(count)}`).join(", ") || DASH]];
    const pauses = view.is_live && Boolean(learner), paused = learner?.waits_for === "user";
    return { pairs, key: [pauses, paused], make: () => [pauses ? pauseButton(feed, paused) : null, h("p", null, link(`/runs/${encodeURIComponent(feed.id)}`, null, "its curves"))] };
  },
  store: (view, { status, counts }) => {
    const { used_bytes: used, max_bytes: most } = status.memory;
    const pairs = [["memory", `${bytes(used)}${most ? ` of ${bytes(most)} (${percent(used / most)})` : ", no limit"}`], ["trajectories", bytes(counts.payload_bytes)], ["for the archive", `${whole(counts.unarchived)} groups are over and not archived yet`],
      ["answers", view.problem || (view.is_live ? "yes" : "the run is over: as at its end")]];
    return { pairs };
  },
};

// --- actions -----------------------------------------------------------------------------------------------------
function outcome(promise, note, button) {
  button.disabled = true;
  return promise.then((text) => { note.className = "good"; note.textContent = text; }, (error) => { note.className = "bad"; note.textContent = error.message; }).finally(() => { button.disabled = false; });
}

function scaleForm(feed, status) {
  const input = h("input", { type: "number", min: 0, max: 999, value: status.generators_target, "aria-label": "number of generators" }), note = h("span", { role: "status" });
  const button = h("button", { onclick: () => outcome(act(runPath(feed.id, "/scale"), { generators: Number(input.value) }).then(({ before }) => `changes from ${before} to ${input.value}`), note, button) }, "Scale");
  return h("div", { class: "tools" }, "generators", input, button, note);
}

function pauseButton(feed, paused) {
  const note = h("span", { role: "status" });
  const button = h("button", { title: paused ? "the next step begins" : "no further step begins; nothing is lost", onclick: () => outcome(act(runPath(feed.id, "/pause"), { off: paused }).then(() => paused ? "goes on" : "pauses before its next step"), note, button) }, paused ? "Go on" : "Pause");
  return h("div", { class: "tools" }, button, note);
}

function drainButton(feed, name) {
  const note = h("span", { role: "status" });
  const button = h("button", { title: "it returns its prompts and leaves", onclick: () => {
    if (button.dataset.sure) { outcome(act(runPath(feed.id, "/drain"), { generator: name }).then(() => "is asked to leave"), note, button); return; }
    button.dataset.sure = "1";
    button.classList.add("danger");
    button.textContent = "Drain it?";
    setTimeout(() => { delete button.dataset.sure; button.classList.remove("danger"); button.textContent = "Drain"; }, 4000);
  } }, "Drain");
  return [button, " ", note];
}

// --- roles -------------------------------------------------------------------------------------------------------
const COLUMNS = [{ name: "role" }, { name: "state" }, { name: "where", class: "muted" }, { name: "version", class: "num" }, { name: "lag", class: "num" }, { name: "tokens/s", class: "num" }, { name: "in flight", class: "num" },
  { name: "cache", class: "num", title: "share of the KV cache in use" }, { name: "restarts", class: "num" }, { name: "progress", class: "num" }, { name: "heard", class: "num" }, { name: "doing", class: "wide soft" }, { name: "" }];

function drawRoles(element, view, feed, drains) {
  // Seconds that pass are shown in place, and a generator keeps its button, so that a second press confirms the first.
  const { roles } = view.status, still = roles.map((role) => ({ ...role, report_age_s: 0, progress_age_s: 0 }));
  const focused = document.activeElement;
  function drain({ name, role, liveness }) {
    if (!view.is_live || role !== "generator" || liveness !== "alive") { drains.delete(name); return ""; }
    if (!drains.has(name)) drains.set(name, drainButton(feed, name));
    return drains.get(name);
  }
  renew(element, [still, view.is_live], () => [h("h2", null, "Roles"), table(COLUMNS, roles.map((role) => ({
    row: { class: view.is_live ? role.liveness : "gone" },
    cells: [role.name, [h("i", { class: `dot ${!view.is_live || role.liveness === "gone" ? "" : role.liveness === "silent" ? "bad" : role.waits_for ? "warn" : "good"}` }), " ", role.liveness === "alive" ? role.state : view.is_live ? role.liveness : "gone"],
      role.host ? `${role.host}:${role.pid}` : DASH, whole(role.version), whole(role.version_lag), whole(role.tokens_per_s), role.capacity === null ? whole(role.running) : `${whole(role.running)} / ${whole(role.capacity)}`,
      percent(role.kv_usage), whole(role.restarts), h("span", { class: "progressed" }), h("span", { class: "heard" }), role.reason, drain(role)],
  })))]);
  if (element.contains(focused)) focused.focus({ preventScroll: true });
  element.querySelectorAll("tbody tr").forEach((row, index) => {
    row.querySelector(".progressed").textContent = view.is_live ? duration(roles[index].progress_age_s) : DASH;
    row.querySelector(".heard").textContent = view.is_live ? duration(roles[index].report_age_s) : DASH;
  });
}
