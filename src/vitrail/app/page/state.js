// What the page knows, and who wants to hear that it changed.
export const state = {
  models: [],
  samples: [],
  model: null, // one of models
  methods: [], // those that fit the model
  unfit: [], // the others
  insists: false, // whether the reader chose the model: then a sample does not change it
  picture: null, // {file?, sample?, id?, url, name}
  prediction: null, // the answer of /api/predict
  explanation: null, // the answer of /api/explain
  target: null, // index of a class; null = the predicted one
  against: null,
  method: null, // name
  asked: null, // the method that was asked for, where the model may not have it
  params: {}, // only what differs from the method's defaults
  removed: new Set(), // numbers of patches
  alpha: 0.85,
  smooth: true,
};

const listeners = {};

export function on(topics, listener) {
  for (const topic of topics.split(" ")) (listeners[topic] ??= []).push(listener);
}

// Topics: model, picture, nothing (no picture any more), prediction, choice, explanation, removed, look.
export function tell(topic, detail) {
  for (const listener of listeners[topic] ?? []) listener(detail);
}

export function methodRow(name = state.method) {
  return state.methods.find((row) => row.name === name);
}

// A name that two classes share is told with its number.
export function label(index) {
  const name = state.model.labels?.[index];
  if (name === undefined) return `class ${index}`;
  return sharedNames(state.model).has(name) ? `${name} (${index})` : name;
}

const shared = new WeakMap(); // of a model: the names that stand for several of its classes
function sharedNames(model) {
  if (!shared.has(model)) {
    const seen = new Set();
    shared.set(model, new Set(model.labels.filter((name) => seen.has(name) || !seen.add(name))));
  }
  return shared.get(model);
}

// What the explained class is called and how likely it is, as far as it is known.
export function target() {
  const { explanation, prediction } = state;
  const index = state.target ?? prediction?.classes[0].index ?? null;
  if (index === null) return null;
  const known = prediction?.classes.find((row) => row.index === index);
  const probability = known?.probability ?? (explanation?.target === index ? explanation.probability : null);
  return { index, label: label(index), probability };
}

// Patches from the most to the least important, by the map on the grid of patches.
export function order() {
  const flat = state.explanation.tokens.flat();
  return flat.map((_, place) => place).sort((one, other) => flat[other] - flat[one] || one - other);
}
