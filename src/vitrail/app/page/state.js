// The state of the page, and listeners for its changes.
import { percent } from "./helpers.js";

export const state = {
  models: [],
  samples: [],
  model: null, // from models
  methods: [], // that support the model
  unsupported: [], // those that do not
  modelPinned: false, // the user chose the model: a sample does not change it
  picture: null, // {file?, sample?, id?, url, name}
  prediction: null, // answer of /api/predict
  explanation: null, // answer of /api/explain
  ask: { kind: "class" }, // or {kind: "group", group, rival}, {kind: "text", text}, {kind: "box", query}, {kind: "region", cell}, {kind: "similarity", measure, name, picture}
  answered: null, // the ask that the explanation answers
  target: null, // index of a class; null: the predicted class
  against: null,
  other: null, // the picture of a similarity: {file?, sample?, id?, url, name, prediction}
  second: null, // its explanation: how it is similar to the first
  method: null, // name
  requestedMethod: null, // which the model may not support
  params: {}, // that differ from the method's defaults
  removed: new Set(), // indices of patches
  alpha: 0.85,
  drawing: "smooth", // or "blocks", "outline"
  hideStorage: false, // draw patches used as storage as if they had no evidence
};

const listeners = {};

export function on(topics, listener) {
  for (const topic of topics.split(" ")) (listeners[topic] ??= []).push(listener);
}

// Topics: model, picture, nothing (no picture any more), prediction, choice, explanation, second, pairs, removed, look, places.
export function emit(topic, detail) {
  for (const listener of listeners[topic] ?? []) listener(detail);
}

export function methodRow(name = state.method) {
  return state.methods.find((row) => row.name === name);
}

// A name that several classes share is followed by the index; a text may be a class that the model itself does not have.
export function label(index, text = `class ${index}`) {
  const name = state.model.labels?.[index];
  if (name === undefined) return text;
  return sharedNames(state.model).has(name) ? `${name} (${index})` : name;
}

const shared = new WeakMap(); // model → names that several of its classes share
function sharedNames(model) {
  if (!shared.has(model)) {
    const names = new Set();
    shared.set(model, new Set(model.labels.filter((name) => names.has(name) || !names.add(name))));
  }
  return shared.get(model);
}

// Kinds of questions about a class at a place of the picture.
export const isPlace = (kind) => kind === "box" || kind === "region";

// The segment that a cell of the class map belongs to.
export const segmentAt = (cell) => state.prediction?.segments?.find(({ cells }) => cells.includes(cell));

// The answer to what is asked, or null if the map on the page answers something else.
const answer = () => (state.ask === state.answered ? state.explanation : null);

// What is asked, with its name, and its probability or score if known; null if there is no answer yet.
export function target() {
  if (state.ask.kind !== "class") {
    return answer() && { index: answer().target, label: names()[0], probability: answer().probability };
  }
  const index = state.target ?? state.prediction?.classes[0]?.index ?? null;
  return index === null ? null : { index, label: label(index), probability: probability(index) };
}

// The names of what the map is about, and of what it is opposed to (or null).
export function names() {
  const { answered, explanation } = state, { target: index, against, label: text, against_label: rival } = explanation;
  if (answered.kind === "similarity") return [`similarity to ${answered.name}`, null];
  if (answered.kind === "group") return [text, rival];
  return [label(index, text), against === null ? null : label(against, rival)];
}

// The most probable classes; those of an answer about a text have it among them, those about a place are of this place.
export function topClasses() {
  if (!(state.ask.kind === "text" || isPlace(state.ask.kind)) || !answer()) return state.prediction?.classes ?? [];
  return answer().top.map(({ class: index, label: text, probability: share }) => ({ index, label: text, probability: share }));
}

export function probability(index) {
  const explanation = answer(), row = topClasses().find((other) => other.index === index);
  if (row) return row.probability;
  if (explanation?.target === index) return explanation.probability;
  return explanation?.against === index ? explanation.against_probability : null;
}

// What the number of the question is: "probability", or a score such as "cosine".
export const measure = () => (state.ask.kind === "similarity" ? state.ask.measure : "probability");

// The probability in brackets, to follow the name of the class; nothing if it is unknown.
export function probabilityText(index) {
  const share = probability(index);
  return share === null ? "" : ` (${percent(share)})`;
}

// The map as it is drawn; patches used as storage have no evidence if they are hidden.
export function drawnValues({ shares, signed, storage, grid: [rows, columns] }) {
  if (!state.hideStorage || !storage.length) return shares;
  const across = (x) => Math.floor(((x + 0.5) * columns) / shares[0].length);
  const patch = (y, x) => Math.floor(((y + 0.5) * rows) / shares.length) * columns + across(x);
  const stored = new Set(storage), visible = shares.flatMap((row, y) => row.filter((_, x) => !stored.has(patch(y, x))));
  const nothing = signed ? 0 : visible.reduce((least, value) => Math.min(least, value), Infinity);
  return shares.map((row, y) => row.map((value, x) => (stored.has(patch(y, x)) ? nothing : value)));
}

// The same for each patch, hidden or not; maps of pixels are averaged.
export function patchShares({ shares, tokens }) {
  return shares.length === tokens.length && shares[0].length === tokens[0].length ? shares : tokens;
}

// Patches from the most to the least important.
export function order() {
  const flat = state.explanation.tokens.flat();
  return flat.map((_, place) => place).sort((a, b) => flat[b] - flat[a] || a - b);
}
