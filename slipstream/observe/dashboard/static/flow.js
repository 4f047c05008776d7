// The picture of the pipeline: stations with their numbers, and what flows between them.

import { bytes, DASH, percent, svg, whole } from "./dom.js";

const ROW = 19, PAD = 12, TITLE = 30;
const SHOWN_GENERATORS = 6;

/** What the picture shows, from the view of a run. */
export function describe(view) {
  const status = view.status, counts = status.counts, roles = status.roles;
  const find = (name) => roles.find((role) => role.role === name && role.liveness === "alive") ?? roles.find((role) => role.role === name);
  const isOn = view.is_live && !view.problem;
  const generators = roles.filter((role) => role.role === "generator" && role.liveness !== "gone");
  const waiting = (test) => isOn && status.waits.some(test);
  const outcomes = counts.outcomes;
  return {
    isOn, status, counts, generators, learner: find("learner"), broker: find("broker"), archiver: find("archiver"),
    speed: generators.reduce((sum, role) => sum + (role.liveness === "alive" ? role.tokens_per_s ?? 0 : 0), 0),
    generatorsWait: waiting((wait) => /generator/.test(wait.waiter) || wait.waiter === "all roles"),
    learnerWaits: waiting((wait) => /learner/.test(wait.waiter) || wait.waiter === "all roles"),
    storeBlocks: waiting((wait) => ["the store", "the disk"].includes(wait.blocked_on)),
    isPublishing: status.announced_version > status.version,
    over: outcomes, discarded: (outcomes.rejected ?? 0) + (outcomes.expired ?? 0) + (outcomes.quarantined ?? 0),
  };
}

const text = (x, y, content, kind = "") => svg("text", { x, y, class: kind }, content);

function station({ x, y, width, height, title, note, id, chosen, waits, choose, body }) {
  const open = () => choose(id);
  return svg("g", { class: `station ${chosen === id ? "chosen" : ""} ${waits ? "waits" : ""}`, tabindex: 0, role: "button", "aria-label": title, onclick: open, onkeydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), open()) },
    svg("rect", { class: "box", x, y, width, height, rx: 6 }), text(x + PAD, y + 20, title, "title"), note ? text(x + width - PAD, y + 20, note, "label value") : null, body(x + PAD, y + TITLE, width - 2 * PAD));
}

const rows = (lines) => (x, y, width) => lines.map(([label, value, kind], index) => [text(x, y + 13 + index * ROW, label, "label"), text(x + width, y + 13 + index * ROW, value, `value ${kind || ""}`)]);

function meter(x, y, width, share, kind = "") {
  return [svg("rect", { class: "track", x, y, width, height: 5, rx: 2.5 }), svg("rect", { class: `level ${kind}`, x, y, width: Math.max(0, Math.min(1, share || 0)) * width, height: 5, rx: 2.5 })];
}

const GENERATOR = 46;
function generatorRows(found) {
  return (x, y, width) => found.slice(0, SHOWN_GENERATORS).map((role, index) => {
    const top = y + index * GENERATOR, half = (width - 16) / 2, isAlive = role.liveness === "alive";
    return [index ? svg("line", { class: "split", x1: x, x2: x + width, y1: top - 4, y2: top - 4 }) : null,
      text(x, top + 13, role.name, isAlive ? "" : "bad"), text(x + width, top + 13, isAlive ? `v${role.version ?? DASH} · ${whole(role.tokens_per_s)} tok/s` : role.liveness, `value ${isAlive ? "" : "bad"}`),
      text(x, top + 28, `${whole(role.running)} of ${whole(role.capacity)} in flight`, "label"), text(x + width, top + 28, `cache ${percent(role.kv_usage)}`, "label value"),
      meter(x, top + 33, half, role.capacity ? role.running / role.capacity : 0), meter(x + half + 16, top + 33, half, role.kv_usage, role.kv_usage > 0.95 ? "warn" : "second")];
  }).concat(found.length > SHOWN_GENERATORS ? [text(x, y + SHOWN_GENERATORS * GENERATOR + 12, `and ${found.length - SHOWN_GENERATORS} more`, "label")] : []);
}

/** Stations by id, with their sizes; the places come from the layout. */
function stations(flow, view) {
  const { counts, status, generators, learner } = flow, admission = status.admission;
  const shownGenerators = Math.max(1, Math.min(generators.length, SHOWN_GENERATORS));
  const lags = Object.entries(status.ready_by_lag);
  const box = (lines) => TITLE + lines.length * ROW + 8;
  const prompts = [["admitted", `${whole(admission.admitted)} of ${whole(admission.limit)}`], ["leased", whole(counts.leased)], ["to lease again", whole(counts.returned)], ["in short groups", whole(counts.open)]];
  const buffer = [["ready groups", whole(counts.ready)], ...lags.slice(0, 4).map(([lag, count]) => [`  of lag ${lag}`, whole(count)]), ["claimed", whole(counts.claimed)], ["used", whole(counts.used)], ["discarded", whole(flow.discarded), flow.discarded ? "warn" : ""]];
  const step = [["step", `${whole(view.step)}${view.max_steps ? ` of ${whole(view.max_steps)}` : ""}`], ["version", `${whole(status.version)}${flow.isPublishing ? ` → ${whole(status.announced_version)}` : ""}`], ["learned", `${whole(learner?.tokens_per_s)} tok/s`], ["trained on", `${whole(counts.trained)}`]];
  return {
    prompts: { title: "Prompts", height: box(prompts), body: rows(prompts) },
    generators: { title: "Generators", note: generators.length ? `${whole(generators.filter((role) => role.liveness === "alive").length)} of ${whole(status.generators_target ?? generators.length)} alive` : "", waits: flow.generatorsWait,
      height: TITLE + shownGenerators * GENERATOR + (generators.length > SHOWN_GENERATORS ? 18 : 2), body: generators.length ? generatorRows(generators) : rows([["none is there", ""]]) },
    buffer: { title: "Buffer", waits: flow.storeBlocks, height: box(buffer), body: rows(buffer) },
    learner: { title: "Learner", waits: flow.learnerWaits, height: box(step), body: rows(step) },
  };
}

function wire(path, { moves, waits, kind = "", tip }) {
  const state = `${kind} ${waits ? "waits" : moves ? "moves" : ""}`;
  return [svg("path", { class: `wire ${state}`, d: path }), svg("path", { class: `tip ${state}`, d: tip })];
}
const right = (x, y) => `M${x} ${y}l-7 -4v8z`, down = (x, y) => `M${x} ${y}l-4 -7h8z`, left = (x, y) => `M${x} ${y}l7 -4v8z`;

/** Draw the whole picture into an svg element. */
export function drawFlow(view, { narrow, chosen, choose }) {
  const flow = describe(view), found = stations(flow, view);
  const moving = flow.isOn && view.phase !== "finishing";
  const edges = {
    lease: { label: `${whole(flow.counts.leased)} leased`, moves: moving && flow.counts.leased > 0 && !flow.status.admission.reason, waits: moving && Boolean(flow.status.admission.reason) && flow.generatorsWait },
    arrive: { label: `${whole(flow.speed)} tok/s`, moves: flow.isOn && flow.speed > 0, waits: flow.storeBlocks },
    claim: { label: `${whole(flow.counts.claimed)} claimed`, moves: flow.isOn && !flow.learnerWaits && view.step > 0, waits: flow.learnerWaits },
    weights: { label: flow.isPublishing ? `weights v${flow.status.announced_version} on their way` : `weights v${flow.status.version}`, moves: flow.isOn && flow.isPublishing, kind: "weights" },
  };
  return (narrow ? drawNarrow : drawWide)(found, edges, flow, { chosen, choose });
}

function drawStore(x, y, width, flow, { chosen, choose }) {
  const { used_bytes: used, max_bytes: most } = flow.status.memory, share = most ? used / most : 0;
  return station({ x, y, width, height: 56, title: "Store", note: `${bytes(used)}${most ? ` of ${bytes(most)}` : ""}`, id: "store", chosen, choose, waits: flow.storeBlocks,
    body: (left_, top, inner) => [most ? meter(left_, top + 10, inner, share, share > 0.8 ? "warn" : "") : text(left_, top + 14, "no limit", "label")] });
}

function drawWide(found, edges, flow, options) {
  const widths = { prompts: 186, generators: 330, buffer: 186, learner: 186 }, gap = 84, top = 54;
  const place = {};
  let x = 1;
  for (const [id, width] of Object.entries(widths)) { place[id] = { x, width }; x += width + gap; }
  const total = x - gap + 1, tallest = Math.max(...Object.values(found).map((each) => each.height));
  const middle = top + Math.min(...Object.values(found).map((each) => each.height)) / 2;
  const between = (from, to, edge) => {
    const start = place[from].x + place[from].width, end = place[to].x;
    return [wire(`M${start} ${middle}H${end - 6}`, { ...edge, tip: right(end - 1, middle) }), text((start + end) / 2, middle - 9, edge.label, `edge ${edge.waits ? "warn" : ""}`)];
  };
  const learnerX = place.learner.x + place.learner.width / 2, generatorsX = place.generators.x + place.generators.width / 2;
  const bottom = top + tallest + 26;
  return svg("svg", { class: "flow", viewBox: `0 0 ${total} ${bottom + 58}`, role: "img", "aria-label": "pipeline of the run" },
    wire(`M${learnerX} ${top}V34Q${learnerX} 22 ${learnerX - 12} 22H${generatorsX + 12}Q${generatorsX} 22 ${generatorsX} 34V${top - 6}`, { ...edges.weights, tip: down(generatorsX, top - 1) }), text((learnerX + generatorsX) / 2, 15, edges.weights.label, "edge"),
    between("prompts", "generators", edges.lease), between("generators", "buffer", edges.arrive), between("buffer", "learner", edges.claim),
    Object.entries(found).map(([id, each]) => station({ ...place[id], ...each, y: top, id, ...options })),
    drawStore(place.prompts.x, bottom, total - 2, flow, options));
}

function drawNarrow(found, edges, flow, options) {
  const width = 316, gap = 34, drawn = [], order = ["prompts", "generators", "buffer", "learner"], names = ["lease", "arrive", "claim"], place = {};
  let y = 1;
  order.forEach((id, index) => {
    place[id] = y;
    drawn.push(station({ x: 1, y, width, ...found[id], id, ...options }));
    y += found[id].height;
    if (index < names.length) {
      const edge = edges[names[index]];
      drawn.push(wire(`M100 ${y}V${y + gap - 6}`, { ...edge, tip: down(100, y + gap - 1) }), text(112, y + gap / 2 + 4, edge.label, `edge side ${edge.waits ? "warn" : ""}`));
      y += gap;
    }
  });
  const from = place.learner + found.learner.height / 2, to = place.generators + found.generators.height / 2, outer = width + 22;
  drawn.push(wire(`M${width + 1} ${from}H${outer - 10}Q${outer} ${from} ${outer} ${from - 10}V${to + 10}Q${outer} ${to} ${outer - 10} ${to}H${width + 8}`, { ...edges.weights, tip: left(width + 2, to) }), text(180, place.learner - gap / 2 + 4, edges.weights.label, "edge side"));
  y += 14;
  drawn.push(drawStore(1, y, width, flow, options));
  return svg("svg", { class: "flow", viewBox: `0 0 ${outer + 4} ${y + 58}`, role: "img", "aria-label": "pipeline of the run" }, drawn);
}
