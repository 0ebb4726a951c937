// Ways to open a picture: drop, paste, file, camera, sample.
import { loaded, openPicture, predictAndExplain } from "./explain.js";
import { element, find } from "./helpers.js";
import { clearError, note, noteWhile, showError } from "./messages.js";
import { compareWith, comparing } from "./similar.js";
import { on, state } from "./state.js";

const start = find("#start"), work = find("#work"), veil = find("#veil");
const WINDOW = 6, ACROSS = 3; // panes; those without a sample are coloured glass

export function showStart() {
  const panes = (state.samples.some(suits) ? state.samples.filter(suits) : state.samples).map(pane);
  while (panes.length < WINDOW || panes.length % ACROSS) panes.push(element("li", { class: "glass", "aria-hidden": "true" }));
  find("#samples").replaceChildren(...panes);
  delete document.documentElement.dataset.opening;
  start.hidden = false;
  work.hidden = true;
  find("#new").hidden = true;
  find("#back").hidden = state.picture === null;
}

const suits = (sample) => state.models.some((model) => model.id === sample.model);

function pane(sample) {
  const choose = () => openSample(sample.name, state.modelPinned || !suits(sample) ? null : sample.model).catch(showError);
  return element("li", {}, element("button", { type: "button", class: "pane", onclick: choose },
    element("img", { src: sample.thumbnail ?? sample.url, alt: "", loading: "lazy" }), element("span", {}, sample.title)));
}

function showWork() {
  start.hidden = true;
  work.hidden = false;
  find("#new").hidden = false;
}

on("picture", showWork);
on("nothing", () => showStart());

export async function openSample(name, model) {
  const sample = state.samples.find((other) => other.name === name);
  const known = state.samples.map((other) => other.name).join(", ");
  if (!sample) throw new Error(`This server has no sample “${name}”: expected one of ${known}.`);
  return openPicture({ sample: name, url: sample.url, name: sample.title, model });
}

async function openFiles(files, otherwise) {
  const [file] = files;
  if (!file) return otherwise && showError(new Error(otherwise));
  clearError();
  if (files.length > 1) note(`Only one image at a time: opening ${file.name}.`);
  try {
    if (!state.model) await noteWhile("Waiting for the server…", loaded());
    const open = comparing() ? compareWith : openPicture;
    await open({ file, name: file.name || "pasted image" });
  } catch (error) {
    showError(error);
  }
}

for (const id of ["file", "camera"]) {
  find(`#${id}`).addEventListener("change", ({ target: field }) => {
    openFiles(field.files);
    field.value = "";
  });
}
find("#choose").addEventListener("click", () => find("#file").click());
find("#photograph").addEventListener("click", () => find("#camera").click());
find("#new").addEventListener("click", () => {
  showStart();
  find("#choose").focus();
});
find("#back").addEventListener("click", () => {
  showWork();
  find("#panes").focus();
  if (!state.prediction) predictAndExplain(); // the model was changed in the meantime
});

document.addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (!files.length && event.target.matches?.("input")) return;
  openFiles(files, "There is no image in the clipboard: copy one first.");
});

let depth = 0; // the pointer also enters and leaves child elements
document.addEventListener("dragenter", (event) => {
  event.preventDefault();
  depth++;
  find("p", veil).textContent = comparing() ? "Drop to compare" : "Drop to open";
  veil.hidden = false;
});
document.addEventListener("dragleave", () => {
  depth = Math.max(0, depth - 1);
  veil.hidden = depth === 0;
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  depth = 0;
  veil.hidden = true;
  openFiles([...event.dataTransfer.files], "That was not a file: drop an image file.");
});
