// Patches removed by hand: the probability, or the similarity, without them, requested after every change.
import { post } from "./api.js";
import { questionFields, withPicture } from "./explain.js";
import { amount, debounce, find, gain, percent } from "./helpers.js";
import { showError, speak } from "./messages.js";
import { emit, isPlace, label, measure, on, order, state, target } from "./state.js";

const DEBOUNCE = 60, TENTH = 0.1;
let request = new AbortController();

on("picture prediction explanation", () => changed());
on("removed", changed);

// known: a probability that needs no request, as in the animation.
function changed(known) {
  request.abort();
  const count = state.removed.size, ready = state.explanation !== null;
  for (const id of ["delete-top", "delete-all"]) find(`#${id}`).disabled = !ready || count === patches();
  find("#reset").disabled = count === 0;
  const hint = isPlace(state.ask.kind) ? "Click chooses a place: move to a patch with the arrow keys, and press Enter." : "Click or drag over patches of the image.";
  const text = count ? `${count} of ${patches()} patches deleted.` : hint;
  find("#removed").textContent = text;
  const current = target();
  if (!current || current.probability === null) return blank();
  if (known !== undefined) return show(known, current);
  if (!count) return show(current.probability, current);
  request = new AbortController();
  find("#meter").setAttribute("aria-busy", "true");
  return requestSoon(request.signal);
}

const requestSoon = debounce(DEBOUNCE, requestProbability);

async function requestProbability(signal) {
  if (signal.aborted) return;
  const current = target(), removed = JSON.stringify([...state.removed].sort((a, b) => a - b));
  const fields = state.ask.kind === "class" ? { target: current.index } : questionFields();
  try {
    const answer = await withPicture(async (picture) =>
      (await post("/api/mask", { ...picture, model: state.model.id, ...fields, removed }, signal)).json());
    if (signal.aborted) return;
    show(answer.probability, current, answer);
    speak(`${current.label}: ${amount(answer.probability, measure())}, ${gain(answer.probability - answer.full, measure())}.`);
  } catch (error) {
    if (signal.aborted) return;
    find("#meter").removeAttribute("aria-busy");
    blank();
    showError(error);
  }
}

function show(probability, current, answer = null) {
  const meter = find("#meter"), difference = probability - current.probability, whole = Math.abs(current.probability);
  const share = (value) => Math.min(Math.max(measure() === "dot" ? value / whole || 0 : value, 0), 1);
  meter.removeAttribute("aria-busy");
  find("#now").textContent = amount(probability, measure());
  find("#now").title = current.label;
  const delta = find("#delta");
  delta.textContent = state.removed.size ? gain(difference, measure()) : current.label;
  delta.title = delta.textContent;
  delta.className = state.removed.size ? (difference < -0.00005 ? "down" : difference > 0.00005 ? "up" : "") : "name";
  find(".bar-now", meter).style.setProperty("--now", share(probability));
  find(".bar-now", meter).style.setProperty("--full", share(current.probability));
  find("#says").textContent = verdict(current, answer);
}

function verdict(current, answer) {
  if (!answer) return state.removed.size ? `“${current.label}” without these patches.` : "with the whole image.";
  const [first] = answer.classes;
  const how = answer.space === "pixels" ? "Patches are filled with the mean colour. " : "";
  if (state.ask.kind === "similarity") return `${how}${current.label} without these patches.`;
  if (first.index === current.index) return `${how}The prediction is still “${current.label}”.`;
  const name = state.ask.kind === "group" ? first.label : label(first.index, first.label);
  return `${how}The prediction is now “${name}” (${percent(first.probability)}).`;
}

function blank() {
  find("#now").textContent = "–";
  find("#delta").textContent = "";
  find("#says").textContent = "\u00a0";
  find(".bar-now").style.setProperty("--now", 0);
  find(".bar-now").style.setProperty("--full", 0);
}

function patches() {
  const [rows, columns] = state.prediction?.grid ?? state.model.grid;
  return rows * columns;
}

function remove(set) {
  state.removed = set;
  emit("removed");
}

find("#delete-top").addEventListener("click", () => {
  const left = order().filter((patch) => !state.removed.has(patch));
  remove(new Set([...state.removed, ...left.slice(0, Math.max(1, Math.round(TENTH * patches())))]));
});
find("#delete-all").addEventListener("click", () => {
  find('input[name="brush"][value="insert"]').checked = true;
  remove(new Set(order()));
});
find("#reset").addEventListener("click", () => {
  find('input[name="brush"][value="delete"]').checked = true;
  remove(new Set());
});
