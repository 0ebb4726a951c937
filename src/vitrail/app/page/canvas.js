// The picture, the map over it, and the panes: patches that can be inspected, deleted and restored.
import { drawDiamond, faded, paintLegend, renderMap, scaleOf } from "./colours.js";
import { checkedValue, find, number, ordinal } from "./helpers.js";
import { note, speak } from "./messages.js";
import { drawnValues, emit, label, on, order, patchShares, state } from "./state.js";

const photo = find("#photo"), map = find("#map"), panes = find("#panes"), glass = find("#glass");
const HINT = `${matchMedia("(pointer: coarse)").matches ? "Tap" : "Point at"} a patch to see its score.`;
const LEAD = "#15161c", HATCH = 9, DIAMOND = 1.5;
let pointed = null; // the patch under the pointer or the keyboard
let stroke = null; // true = deleting, false = restoring, while the pointer is down
let ranks = [];

on("picture", showPicture);

function showPicture() {
  if (photo.getAttribute("src") !== state.picture.url) photo.src = state.picture.url; // unchanged if only the model has
  photo.alt = state.picture.name;
  pointed = null;
  readOut();
}

photo.addEventListener("load", () => {
  glass.classList.remove("unshown");
  setAspect(photo.naturalWidth, photo.naturalHeight);
});
photo.addEventListener("error", () => {
  if (!photo.getAttribute("src")) return;
  glass.classList.add("unshown");
  photo.alt = "";
});

function setAspect(width, height) {
  glass.style.aspectRatio = `${width} / ${height}`;
  glass.style.setProperty("--shape", width / height);
}

on("prediction", () => {
  setAspect(...state.prediction.size);
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
on("look", () => {
  map.style.opacity = state.alpha;
  if (state.explanation) showLegend();
  drawMap();
});
on("removed", drawPanes);
new ResizeObserver(() => { drawMap(); drawPanes(); }).observe(glass);

function showLegend() {
  const { signed, target, against } = state.explanation, values = drawnValues(state.explanation);
  const { low, high } = scaleOf(values, signed), outline = state.drawing === "outline";
  const lowName = against === null ? `against ${label(target)}` : `for ${label(against)}`;
  const below = values.flat().some((value) => value < low) ? "≤ " : "";
  const above = values.flat().some((value) => value > high) ? "≥ " : "";
  paintLegend(find("#legend canvas"), signed);
  find("#legend").classList.toggle("signed", signed);
  find("#legend canvas").hidden = outline;
  find("#legend .low").textContent = outline ? "" : `${signed ? lowName : "less"} ${below}${number(low)}`;
  find("#legend .high").textContent = outline
    ? `Outlined: the smallest area with half of the evidence${signed ? ` for ${label(target)}` : ""}`
    : `${above}${number(high, signed)} ${signed ? `for ${label(target)}` : "more"}`;
  const [left, top, right, bottom] = state.explanation.box, [width, height] = state.prediction.size;
  find("#legend .unseen-key").hidden = left < 1 && top < 1 && right > width - 1 && bottom > height - 1;
}

function resize(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(glass.clientWidth * ratio), height = Math.round(glass.clientHeight * ratio);
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  return context;
}

// The part that the model sees, in pixels of the canvas.
function visibleArea(canvas) {
  const [width, height] = state.prediction.size, [left, top, right, bottom] = state.prediction.box;
  const across = canvas.width / width, down = canvas.height / height;
  return { x: left * across, y: top * down, width: (right - left) * across, height: (bottom - top) * down };
}

function drawMap() {
  const context = resize(map), shown = state.explanation && state.prediction;
  // A red map on a red fish is illegible: the more opaque the map, the paler the photo.
  photo.style.filter = shown && state.drawing !== "outline" ? faded(state.alpha) : "none";
  if (!shown) return;
  const { x, y, width, height } = visibleArea(map);
  context.imageSmoothingEnabled = state.drawing !== "blocks";
  context.imageSmoothingQuality = "high";
  const values = drawnValues(state.explanation), { signed } = state.explanation;
  context.drawImage(renderMap({ values, signed }, state.drawing), x, y, width, height);
}

function drawPanes() {
  const context = resize(panes);
  if (!state.prediction) return;
  const area = visibleArea(panes), unit = window.devicePixelRatio || 1;
  hatch(context, area, unit);
  for (const patch of state.explanation?.storage ?? []) drawDiamond(context, cell(patch, area), DIAMOND * unit);
  for (const patch of state.removed) drawRemoved(context, cell(patch, area), unit);
  if (pointed !== null) outline(context, cell(pointed, area), unit);
}

function hatch(context, { x, y, width, height }, unit) {
  const { width: w, height: h } = context.canvas;
  if (x < 1 && y < 1 && x + width > w - 1 && y + height > h - 1) return;
  context.save();
  context.beginPath();
  context.rect(0, 0, w, h);
  context.rect(x, y, width, height);
  context.clip("evenodd");
  context.fillStyle = "rgb(120 122 130 / 62%)";
  context.fillRect(0, 0, w, h);
  context.strokeStyle = "rgb(255 255 255 / 30%)";
  context.lineWidth = unit;
  context.beginPath();
  for (let start = -h; start < w; start += HATCH * unit) {
    context.moveTo(start, h);
    context.lineTo(start + h, 0);
  }
  context.stroke();
  context.restore();
}

function cell(patch, { x, y, width, height }) {
  const [rows, columns] = state.prediction.grid;
  const row = Math.floor(patch / columns), column = patch % columns;
  const left = Math.round(x + (column * width) / columns), top = Math.round(y + (row * height) / rows);
  const right = Math.round(x + ((column + 1) * width) / columns), bottom = Math.round(y + ((row + 1) * height) / rows);
  return [left, top, right - left, bottom - top];
}

function drawRemoved(context, [x, y, width, height], unit) {
  context.fillStyle = LEAD;
  context.fillRect(x, y, width, height);
  context.strokeStyle = "rgb(255 255 255 / 16%)";
  context.lineWidth = unit;
  context.strokeRect(x + unit / 2, y + unit / 2, width - unit, height - unit);
}

function outline(context, [x, y, width, height], unit) {
  for (const [colour, thickness] of [[LEAD, 4], ["#fff", 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = thickness * unit;
    context.strokeRect(x, y, width, height);
  }
}

function patchAt(event) {
  if (!state.prediction) return null;
  const bounds = panes.getBoundingClientRect();
  const [width, height] = state.prediction.size, [left, top, right, bottom] = state.prediction.box;
  const [rows, columns] = state.prediction.grid;
  const x = (((event.clientX - bounds.left) / bounds.width) * width - left) / (right - left);
  const y = (((event.clientY - bounds.top) / bounds.height) * height - top) / (bottom - top);
  if (!(x >= 0 && x < 1 && y >= 0 && y < 1)) return null;
  return Math.floor(y * rows) * columns + Math.floor(x * columns);
}

function point(patch) {
  if (patch === pointed) return;
  pointed = patch;
  drawPanes();
  readOut();
}

function readOut() {
  const [words, place] = pointed === null || !state.prediction ? ["", HINT] : describe(pointed);
  find("#readout .words").textContent = words;
  find("#readout .place").textContent = place;
  if (pointed !== null) speak(`${words}. ${place}.`);
}

function describe(patch) {
  const columns = state.prediction.grid[1];
  const place = `Row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;
  const deleted = state.removed.has(patch) ? " · deleted" : "";
  if (!state.explanation) return ["", place + deleted];
  const { signed, storage } = state.explanation, value = patchShares(state.explanation).flat()[patch];
  const stored = storage.includes(patch) ? " · used as storage" : "";
  const rank = `${ordinal(ranks[patch])} of ${ranks.length}`;
  return [`${rank}: ${meaning(value)}`, `${place} · score ${number(value, signed)}${stored}${deleted}`];
}

function meaning(value) {
  const { signed, target, against } = state.explanation;
  const { low, high } = scaleOf(patchShares(state.explanation), signed);
  const strength = high > low ? (signed ? Math.abs(value) / high : (value - low) / (high - low)) : 0;
  const level = strength < 0.08 ? 0 : strength < 0.33 ? 1 : strength < 0.66 ? 2 : 3;
  const what = `“${label(target)}”${against === null ? "" : ` rather than “${label(against)}”`}`;
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
  stroke = (checkedValue("brush") === "delete") !== event.shiftKey;
  change(patchAt(event), stroke);
});
window.addEventListener("pointerup", () => { stroke = null; });
// A finger may be scrolling: only a tap changes a patch.
panes.addEventListener("click", (event) => {
  if (event.pointerType !== "touch") return;
  const patch = patchAt(event);
  point(patch);
  change(patch, checkedValue("brush") === "delete");
});

panes.addEventListener("focus", () => {
  if (pointed === null && state.prediction && panes.matches(":focus-visible")) point(Math.max(ranks.indexOf(1), 0));
});
panes.addEventListener("blur", () => point(null));
panes.addEventListener("keydown", (event) => {
  if (!state.prediction || event.ctrlKey || event.metaKey || event.altKey) return;
  const [rows, columns] = state.prediction.grid;
  const at = pointed ?? 0, row = Math.floor(at / columns), column = at % columns;
  const next = {
    ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
    Home: [row, 0], End: [row, columns - 1], PageUp: [0, column], PageDown: [rows - 1, column],
  }[event.key];
  if (next) {
    const clamp = (value, end) => Math.min(Math.max(value, 0), end - 1);
    point(clamp(next[0], rows) * columns + clamp(next[1], columns));
  } else if (event.key === "Enter" || event.key === " ") change(at, !state.removed.has(at));
  else if (event.key === "Delete" || event.key === "Backspace") change(at, true);
  else if (event.key === "Insert") change(at, false);
  else return;
  event.preventDefault();
});
