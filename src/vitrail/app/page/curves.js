// Insertion and deletion curves as an animation, from a single request.
import { curveFields, longWork } from "./explain.js";
import { amount, checkedValue, element, find, reducedMotion, svgElement } from "./helpers.js";
import { showError } from "./messages.js";
import { emit, measure, on, order, state } from "./state.js";

const WIDTH = 320, HEIGHT = 150, LEFT = 34, RIGHT = 8, TOP = 8, BOTTOM = 30;
const PACE = 110;
const play = find("#play"), scrub = find("#scrub");
let scored = null; // the answer of /api/score
let step = 0, timer = 0, working = false;
let reached = { deletion: 0, insertion: 0 }; // how far each curve has been drawn

on("picture explanation", forget);
on("removed", (known) => {
  if (known === undefined) halt();
});
on("choice", () => {
  halt();
  if (!scored) draw();
});

function forget() {
  halt();
  scored = null;
  step = 0;
  reached = { deletion: 0, insertion: 0 };
  Object.assign(scrub, { value: 0, disabled: true });
  play.disabled = !state.explanation;
  draw();
}

play.addEventListener("click", async () => {
  if (working) return;
  if (timer) return halt();
  try {
    if (!scored) await fetchScores();
  } catch (error) {
    return showError(error);
  }
  if (reducedMotion()) return show(scored.counts.length - 1);
  if (step >= scored.counts.length - 1) step = 0;
  play.textContent = "Pause";
  timer = setInterval(advance, PACE);
  return show(step);
});

async function fetchScores() {
  working = true;
  play.setAttribute("aria-busy", "true");
  const about = state.explanation;
  try {
    const scores = await longWork("Removing patches", "/api/score", curveFields());
    if (about !== state.explanation) throw new DOMException("another explanation", "AbortError");
    scored = { order: order(), counts: evenCounts(scores.curves.deletion.length - 1), ...scores };
  } finally {
    working = false;
    play.removeAttribute("aria-busy");
  }
  Object.assign(scrub, { max: scored.counts.length - 1, disabled: false });
}

// Models without tokens are scored in pixels: the patches follow at the same rate.
function evenCounts(steps) {
  const patches = state.explanation.tokens.flat().length;
  return Array.from({ length: steps + 1 }, (_, step) => Math.floor((step * patches) / steps));
}

function advance() {
  if (step >= scored.counts.length - 1) return halt();
  return show(step + 1);
}

function halt() {
  clearInterval(timer);
  timer = 0;
  play.textContent = "Play";
}

function show(next) {
  step = next;
  scrub.value = step;
  const way = checkedValue("way"), count = scored.counts[step];
  reached[way] = Math.max(reached[way], step);
  scrub.setAttribute("aria-valuetext", `${count} patches ${way === "deletion" ? "deleted" : "inserted"}`);
  state.removed = new Set(way === "deletion" ? scored.order.slice(0, count) : scored.order.slice(count));
  emit("removed", plain(scored.curves[way][step]));
  draw();
}

scrub.addEventListener("input", () => {
  halt();
  show(Number(scrub.value));
});
find("#way").addEventListener("change", () => {
  halt();
  if (scored) show(0);
  else draw();
});

const across = (place, count) => LEFT + ((WIDTH - LEFT - RIGHT) * place) / (count - 1);
const down = (value, [low, high]) => TOP + ((HEIGHT - TOP - BOTTOM) * (high - value)) / (high - low || 1);

// A score as it is: curves have it between that of no patch, 0, and that of all, 1.
function plain(value) {
  const [empty, full] = scored.scale ?? [0, 1];
  return empty + value * (full - empty);
}

// The least and the largest value on the plot.
function range() {
  if (!scored?.scale) return [0, 1];
  const values = [...scored.curves.deletion, ...scored.curves.insertion].map(plain);
  return [Math.min(...values), Math.max(...values)];
}

function draw() {
  const way = checkedValue("way");
  find("#curve").classList.toggle("scaled", measure() !== "probability");
  const plot = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": describe() }, ...axes(way));
  if (scored) {
    for (const name of ["deletion", "insertion"]) plot.append(...line(name, name === way));
  }
  find("#curve").replaceChildren(plot, caption());
}

function line(way, active) {
  const values = scored.curves[way].map(plain), ends = range();
  const at = (place) => [across(place, values.length), down(values[place], ends)];
  const until = (last) => Array.from({ length: last + 1 }, (_, place) => at(place).join(",")).join(" ");
  const lines = [svgElement("polyline", { class: `${way} ghost`, points: until(reached[way]) })];
  if (active) {
    const [cx, cy] = at(step);
    lines.push(svgElement("polyline", { class: way, points: until(step) }), svgElement("circle", { class: way, r: 4, cx, cy }));
  }
  return lines;
}

function axes(way) {
  const text = (x, y, anchor, content) => svgElement("text", { x, y, "text-anchor": anchor }, content);
  const [low, high] = range(), known = measure() === "probability" || scored;
  const marks = [0, 0.5, 1].flatMap((share, place) => {
    const value = low + share * (high - low), y = down(value, [low, high]), percent = String(100 * share);
    const name = measure() === "probability" ? percent : value.toFixed(Math.abs(value) < 10 ? 2 : 0).replace("-", "−");
    return [
      svgElement("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
      text(LEFT - 6, y + 4, "end", known ? name : ""),
      text(across(share, 2), HEIGHT - BOTTOM + 14, ["start", "middle", "end"][place], percent),
    ];
  });
  const name = way === "deletion" ? "% of patches deleted" : "% of patches inserted";
  return [...marks, text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, "middle", name)];
}

function caption() {
  if (!scored) return element("figcaption", { class: "about" }, `Play removes the patches one after another and plots the ${measure()}.`);
  const mean = (way, better) =>
    element("span", { class: `key ${way}` }, element("b", {}, `${way} ${amount(scored[way], "score")}`), ` ${better}`);
  const scaled = scored.scale ? ["scaled: no patch 0, all patches 1"] : [];
  const means = [mean("deletion", "lower is better"), mean("insertion", "higher is better")];
  return element("figcaption", { class: "about keys" }, ...means, ...scaled);
}

function describe() {
  if (!scored) return `${measure()} over the share of patches: not played yet.`;
  const way = checkedValue("way"), values = scored.curves[way];
  const at = (share) => amount(plain(values[Math.round(share * (values.length - 1))]), measure());
  return `${way}: ${at(0)} at the start, ${at(0.25)} after a quarter of the patches, ${at(0.5)} after half, ${at(1)} at the end.`;
}
