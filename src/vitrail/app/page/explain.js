// From a picture to its explanation: the requests in order; a new one cancels the previous.
import { get, getBlob, job, post, Problem } from "./api.js";
import { element, find } from "./helpers.js";
import { clearError, note, noteWhile, showError } from "./messages.js";
import { displayUrl } from "./orientation.js";
import { Progress } from "./progress.js";
import { emit, isPlace, methodRow, segmentAt, state } from "./state.js";

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
    ...questionFields(),
    params: Object.keys(state.params).length ? JSON.stringify(state.params) : null,
  };
}

// What is asked; withPicture adds the picture of a similarity.
export function questionFields() {
  const { ask, target, against } = state, contrasts = methodRow()["class-specific"];
  if (ask.kind === "similarity") return { measure: ask.measure };
  if (ask.kind === "group") return { group: ask.group, against_group: (contrasts && ask.rival) || null };
  const classes = { target: ask.kind === "text" ? ask.text : target, against: contrasts ? against : null };
  if (ask.kind === "box") return { ...classes, box: ask.query };
  if (ask.kind === "region") return { ...classes, region: JSON.stringify(segmentAt(ask.cell)?.cells ?? [ask.cell]) };
  return classes;
}

// Asks with the fields that name the picture and the one it is compared with; uploads them again if the server has
// evicted them and this page still has the files.
export async function withPicture(ask, picture = state.picture, other = state.ask.kind === "similarity" ? state.other : null) {
  const fields = (again) => ({ ...named(picture, ["sample", "picture", "image"], again),
    ...(other && named(other, ["other_sample", "other_picture", "other"], again)) });
  try {
    return await ask(fields(false));
  } catch (error) {
    if (error.status !== 410 || !(picture.file || other?.file)) throw error;
    const answer = await ask(fields(true));
    picture.id = answer.picture ?? picture.id;
    if (other) other.id = answer.other ?? other.id;
    return answer;
  }
}

function named({ sample, id, file }, [sampleField, idField, fileField], again) {
  if (sample) return { [sampleField]: sample };
  return id && !(again && file) ? { [idField]: id } : { [fileField]: file };
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
  Object.assign(state, { model, methods, unsupported, prediction: null, explanation: null, second: null, other: null });
  Object.assign(state, { ask: firstAsk(), target: null, against: null, params: {}, removed: new Set() });
  state.requestedMethod = state.method;
  if (!methodRow()) state.method = model.default_method;
  wanted = null;
  stop();
  emit("model");
}

// A model without classes is asked how similar two pictures are, once there is a second one.
export const firstAsk = () => ({ kind: state.model.asks[0], ...(state.model.asks[0] === "similarity" && { measure: "cosine" }) });
const isAsked = () => state.ask.kind !== "similarity" || state.other !== null;

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
  let known, restored;
  try {
    known = await noteWhile(`Opening ${source.name}…`, prepare(source, model, signal));
    if (!signal.aborted) restored = await view?.(signal);
  } catch (error) {
    if (!signal.aborted) {
      release(source);
      throw error;
    }
  }
  if (!signal.aborted) return replacePicture(source, restored, known);
  if (pending !== source) release(source);
}

// Returns the prediction if another picture is open: a refused file must not replace it.
async function prepare(source, model, signal) {
  await makeVisible(source, signal);
  const known = state.picture ? await predict(source, model, signal) : null;
  if (!signal.aborted && model !== state.model.id) await useModel(model);
  return known;
}

async function makeVisible(source, signal) {
  source.url ??= await displayUrl(source.file ?? (await getBlob(`/api/pictures/${source.id}`, signal)));
}

// A picture to compare with, as the model sees it.
export async function prepareOther(source, signal) {
  await makeVisible(source, signal);
  source.prediction = await predict(source, state.model.id, signal);
  return source;
}

function replacePicture(source, restored, known) {
  pending = wanted = null;
  if (state.picture) release(state.picture);
  const ask = isPlace(state.ask.kind) ? firstAsk() : state.ask; // a place is one of the previous picture
  Object.assign(state, { picture: source, ask, target: null, against: null, removed: new Set() }, restored ?? {});
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
  Object.assign(state, { prediction: null, explanation: null, second: null });
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
  const answer = await withPicture(ask, picture, null);
  if (!picture.sample) picture.id = answer.picture;
  return answer;
}

// onError tells about a failure: a question that is still being typed may be wrong.
export async function explain(onError = showError) {
  stopExplaining();
  if (!state.prediction || !isAsked()) return;
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
    onError(error);
  }
}

export function showExplanation(explanation) {
  stopExplaining();
  const { ask, other, target, against, method, params } = state;
  Object.assign(state, { explanation, answered: ask, second: null });
  if (shown?.other && shown.other !== other) release(shown.other);
  shown = { ask, other, target, against, method, params };
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
  find("#run").hidden = !state.prediction || !isAsked() || state.explanation !== null || find("#glass").hasAttribute("aria-busy");
}
find("#run").addEventListener("click", () => explain());

function stop() {
  predicting.abort();
  stopExplaining();
}

// Long requests about what is asked: one at a time, with a progress bar.
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
