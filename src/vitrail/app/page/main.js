// Entry point: loads models and samples, restores the state of a link, and connects the parts of the page.
import { useToken } from "./api.js";
import "./canvas.js";
import "./classes.js";
import "./compare.js";
import "./curves.js";
import "./download.js";
import "./facts.js";
import { firstAsk, load, openPicture, reopen, restoreNext, useModel } from "./explain.js";
import { debounce, find } from "./helpers.js";
import "./layout.js";
import "./question.js";
import { readLink, writeLink } from "./link.js";
import { clearError, note, showError } from "./messages.js";
import { fromText } from "./methods.js";
import "./removal.js";
import { restoreOther } from "./similar.js";
import { emit, methodRow, names, on, state } from "./state.js";
import { openSample, showStart } from "./upload.js";

async function start() {
  const link = readLink(location.hash);
  if (link.token) {
    useToken(link.token);
    history.replaceState(null, "", location.pathname + location.hash.replace(/([#&])token=[^&]*&?/, "$1").replace(/[#&]$/, ""));
  }
  try {
    await load();
    clearError();
    if (link.sample || link.picture) await restore(link);
    else showStart();
  } catch (error) {
    showStart();
    showError(error);
  }
}

async function restore(link) {
  const sample = state.samples.find((other) => other.name === link.sample);
  const model = link.model ?? (state.modelPinned ? null : sample?.model);
  if (link.model) state.modelPinned = true;
  restoreNext(model, async (signal) => ({ ...viewOf(link), ...(await questionOf(link, signal)) }));
  if (link.sample) return await openSample(link.sample, model);
  try {
    return await openPicture({ id: link.picture, name: "picture" });
  } catch (error) {
    if (![404, 410, 422].includes(error.status)) throw error;
    throw new Error("The server no longer has the image of this link: open it again, and the other settings are restored.");
  }
}

// The part of a link that this model supports; unknown classes and methods are left out.
function viewOf(link) {
  const row = methodRow(link.method) ?? methodRow(), size = state.model.grid[0] * state.model.grid[1];
  const known = (index) => (index !== null && index < state.model.classes ? index : null);
  const fields = row.form.filter((about) => about.name in link.params);
  if (link.alpha !== null) find("#alpha").value = 100 * link.alpha;
  find(`input[name="drawing"][value="${link.drawing}"]`).checked = true;
  find("#hide-storage").checked = link.hideStorage;
  return {
    method: row.name,
    requestedMethod: link.method,
    params: Object.fromEntries(fields.map((about) => [about.name, fromText(about, link.params[about.name])])),
    target: known(link.target),
    against: known(link.against),
    removed: new Set(link.removed.filter((patch) => patch < size)),
    alpha: link.alpha ?? state.alpha,
    drawing: link.drawing,
    hideStorage: link.hideStorage,
  };
}

const ASKED = { group: "about any of several classes", text: "about a text", box: "about a box", region: "about a segment",
  similarity: "how similar two images are" };

// What the link asks, if this model can be asked so.
async function questionOf({ ask, otherSample: sample, otherPicture: id }, signal) {
  if (!state.model.asks.includes(ask.kind)) {
    if (ask.kind in ASKED) note(`The link asks ${ASKED[ask.kind]}, which ${state.model.name} cannot answer: choose another model.`, true);
    return { ask: firstAsk() };
  }
  if (ask.kind !== "similarity") return { ask };
  const other = await restoreOther({ sample, id }, signal);
  return other ? { ask: { ...ask, name: other.name, picture: other.prediction.picture }, other } : { ask: firstAsk() };
}

// The address follows the picture at once: a reload must not bring back the previous one.
function keepLink() {
  if (state.picture?.sample || state.picture?.id) history.replaceState(null, "", writeLink());
}
on("picture prediction", keepLink);
on("explanation removed look", debounce(200, keepLink));
on("explanation", () => {
  const { explanation } = state;
  document.title = explanation ? `${names()[0]} – vitrail` : "vitrail";
});
on("model", () => {
  find("#model").value = state.model.id;
  find("#model").title = state.model.note ?? "";
  find("#model-note").textContent = state.model.note ? `${state.model.name}: ${state.model.note}` : "";
});
on("picture", () => emit("look"));
window.addEventListener("hashchange", () => {
  const link = readLink(location.hash);
  if (link.token || !state.model) start();
  else if (link.sample || link.picture) restore(link).catch(showError);
});

find("#model").addEventListener("change", ({ target: field }) => {
  state.modelPinned = true;
  useModel(field.value).then(reopen).catch(showError);
});
find("#token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(find("#token").value.trim());
  start();
});
find("#alpha").addEventListener("input", ({ target: field }) => {
  state.alpha = field.value / 100;
  emit("look");
});
find("#drawing").addEventListener("change", ({ target: field }) => {
  state.drawing = field.value;
  emit("look");
});

start();
