// Two pictures: how similar they are to the model, which patches make them so, and which patches belong together.
import { job } from "./api.js";
import { mapOf, partner, readOut } from "./canvas.js";
import { choiceFields, explain, longWork, prepareOther, withPicture } from "./explain.js";
import { checkedValue, element, find, findAll, number } from "./helpers.js";
import { clearError, note, noteWhile, showError } from "./messages.js";
import { best, keep, known, partners, pointAt } from "./pairs.js";
import { ask } from "./question.js";
import { moved, placeOf, Sheet } from "./sheet.js";
import { emit, on, patchShares, state } from "./state.js";

const root = find("#second"), sheet = new Sheet(root), { panes } = sheet;
let choosing = new AbortController(), request = new AbortController();
let pointed = null;

on("model", () => choosing.abort());
on("model picture prediction choice", show);
on("choice", () => request.abort());
on("explanation", requestSecond);
on("second look", drawMap);
on("pairs", () => {
  showMatching();
  drawMap();
  drawPanes();
});
on("second explanation", drawPanes);
new ResizeObserver(() => { drawMap(); drawPanes(); }).observe(root);

// Whether a picture that is dropped or pasted is the second one.
export const comparing = () => !find("#work").hidden && checkedValue("ask") === "similarity";

function thumbnail({ name, title, url, thumbnail: small }) {
  const compare = () => compareWith({ sample: name, url, name: title });
  return element("li", {}, element("button", { type: "button", title, "aria-pressed": "false", onclick: compare },
    element("img", { src: small ?? url, alt: title, loading: "lazy" })));
}

export async function compareWith(source) {
  clearError();
  choosing.abort();
  choosing = new AbortController();
  const { signal } = choosing;
  try {
    await noteWhile(`Opening ${source.name}…`, prepareOther(source, signal));
    if (signal.aborted) return;
    state.other = source;
    ask({ kind: "similarity", measure: find("#measure").value, name: source.name, picture: source.prediction.picture });
  } catch (error) {
    if (!signal.aborted) showError(error);
  }
}

// The second picture of a link; null if the server no longer has it.
export async function restoreOther({ sample, id }, signal) {
  const row = state.samples.find(({ name }) => name === sample);
  try {
    const source = row ? { sample, url: row.url, name: row.title } : { id, name: "the other image" };
    return row || id ? await prepareOther(source, signal) : null;
  } catch (error) {
    if (![404, 410, 422].includes(error.status)) throw error;
    note("The server no longer has the image that this one was compared with: choose it again.", true);
    return null;
  }
}

find("#choose-second").addEventListener("click", () => find("#second-file").click());
find("#second-file").addEventListener("change", ({ target: field }) => {
  const [file] = field.files;
  if (file) compareWith({ file, name: file.name });
  field.value = "";
});
find("#measure").addEventListener("change", ({ target: field }) => {
  if (state.ask.kind === "similarity") ask({ ...state.ask, measure: field.value });
});
find("#ask").addEventListener("change", ({ target: { value: kind } }) => {
  if (kind === "similarity" && state.other) compareWith(state.other);
});

const shown = () => state.ask.kind === "similarity" && state.other && state.prediction;

function show() {
  root.hidden = !shown();
  find("#frame").classList.toggle("two", !root.hidden);
  showMatching();
  showThumbnails();
  if (root.hidden) return;
  find("#measure").value = state.ask.measure;
  sheet.show(state.other);
  sheet.setAspect(...state.other.prediction.size);
  drawPanes();
}

// They are made once for each picture: the focus stays where it is.
function showThumbnails() {
  const list = find("#second-samples"), samples = state.samples.filter(({ name }) => name !== state.picture?.sample);
  const key = samples.map(({ name }) => name).join();
  if (list.dataset.key !== key) list.replaceChildren(...samples.map(thumbnail));
  list.dataset.key = key;
  for (const button of findAll("button", list)) button.setAttribute("aria-pressed", String(Boolean(shown()) && state.other.name === button.title));
}

function drawMap() {
  if (!root.hidden) sheet.drawMap(state.other.prediction, mapOf("second", state.second, state.other.prediction.grid), state);
}

function drawPanes() {
  if (root.hidden) return;
  const shares = partners("second"), outlined = shares ? [best(shares)] : pointed === null ? [] : [pointed];
  sheet.drawPanes(state.other.prediction, { storage: state.second?.storage, outlined });
}

// The same question the other way round; the first map is on the page already.
async function requestSecond() {
  request.abort();
  root.removeAttribute("aria-busy");
  if (!state.explanation || state.answered.kind !== "similarity") return;
  request = new AbortController();
  const { signal } = request, fields = { ...choiceFields(), trust: "false" };
  root.setAttribute("aria-busy", "true");
  try {
    const answer = await withPicture((pictures) => job("/api/explain", { ...pictures, ...fields }, signal, () => {}), state.other, state.picture);
    if (signal.aborted) return;
    state.second = answer;
    emit("second");
  } catch (error) {
    if (!signal.aborted) showError(error);
  } finally {
    if (!signal.aborted) root.removeAttribute("aria-busy");
  }
}

function showMatching() {
  find("#match").disabled = !shown() || known();
  find("#matching").textContent = known()
    ? `Point at a patch of one image to see its partners in the other, by their shares of the ${state.ask.measure}.`
    : "Splits the similarity into shares of pairs of patches, one of each image (decompx). Then point at a patch to see its partners.";
}

find("#match").addEventListener("click", async () => {
  try {
    const fields = { method: "decompx", params: null, pairs: "true", trust: "false" };
    keep((await longWork("Matching patches…", "/api/explain", fields)).pairs);
  } catch (error) {
    showError(error);
  }
});

function point(patch) {
  if (patch === pointed) return;
  pointed = patch;
  pointAt("second", patch);
  drawPanes();
  readOut(patch === null ? null : describe(patch));
}

function describe(patch) {
  const { grid } = state.other.prediction, place = `${placeOf(patch, grid)} of ${state.other.name}`;
  if (!state.second) return ["", place];
  const value = patchShares(state.second).flat()[patch];
  return [place, `score ${number(value, state.second.signed)}${partner("second", patch, state.prediction.grid)}`];
}

panes.addEventListener("pointermove", (event) => point(sheet.patchAt(event, state.other.prediction)));
panes.addEventListener("click", (event) => point(sheet.patchAt(event, state.other.prediction)));
panes.addEventListener("pointerleave", () => {
  if (!panes.matches(":focus-visible")) point(null);
});
panes.addEventListener("focus", () => {
  if (pointed === null && panes.matches(":focus-visible")) point(state.second ? best(patchShares(state.second).flat()) : 0);
});
panes.addEventListener("blur", () => point(null));
panes.addEventListener("keydown", (event) => {
  const next = event.ctrlKey || event.metaKey || event.altKey ? null : moved(event.key, pointed ?? 0, state.other.prediction.grid);
  if (next === null) return;
  point(next);
  event.preventDefault();
});
