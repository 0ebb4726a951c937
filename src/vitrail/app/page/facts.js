// What is said about the map below the picture: how far to trust it, how the score splits, which patches are storage.
import { job } from "./api.js";
import { choiceFields, withPicture } from "./explain.js";
import { debounce, find } from "./helpers.js";
import { emit, on, state } from "./state.js";

const DEBOUNCE = 60;
let request = new AbortController();

on("model picture choice explanation", show);

function show() {
  request.abort();
  const { explanation } = state;
  find("#trust").textContent = explanation ? (explanation.trust_line ?? "trust: asking the model…") : "";
  find("#split").textContent = explanation?.score_line ?? "";
  find("#storage").textContent = explanation?.storage_line ?? "";
  find("#storage-switch").hidden = !explanation?.storage.length;
  if (!explanation || explanation.trust) return;
  request = new AbortController();
  requestSoon(explanation, request.signal);
}

const requestSoon = debounce(DEBOUNCE, requestTrust);

// The map is on the page already; if another one is being computed, that goes first.
async function requestTrust(explanation, signal) {
  if (signal.aborted || find("#glass").hasAttribute("aria-busy")) return;
  try {
    const answer = await withPicture((picture) => job("/api/trust", { ...picture, ...choiceFields() }, signal, () => {}));
    if (signal.aborted) return;
    Object.assign(explanation, { trust: answer.trust, trust_line: answer.trust_line });
    show();
  } catch (error) {
    if (!signal.aborted) find("#trust").textContent = `trust: not known. ${error.message}`;
  }
}

find("#hide-storage").addEventListener("change", ({ target: box }) => {
  state.hideStorage = box.checked;
  emit("look");
});
