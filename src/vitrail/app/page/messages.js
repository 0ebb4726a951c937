// Errors, notes, and announcements for screen readers.
import { debounce, find } from "./helpers.js";

const PATIENCE = 400;
const alertBox = find("#alert");
const fade = debounce(6000, () => note(""));

export function showError(error) {
  if (error?.name === "AbortError") return;
  const text = error?.message || String(error);
  find("p", alertBox).textContent = text.charAt(0).toUpperCase() + text.slice(1);
  find("#token-form").hidden = error?.status !== 401;
  alertBox.hidden = false;
}

export function clearError() {
  alertBox.hidden = true;
}

export function note(text, stays = false) {
  find("#note").textContent = text;
  if (text && !stays) fade();
}

// A note as long as the work lasts, if that is longer than a moment.
export async function noteWhile(text, work) {
  const timer = setTimeout(() => note(text, true), PATIENCE);
  try {
    return await work;
  } finally {
    clearTimeout(timer);
    if (find("#note").textContent === text) note("");
  }
}

export const speak = debounce(250, (text) => {
  find("#spoken").textContent = text;
});

find("#alert > button").addEventListener("click", clearError);
