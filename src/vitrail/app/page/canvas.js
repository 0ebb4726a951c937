// The picture, the map over it, and the panes: patches that can be inspected, deleted and restored.
import { paintLegend, scaleOf } from "./colours.js";
import { checkedValue, find, number, ordinal } from "./helpers.js";
import { note, speak } from "./messages.js";
import { best, known, partners, pointAt, sharesOf } from "./pairs.js";
import { drawnPlaces, pick, picking } from "./places.js";
import { moved, placeOf, Sheet } from "./sheet.js";
import { drawnValues, emit, names, on, order, patchShares, state } from "./state.js";

const glass = find("#glass"), sheet = new Sheet(glass), { panes } = sheet;
const HINT = `${matchMedia("(pointer: coarse)").matches ? "Tap" : "Point at"} a patch to see its score.`;
let pointed = null; // the patch under the pointer or the keyboard
let stroke = null; // true = deleting, false = restoring, while the pointer is down
let ranks = [];

on("picture", () => {
  sheet.show(state.picture);
  pointed = null;
  readOut();
});
on("prediction", () => {
  sheet.setAspect(...state.prediction.size);
  if (glass.classList.contains("unshown")) note("This browser cannot display this image format, but the model can read it.");
  drawPanes();
});
on("explanation", () => {
  find("#legend").hidden = !state.explanation;
  if (state.explanation) {
    order().forEach((patch, place) => { ranks[patch] = place + 1; });
    showLegend();
  }
  drawMap();
  drawPanes();
  readOut();
});
on("look second", () => {
  if (state.explanation) showLegend();
  drawMap();
});
on("pairs", () => {
  drawMap();
  drawPanes();
});
on("removed choice places", drawPanes);
new ResizeObserver(() => { drawMap(); drawPanes(); }).observe(glass);

function showLegend() {
  const { signed } = state.explanation, values = drawnValues(state.explanation), [name, against] = names();
  const target = state.answered.kind === "similarity" ? "similarity" : name;
  const { low, high } = scale(), outline = state.drawing === "outline";
  const lowName = against === null ? `against ${target}` : `for ${against}`;
  const below = values.flat().some((value) => value < low) ? "≤ " : "";
  const above = values.flat().some((value) => value > high) ? "≥ " : "";
  paintLegend(find("#legend canvas"), signed);
  find("#legend").classList.toggle("signed", signed);
  find("#legend canvas").hidden = outline;
  find("#legend .low").textContent = outline ? "" : `${signed ? lowName : "less"} ${below}${number(low)}`;
  find("#legend .high").textContent = outline
    ? `Outlined: the smallest area with half of the evidence${signed ? ` for ${target}` : ""}`
    : `${above}${number(high, signed)} ${signed ? `for ${target}` : "more"}`;
  const [left, top, right, bottom] = state.explanation.box, [width, height] = state.prediction.size;
  find("#legend .unseen-key").hidden = left < 1 && top < 1 && right > width - 1 && bottom > height - 1;
}

// Of two pictures that are compared, both maps have the colours of one scale.
export function scale() {
  const maps = [state.explanation, state.second].filter(Boolean);
  return scaleOf(maps.flatMap(drawnValues), state.explanation.signed);
}

// The map; while a patch of the other picture is pointed at, the shares of its partners.
export function mapOf(side, explanation, [, columns]) {
  const shares = partners(side);
  if (!shares) return explanation && { values: drawnValues(explanation), signed: explanation.signed, scale: scale() };
  const rows = Array.from({ length: shares.length / columns }, (_, row) => [...shares.slice(row * columns, (row + 1) * columns)]);
  return { values: rows, signed: true };
}

function drawMap() {
  sheet.drawMap(state.prediction, state.prediction && mapOf("first", state.explanation, state.prediction.grid), state);
}

function drawPanes() {
  const shares = partners("first"), outlined = shares ? [best(shares)] : pointed === null ? [] : [pointed];
  sheet.drawPanes(state.prediction, { storage: state.explanation?.storage, removed: state.removed, outlined, ...drawnPlaces() });
}

const patchAt = (event) => (state.prediction ? sheet.patchAt(event, state.prediction) : null);

function point(patch) {
  if (patch === pointed) return;
  pointed = patch;
  pointAt("first", patch);
  drawPanes();
  readOut();
}

// What is known of the patch that is pointed at, here or, [words, place], in the other picture.
export function readOut(elsewhere = null) {
  const here = pointed === null || !state.prediction ? ["", HINT] : describe(pointed);
  const [words, place] = (elsewhere ?? here).map(sentence);
  find("#readout .words").textContent = words;
  find("#readout .place").textContent = place;
  if (elsewhere || pointed !== null) speak(`${words}. ${place}.`);
}

function describe(patch) {
  const place = placeOf(patch, state.prediction.grid);
  const deleted = state.removed.has(patch) ? " · deleted" : "";
  if (!state.explanation) return ["", place + deleted];
  const { signed, storage } = state.explanation, value = patchShares(state.explanation).flat()[patch];
  const stored = storage.includes(patch) ? " · used as storage" : "";
  const rank = `${ordinal(ranks[patch])} of ${ranks.length}`;
  return [`${rank}: ${meaning(value)}`, `${place} · score ${number(value, signed)}${partner("first", patch, state.other?.prediction.grid)}${stored}${deleted}`];
}

// The patch of the other picture with the largest share, in words.
export function partner(side, patch, grid) {
  if (!known()) return "";
  const shares = sharesOf(side, patch), at = best(shares);
  return ` · best with ${placeOf(at, grid)} (${number(shares[at], true)})`;
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function meaning(value) {
  const { signed } = state.explanation, [target, against] = names();
  const { low, high } = scaleOf(patchShares(state.explanation), signed);
  const strength = high > low ? (signed ? Math.abs(value) / high : (value - low) / (high - low)) : 0;
  const level = strength < 0.08 ? 0 : strength < 0.33 ? 1 : strength < 0.66 ? 2 : 3;
  const what = `“${target}”${against === null ? "" : ` rather than “${against}”`}`;
  if (level === 0) return `hardly relevant to ${what}`;
  if (!signed) return `${["", "slightly", "clearly", "highly"][level]} relevant to ${what}`;
  return `${["", "weak", "clear", "strong"][level]} evidence ${value < 0 ? "against" : "for"} ${what}`;
}

function change(patch, removing) {
  if (patch === null || state.removed.has(patch) === removing) return;
  state.removed = new Set(state.removed);
  if (removing) state.removed.add(patch);
  else state.removed.delete(patch);
  emit("removed");
  readOut();
}

panes.addEventListener("pointermove", (event) => {
  const patch = patchAt(event);
  point(patch);
  if (stroke !== null) change(patch, stroke);
});
panes.addEventListener("pointerleave", () => {
  if (document.activeElement !== panes || !panes.matches(":focus-visible")) point(null);
});
panes.addEventListener("pointerdown", (event) => {
  if (event.button !== 0 || event.pointerType === "touch") return;
  if (picking()) return pickAt(event);
  stroke = (checkedValue("brush") === "delete") !== event.shiftKey;
  change(patchAt(event), stroke);
});
window.addEventListener("pointerup", () => { stroke = null; });
// A finger may be scrolling: only a tap changes a patch.
panes.addEventListener("click", (event) => {
  if (event.pointerType !== "touch") return;
  const patch = patchAt(event);
  point(patch);
  if (picking()) pickAt(event);
  else change(patch, checkedValue("brush") === "delete");
});

function pickAt(event) {
  const { prediction } = state, cells = prediction.cells ?? prediction.grid;
  pick({ point: sheet.pointAt(event, prediction), cell: sheet.patchAt(event, { ...prediction, grid: cells }) });
}

panes.addEventListener("focus", () => {
  if (pointed === null && state.prediction && panes.matches(":focus-visible")) point(Math.max(ranks.indexOf(1), 0));
});
panes.addEventListener("blur", () => point(null));
panes.addEventListener("keydown", (event) => {
  if (!state.prediction || event.ctrlKey || event.metaKey || event.altKey) return;
  const at = pointed ?? 0, next = moved(event.key, at, state.prediction.grid);
  if (next !== null) {
    point(next);
  } else if (event.key === "Enter" || event.key === " ") change(at, !state.removed.has(at));
  else if (event.key === "Delete" || event.key === "Backspace") change(at, true);
  else if (event.key === "Insert") change(at, false);
  else return;
  event.preventDefault();
});
