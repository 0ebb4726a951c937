// What the page says to the reader: errors, notes, and what a screen reader should speak.
import { find, later } from "./tools.js";

const PATIENCE = 400;
const alertBox = find("#alert");
const fade = later(6000, () => note(""));

export function complain(error) {
  if (error?.name === "AbortError") return;
  const text = error?.message || String(error);
  find("p", alertBox).textContent = text.charAt(0).toUpperCase() + text.slice(1);
  find("#token-form").hidden = error?.status !== 401;
  alertBox.hidden = false;
}

export function forgive() {
  alertBox.hidden = true;
}

export function note(text, stays = false) {
  find("#note").textContent = text;
  if (text && !stays) fade();
}

// A note for work that may take longer than a moment; what is returned takes it away.
export function noteWhile(text) {
  const timer = setTimeout(() => note(text, true), PATIENCE);
  return () => {
    clearTimeout(timer);
    if (find("#note").textContent === text) note("");
  };
}

export const speak = later(250, (text) => {
  find("#spoken").textContent = text;
});

find("#alert > button").addEventListener("click", forgive);
