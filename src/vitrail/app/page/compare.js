// Many methods side by side, each shown as soon as it is computed.
import { job } from "./api.js";
import { drawDiamond, faded, renderMap } from "./colours.js";
import { curveFields, explain, questionFields, showExplanation, withPicture } from "./explain.js";
import { breakable, debounce, element, find, findAll, seconds } from "./helpers.js";
import { note, showError, speak } from "./messages.js";
import { Progress } from "./progress.js";
import { questionText } from "./question.js";
import { drawnValues, methodRow, on, state, target } from "./state.js";

const LENS = 220, DIAMOND = 1.5;
const progress = new Progress(find("#compare-progress"));
let running = null, rows = [], picked = new Set(); // rows: the answers, or {call} while they are computed

on("picture model", () => {
  rows = [];
  cancel();
  find("#compared").textContent = "";
});
on("model", () => {
  picked = new Set();
  buildChoices();
});
on("choice", () => {
  if (running && running.question !== question()) cancel(); // its tiles would explain something else
});
on("explanation", mark);
on("look", debounce(150, redraw));

// Everything that tells one question from another.
function question() {
  const { ask, other } = state, fields = ask.kind === "class" ? { target: target()?.index } : { ask, other: other?.id ?? other?.sample };
  return JSON.stringify({ ...questionFields(), ...fields });
}

find("#run-compare").addEventListener("click", run);
find("#sort").addEventListener("change", draw);

async function run() {
  if (!state.prediction) return;
  cancel();
  const current = target(), asked = questionFields();
  if (!current) return;
  if (state.ask.kind === "class") asked.target = current.index;
  running = Object.assign(new AbortController(), { question: question() });
  const { signal } = running;
  rows = [...picked].map((call) => ({ call }));
  find("#compared").textContent = questionText();
  draw();
  progress.start(questionText(), () => {
    cancel();
    note("Comparison cancelled. Finished methods are kept.");
  }, 0);
  try {
    const methods = picked.size ? [...picked].join(",") : null;
    const fields = { model: state.model.id, ...asked, methods, ...curveFields() };
    await withPicture((picture) => job("/api/compare", { ...picture, ...fields }, signal, onEvent));
    if (signal.aborted) return;
    speak(`${rows.length} methods compared.`);
    finish();
  } catch (error) {
    if (signal.aborted) return;
    finish();
    showError(error);
  }
}

function onEvent(event, data) {
  progress.update(event, data);
  if (data.methods && rows.length === 0) {
    rows = data.methods.map((call) => ({ call }));
    draw();
  }
  if (event === "partial") place(data);
}

// While results come in, every tile keeps its place; they are sorted when all are finished.
function place(row) {
  const at = rows.findIndex((other) => other.call === row.call);
  if (at < 0) { // who follows late may hear of a result before the list of methods
    rows.push(row);
    find("#tiles").append(tile(row));
  } else {
    rows[at] = row;
    find("#tiles").children[at].replaceWith(tile(row));
  }
  markBest();
}

function cancel() {
  running?.abort();
  finish();
}

function finish() {
  running = null;
  progress.stop();
  rows = rows.filter((row) => row.values || row.error);
  draw();
}

const keys = {
  score: (row) => row.deletion - row.insertion,
  insertion: (row) => -row.insertion,
  deletion: (row) => row.deletion,
  trust: (row) => -(row.trust?.score ?? -1),
  time: (row) => row.seconds,
  name: () => 0,
};

// Failed methods come last; ties are sorted by name.
function sorted() {
  const key = keys[find("#sort").value];
  const done = rows.filter((row) => row.values).sort((a, b) => key(a) - key(b) || a.call.localeCompare(b.call));
  return [...done, ...rows.filter((row) => !row.values)];
}

function draw() {
  find("#tiles").replaceChildren(...(running ? rows : sorted()).map(tile));
  find("#run-compare").textContent = rows.length && !running ? "Compare again" : "Compare";
  find("#run-compare").disabled = running !== null;
  markBest();
  mark();
}

function tile(row) {
  const name = element("span", { class: "name" }, ...breakable(row.call));
  const state = row.error ? " failed" : row.values ? "" : " waiting";
  const item = element("li", { class: `tile${state}`, "data-call": row.call });
  if (row.error) item.append(element("div", { class: "lens" }, element("p", {}, row.error)), name);
  else if (!row.values) item.append(element("div", { class: "lens" }), name, ...Object.keys(FIGURES).map((of) => figure(of, "…")));
  else {
    const figures = Object.entries(FIGURES).map(([name, format]) => figure(name, format(row)));
    item.append(element("button", { type: "button", "aria-pressed": "false", onclick: () => take(row) }, drawLens(row), name, ...figures));
  }
  return item;
}

const FIGURES = {
  insertion: (row) => row.insertion.toFixed(3),
  deletion: (row) => row.deletion.toFixed(3),
  trust: (row) => row.trust?.score?.toFixed(2) ?? "–",
  time: (row) => seconds(row.seconds),
};

function figure(of, text) {
  return element("span", { class: "numbers" }, `${of} `, element("b", { "data-of": of }, text));
}

// The part of the picture that the model saw, with the map over it.
function drawLens(row, canvas = element("canvas", { class: "lens", width: LENS, height: LENS, "aria-hidden": "true" })) {
  if (!state.prediction) return canvas; // another picture or model is loading
  const context = canvas.getContext("2d"), photo = find("#photo"), [left, top, right, bottom] = state.prediction.box;
  const scale = photo.naturalWidth / state.prediction.size[0], part = [left, top, right - left, bottom - top];
  context.globalAlpha = 1;
  context.fillStyle = photo.naturalWidth ? "#fff" : "#888";
  context.fillRect(0, 0, LENS, LENS);
  if (state.drawing !== "outline") context.filter = faded(state.alpha);
  if (photo.naturalWidth) context.drawImage(photo, ...part.map((edge) => edge * scale), 0, 0, LENS, LENS);
  context.filter = "none";
  context.globalAlpha = state.alpha;
  context.imageSmoothingEnabled = state.drawing !== "blocks";
  context.drawImage(renderMap({ values: drawnValues(row), signed: row.signed }, state.drawing, LENS), 0, 0, LENS, LENS);
  context.globalAlpha = 1;
  const width = LENS / row.grid[1], height = LENS / row.grid[0];
  for (const patch of row.storage) {
    const x = (patch % row.grid[1]) * width, y = Math.floor(patch / row.grid[1]) * height;
    drawDiamond(context, [x, y, width, height], DIAMOND);
  }
  return canvas;
}

function redraw() {
  for (const canvas of findAll("#tiles canvas")) drawLens(rowOf(canvas.closest(".tile")), canvas);
}

const rowOf = (tile) => rows.find((row) => row.call === tile.dataset.call);

function markBest() {
  const done = rows.filter((row) => row.values);
  for (const of of Object.keys(FIGURES)) {
    const best = Math.min(...done.map(keys[of]));
    for (const text of findAll(`#tiles button [data-of="${of}"]`)) {
      text.classList.toggle("best", done.length > 1 && keys[of](rowOf(text.closest(".tile"))) === best);
    }
  }
}

function mark() {
  for (const item of findAll("#tiles .tile")) {
    find("button", item)?.setAttribute("aria-pressed", String(item.dataset.call === state.explanation?.call));
  }
}

function take(row) {
  const { method, target: index, against } = row;
  Object.assign(state, { method, requestedMethod: null, params: changedParams(row) });
  if (state.ask.kind === "class") Object.assign(state, { target: index, against });
  if (row.reduced) explain();
  else showExplanation(row);
  find("#glass").scrollIntoView({ block: "nearest" });
}

function changedParams({ method, params }) {
  const differs = ({ name, default: usual }) => JSON.stringify(params[name]) !== JSON.stringify(usual);
  return Object.fromEntries(methodRow(method).form.filter(differs).map(({ name }) => [name, params[name]]));
}

function buildChoices() {
  find("#checks").replaceChildren(...state.methods.map((row) => {
    const box = element("input", { type: "checkbox", value: row.name, onchange: () => {
      if (box.checked) picked.add(row.name);
      else picked.delete(row.name);
      countChoices();
    } });
    return element("label", { title: row.summary }, box, element("span", {}, ...breakable(row.name)));
  }));
  countChoices();
}

function countChoices() {
  find("#chosen").textContent = picked.size ? `· ${picked.size} chosen` : "· default selection";
}

find("#filter").addEventListener("input", ({ target: field }) => {
  const wanted = field.value.trim().toLowerCase();
  for (const choice of findAll("#checks label")) choice.hidden = !choice.textContent.toLowerCase().includes(wanted);
});
find("#none").addEventListener("click", () => {
  picked = new Set();
  for (const box of findAll("#checks input")) box.checked = false;
  countChoices();
});
