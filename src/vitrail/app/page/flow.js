// From a picture to its explanation: the requests, in their order; what is newer cancels what is older.
import { bytes, get, job, post, Problem } from "./api.js";
import { complain, forgive, note, noteWhile } from "./notes.js";
import { Progress } from "./progress.js";
import { methodRow, state, tell } from "./state.js";
import { find } from "./tools.js";
import { shownAt } from "./upright.js";

const progress = new Progress(find("#progress"));
let wanted = null; // {model, view} of a link, until its picture is there
let pending = null; // the picture that is being opened
let shown = null; // the choice that the explanation on the page answers
let opening = new AbortController(), predicting = new AbortController(), explaining = new AbortController();

// How a request names the picture.
function pictureFields({ sample, id, file }) {
  if (sample) return { sample };
  return id ? { picture: id } : { image: file };
}

export function choiceFields() {
  return {
    model: state.model.id,
    method: state.method,
    target: state.target,
    against: methodRow()["class-specific"] ? state.against : null,
    params: Object.keys(state.params).length ? JSON.stringify(state.params) : null,
  };
}

// Sends again what the server has forgotten, as long as this page still holds it.
export async function withPicture(ask, picture = state.picture) {
  try {
    return await ask(pictureFields(picture));
  } catch (error) {
    if (error.status !== 410 || !picture.file) throw error;
    const answer = await ask({ image: picture.file });
    picture.id = answer.picture ?? picture.id;
    return answer;
  }
}

export async function useModel(id) {
  const found = state.models.find((model) => model.id === id);
  const known = state.models.map((model) => model.id).join(", ");
  if (!found) throw new Problem(`This server has no model “${id}”: it has ${known}.`);
  const rows = await get(`/api/methods?model=${encodeURIComponent(id)}`);
  const methods = rows.filter((row) => row.supported === "yes"), unfit = rows.filter((row) => row.supported !== "yes");
  Object.assign(state, { model: found, methods, unfit, prediction: null, explanation: null });
  Object.assign(state, { target: null, against: null, params: {}, removed: new Set(), asked: state.method });
  if (!methodRow()) state.method = found.default_method;
  wanted = null;
  stop();
  tell("model");
}

// What is opened next comes with this model (null: any) and with what view() says, called once the model is there.
export function restoreLater(model, view) {
  wanted = { model, view };
}

// source: {file, name} | {sample, url, name, model?} | {id, name}. What is open stays until the model has read the new one.
export async function openPicture(source) {
  forgive();
  opening.abort();
  opening = new AbortController();
  pending = source;
  const { signal } = opening, model = wanted?.model ?? source.model ?? state.model.id, view = wanted?.view;
  const endNote = noteWhile(`Opening ${source.name}…`);
  let known;
  try {
    source.url ??= await shownAt(source.file ?? (await bytes(`/api/pictures/${source.id}`, signal)));
    known = state.picture ? await predict(source, model, signal) : null;
    if (!signal.aborted && model !== state.model.id) await useModel(model);
  } catch (error) {
    if (!signal.aborted) {
      release(source);
      throw error;
    }
  } finally {
    endNote();
  }
  if (!signal.aborted) return replacePicture(source, view, known);
  if (pending !== source) release(source);
}

function replacePicture(source, view, known) {
  pending = wanted = null;
  if (state.picture) release(state.picture);
  Object.assign(state, { picture: source, target: null, against: null, removed: new Set() }, view?.() ?? {});
  return look(known);
}

function release(source) {
  if (pending === source) pending = null;
  if (source.url?.startsWith("blob:")) URL.revokeObjectURL(source.url);
}

// Another model: it looks at the picture that is open, or at the one that is on its way.
export function lookAgain() {
  if (pending) return openPicture(Object.assign(pending, { model: null }));
  if (state.picture && !find("#work").hidden) return look();
}

// The answer of the model, where it is not known already; then why.
export async function look(known = null) {
  Object.assign(state, { prediction: null, explanation: null });
  stop();
  predicting = new AbortController();
  const { signal } = predicting;
  try {
    for (const topic of ["picture", "explanation", "removed"]) tell(topic);
    const answer = known ?? (await predict(state.picture, state.model.id, signal));
    if (signal.aborted) return;
    state.prediction = answer;
    tell("prediction");
    await explain();
  } catch (error) {
    if (signal.aborted) return;
    state.picture = null;
    tell("nothing");
    complain(error);
  }
}

async function predict(picture, model, signal) {
  const ask = async (named) => (await post("/api/predict", { ...named, model, top: 5 }, signal)).json();
  const answer = await withPicture(ask, picture);
  if (!picture.sample) picture.id = answer.picture;
  return answer;
}

export async function explain() {
  stopExplaining();
  if (!state.prediction) return;
  const { signal } = explaining;
  forgive();
  tell("choice");
  find("#glass").setAttribute("aria-busy", "true");
  offerExplaining();
  progress.start(`${state.method}…`, cancelExplaining);
  try {
    const found = await withPicture((picture) =>
      job("/api/explain", { ...picture, ...choiceFields() }, signal, (event, data) => progress.hear(event, data)));
    if (signal.aborted) return;
    showExplanation(found);
  } catch (error) {
    if (signal.aborted) return;
    endProgress();
    takeBack();
    complain(error);
  }
}

export function showExplanation(found) {
  stopExplaining();
  state.explanation = found;
  const { target, against, method, params } = state;
  shown = { target, against, method, params };
  offerExplaining();
  tell("choice");
  tell("explanation");
}

// The page never says that it shows what it could not get.
function takeBack() {
  if (state.explanation) Object.assign(state, shown);
  tell("choice");
}

function cancelExplaining() {
  stopExplaining();
  takeBack();
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
  offerExplaining();
}

// After a first explanation that was cancelled or failed there must be a way to it.
function offerExplaining() {
  find("#run").hidden = !state.prediction || state.explanation !== null || find("#glass").hasAttribute("aria-busy");
}
find("#run").addEventListener("click", explain);

function stop() {
  predicting.abort();
  stopExplaining();
}

// Other long work on the stage: one at a time, under the same bar.
export async function longWork(text, path, fields) {
  stopExplaining();
  const { signal } = explaining;
  progress.start(text, cancelExplaining);
  try {
    return await withPicture((picture) =>
      job(path, { ...picture, ...choiceFields(), ...fields }, signal, (event, data) => progress.hear(event, data)));
  } finally {
    if (!signal.aborted) endProgress();
  }
}
