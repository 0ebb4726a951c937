// The state of the page, and listeners for its changes.
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
  target: null, // index of a class; null: the predicted class
  against: null,
  method: null, // name
  requestedMethod: null, // which the model may not support
  params: {}, // that differ from the method's defaults
  removed: new Set(), // indices of patches
  alpha: 0.85,
  drawing: "smooth", // or "blocks", "outline"
};

const listeners = {};

export function on(topics, listener) {
  for (const topic of topics.split(" ")) (listeners[topic] ??= []).push(listener);
}

// Topics: model, picture, nothing (no picture any more), prediction, choice, explanation, removed, look.
export function emit(topic, detail) {
  for (const listener of listeners[topic] ?? []) listener(detail);
}

export function methodRow(name = state.method) {
  return state.methods.find((row) => row.name === name);
}

// A name that several classes share is followed by the index.
export function label(index) {
  const name = state.model.labels?.[index];
  if (name === undefined) return `class ${index}`;
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

// The explained class, with its name and probability if known.
export function target() {
  const { explanation, prediction } = state;
  const index = state.target ?? prediction?.classes[0].index ?? null;
  if (index === null) return null;
  const known = prediction?.classes.find((row) => row.index === index);
  const probability = known?.probability ?? (explanation?.target === index ? explanation.probability : null);
  return { index, label: label(index), probability };
}

// Patches from the most to the least important.
export function order() {
  const flat = state.explanation.tokens.flat();
  return flat.map((_, place) => place).sort((a, b) => flat[b] - flat[a] || a - b);
}
