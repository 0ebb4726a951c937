// Patches taken away by hand: the probability without them, asked anew after every change.
import { post } from "./api.js";
import { withPicture } from "./flow.js";
import { complain, speak } from "./notes.js";
import { label, on, order, state, target, tell } from "./state.js";
import { find, later, percent, points } from "./tools.js";

const DEBOUNCE = 60, TENTH = 0.1;
let asking = new AbortController();

on("picture prediction explanation", () => changed());
on("removed", changed);

// known: a probability that is known without asking, as in an animation.
function changed(known) {
  asking.abort();
  const count = state.removed.size, ready = state.explanation !== null;
  for (const id of ["delete-top", "delete-all"]) find(`#${id}`).disabled = !ready || count === patches();
  find("#reset").disabled = count === 0;
  const told = count ? `${count} of ${patches()} patches deleted.` : "Click or drag over patches in the picture.";
  find("#removed").textContent = told;
  const own = target();
  if (!own || own.probability === null) return blank();
  if (known !== undefined) return show(known, own);
  if (!count) return show(own.probability, own);
  asking = new AbortController();
  find("#meter").setAttribute("aria-busy", "true");
  return askLater(asking.signal);
}

const askLater = later(DEBOUNCE, ask);

async function ask(signal) {
  if (signal.aborted) return;
  const own = target(), removed = JSON.stringify([...state.removed].sort((one, other) => one - other));
  try {
    const answer = await withPicture(async (picture) =>
      (await post("/api/mask", { ...picture, model: state.model.id, target: own.index, removed }, signal)).json());
    if (signal.aborted) return;
    show(answer.probability, own, answer);
    speak(`${own.label}: ${percent(answer.probability)}, ${points(answer.probability - answer.full)}.`);
  } catch (error) {
    if (signal.aborted) return;
    find("#meter").removeAttribute("aria-busy");
    blank();
    complain(error);
  }
}

function show(probability, own, answer = null) {
  const meter = find("#meter"), difference = probability - own.probability;
  meter.removeAttribute("aria-busy");
  find("#now").textContent = percent(probability);
  find("#now").title = own.label;
  const delta = find("#delta");
  delta.textContent = state.removed.size ? points(difference) : own.label;
  delta.title = delta.textContent;
  delta.className = state.removed.size ? (difference < -0.00005 ? "down" : difference > 0.00005 ? "up" : "") : "name";
  find(".bar-now", meter).style.setProperty("--now", probability);
  find(".bar-now", meter).style.setProperty("--full", own.probability);
  find("#says").textContent = verdict(own, answer);
}

function verdict(own, answer) {
  if (!answer) return state.removed.size ? `“${own.label}” with these patches gone.` : "with the whole picture.";
  const [first] = answer.classes;
  const how = answer.space === "pixels" ? "Patches are painted in the mean colour. " : "";
  if (first.index === own.index) return `${how}The answer is still “${own.label}”.`;
  return `${how}The answer is now “${label(first.index)}” (${percent(first.probability)}).`;
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
  tell("removed");
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
