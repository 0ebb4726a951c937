// From a picture to its explanation: the requests, in their order; what is newer cancels what is older.
import { bytes, get, job, post, Problem } from "./api.js";
import { complain, forgive, note } from "./notes.js";
import { Progress } from "./progress.js";
import { methodRow, state, tell } from "./state.js";
import { find } from "./tools.js";

const progress = new Progress(find("#progress"));
let wanted = null; // the view of a link, until its picture is there
let shown = null; // the choice that the explanation on the page answers
let predicting = new AbortController(), explaining = new AbortController();

// How a request names the picture.
export function pictureFields() {
  const { sample, id, file } = state.picture;
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
export async function withPicture(ask) {
  const { picture } = state;
  try {
    return await ask(pictureFields());
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
  Object.assign(state, { model: found, methods, unfit, target: null, against: null, params: {}, removed: new Set() });
  if (!methodRow()) state.method = found.default_method;
  wanted = null;
  tell("model");
}

export function restoreLater(view) {
  wanted = view;
}

// source: {file} | {sample, url, name} | {id}
export async function openPicture(source) {
  forgive();
  stop();
  if (source.id && !source.url) source.url = URL.createObjectURL(await bytes(`/api/pictures/${source.id}`));
  if (source.file) source.url = URL.createObjectURL(source.file);
  if (state.picture?.url.startsWith("blob:")) URL.revokeObjectURL(state.picture.url);
  Object.assign(state, { picture: source, target: null, against: null, removed: new Set() }, wanted ?? {});
  wanted = null;
  await look();
}

// The answer of the model, then why.
export async function look() {
  Object.assign(state, { prediction: null, explanation: null });
  stop();
  tell("picture");
  tell("explanation");
  tell("removed");
  predicting = new AbortController();
  const { signal } = predicting;
  try {
    const answer = await withPicture(async (picture) =>
      (await post("/api/predict", { ...picture, model: state.model.id, top: 5 }, signal)).json());
    if (signal.aborted) return;
    state.prediction = answer;
    if (!state.picture.sample) state.picture.id = answer.picture;
    tell("prediction");
    await explain();
  } catch (error) {
    if (signal.aborted) return;
    state.picture = null;
    tell("nothing");
    complain(error);
  }
}

export async function explain() {
  stopExplaining();
  if (!state.prediction) return;
  const { signal } = explaining;
  tell("choice");
  find("#glass").setAttribute("aria-busy", "true");
  progress.start(`${state.method}…`, cancelExplaining);
  try {
    const found = await withPicture((picture) =>
      job("/api/explain", { ...picture, ...choiceFields() }, signal, (event, data) => progress.hear(event, data)));
    if (signal.aborted) return;
    forgive();
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
}

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
