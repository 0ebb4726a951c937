// From a picture to its explanation: the requests in order; a new one cancels the previous.
import { get, getBlob, job, post, Problem } from "./api.js";
import { element, find } from "./helpers.js";
import { clearError, note, noteWhile, showError } from "./messages.js";
import { displayUrl } from "./orientation.js";
import { Progress } from "./progress.js";
import { emit, methodRow, state } from "./state.js";

const progress = new Progress(find("#progress"));
let loading = null; // the promise of the models and samples, unless it failed
let wanted = null; // {model, view} of a link, until its picture is loaded
let pending = null; // the picture that is loading
let shown = null; // the choice behind the explanation on the page
let opening = new AbortController(), predicting = new AbortController(), explaining = new AbortController();

// How curves are computed, in the animation and in comparisons.
export const curveFields = () => ({ space: state.model.view === "tokens" ? "tokens" : "pixels", steps: 32 });

export function choiceFields() {
  return {
    model: state.model.id,
    method: state.method,
    target: state.target,
    against: methodRow()["class-specific"] ? state.against : null,
    params: Object.keys(state.params).length ? JSON.stringify(state.params) : null,
  };
}

// Asks with the field that names the picture; uploads it again if the server has evicted it and this page still has the file.
export async function withPicture(ask, picture = state.picture) {
  const { sample, id, file } = picture;
  try {
    return await ask(sample ? { sample } : id ? { picture: id } : { image: file });
  } catch (error) {
    if (error.status !== 410 || !file) throw error;
    const answer = await ask({ image: file });
    picture.id = answer.picture ?? picture.id;
    return answer;
  }
}

// Requests the models and samples, and selects the first model.
export function load() {
  loading = requestModels();
  return loading;
}

// What is opened before the models are known waits for them; after a failure they are requested again.
export function loaded() {
  return loading ?? load();
}

async function requestModels() {
  try {
    [state.models, state.samples] = await Promise.all([get("/api/models"), get("/api/samples")]);
    find("#model").replaceChildren(...state.models.map((model) => element("option", { value: model.id }, model.name)));
    await useModel(state.models[0].id);
  } catch (error) {
    loading = null;
    throw error;
  }
}

export async function useModel(id) {
  const model = state.models.find((other) => other.id === id);
  const known = state.models.map((other) => other.id).join(", ");
  if (!model) throw new Problem(`This server has no model “${id}”: expected one of ${known}.`);
  const rows = await get(`/api/methods?model=${encodeURIComponent(id)}`);
  const methods = rows.filter((row) => row.supported === "yes"), unsupported = rows.filter((row) => row.supported !== "yes");
  Object.assign(state, { model, methods, unsupported, prediction: null, explanation: null });
  Object.assign(state, { target: null, against: null, params: {}, removed: new Set(), requestedMethod: state.method });
  if (!methodRow()) state.method = model.default_method;
  wanted = null;
  stop();
  emit("model");
}

// The next picture is opened with this model (null: any) and the state that view() returns once the model is loaded.
export function restoreNext(model, view) {
  wanted = { model, view };
}

// source: {file, name} | {sample, url, name, model?} | {id, name}. The open picture stays until the new one is predicted.
export async function openPicture(source) {
  clearError();
  opening.abort();
  opening = new AbortController();
  pending = source;
  const { signal } = opening, model = wanted?.model ?? source.model ?? state.model.id, view = wanted?.view;
  let known;
  try {
    known = await noteWhile(`Opening ${source.name}…`, prepare(source, model, signal));
  } catch (error) {
    if (!signal.aborted) {
      release(source);
      throw error;
    }
  }
  if (!signal.aborted) return replacePicture(source, view, known);
  if (pending !== source) release(source);
}

// Returns the prediction if another picture is open: a refused file must not replace it.
async function prepare(source, model, signal) {
  source.url ??= await displayUrl(source.file ?? (await getBlob(`/api/pictures/${source.id}`, signal)));
  const known = state.picture ? await predict(source, model, signal) : null;
  if (!signal.aborted && model !== state.model.id) await useModel(model);
  return known;
}

function replacePicture(source, view, known) {
  pending = wanted = null;
  if (state.picture) release(state.picture);
  Object.assign(state, { picture: source, target: null, against: null, removed: new Set() }, view?.() ?? {});
  return predictAndExplain(known);
}

function release(source) {
  if (pending === source) pending = null;
  if (source.url?.startsWith("blob:")) URL.revokeObjectURL(source.url);
}

// After a change of model: predicts the open picture, or the one that is loading.
export function reopen() {
  if (pending) return openPicture(Object.assign(pending, { model: null }));
  if (state.picture && !find("#work").hidden) return predictAndExplain();
}

// The prediction, unless it is known already; then the explanation.
export async function predictAndExplain(known = null) {
  Object.assign(state, { prediction: null, explanation: null });
  stop();
  predicting = new AbortController();
  const { signal } = predicting;
  try {
    for (const topic of ["picture", "explanation", "removed"]) emit(topic);
    const answer = known ?? (await predict(state.picture, state.model.id, signal));
    if (signal.aborted) return;
    state.prediction = answer;
    emit("prediction");
    await explain();
  } catch (error) {
    if (signal.aborted) return;
    state.picture = null;
    emit("nothing");
    showError(error);
  }
}

async function predict(picture, model, signal) {
  const ask = async (fields) => (await post("/api/predict", { ...fields, model, top: 5 }, signal)).json();
  const answer = await withPicture(ask, picture);
  if (!picture.sample) picture.id = answer.picture;
  return answer;
}

export async function explain() {
  stopExplaining();
  if (!state.prediction) return;
  clearError();
  emit("choice");
  const work = longWork(`${state.method}…`, "/api/explain", { trust: "false" }), { signal } = explaining;
  find("#glass").setAttribute("aria-busy", "true");
  showRunButton();
  try {
    const explanation = await work;
    if (!signal.aborted) showExplanation(explanation);
  } catch (error) {
    if (signal.aborted) return;
    restoreChoice();
    showError(error);
  }
}

export function showExplanation(explanation) {
  stopExplaining();
  state.explanation = explanation;
  const { target, against, method, params } = state;
  shown = { target, against, method, params };
  showRunButton();
  emit("choice");
  emit("explanation");
}

// After a failure, the choice goes back to the explanation on the page.
function restoreChoice() {
  if (state.explanation) Object.assign(state, shown);
  emit("choice");
}

function cancelExplaining() {
  stopExplaining();
  restoreChoice();
  note("Cancelled.");
}

function stopExplaining() {
  explaining.abort();
  explaining = new AbortController();
  endProgress();
}

function endProgress() {
  progress.stop();
  find("#glass").removeAttribute("aria-busy");
  showRunButton();
}

// If the first explanation was cancelled or failed, a button starts it again.
function showRunButton() {
  find("#run").hidden = !state.prediction || state.explanation !== null || find("#glass").hasAttribute("aria-busy");
}
find("#run").addEventListener("click", explain);

function stop() {
  predicting.abort();
  stopExplaining();
}

// Long requests about the explained class: one at a time, with a progress bar.
export async function longWork(text, path, fields) {
  stopExplaining();
  const { signal } = explaining;
  progress.start(text, cancelExplaining);
  try {
    return await withPicture((picture) =>
      job(path, { ...picture, ...choiceFields(), ...fields }, signal, (event, data) => progress.update(event, data)));
  } finally {
    if (!signal.aborted) endProgress();
  }
}
