// Pairs of patches, one of each of two pictures: which patch is pointed at, and its partners in the other picture.
import { emit, on, state } from "./state.js";

let shares = null; // {first, second: numbers of patches, values: row by row of the first}
let pointed = { side: null, patch: null };

on("model picture", forget);
on("choice", () => {
  if (shares && shares.ask !== state.ask) forget();
});

export const known = () => shares !== null;

export function keep({ shape: [first, second], base64 }) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  shares = { first, second, values: new Float32Array(bytes.buffer), ask: state.ask };
  emit("pairs");
}

export function forget() {
  shares = null;
  pointed = { side: null, patch: null };
  emit("pairs");
}

// side: "first" or "second"; patch: null if the pointer has left it.
export function pointAt(side, patch) {
  if (patch === null && pointed.side !== side) return;
  pointed = { side: patch === null ? null : side, patch };
  if (shares) emit("pairs");
}

// The shares of the patches of this side with the patch that is pointed at on the other; null if there is none.
export function partners(side) {
  if (!shares || pointed.patch === null || pointed.side === side) return null;
  return sharesOf(pointed.side, pointed.patch);
}

export function sharesOf(side, patch) {
  const { second, values } = shares;
  return side === "first" ? values.slice(patch * second, (patch + 1) * second) : values.filter((_, at) => at % second === patch);
}

export const best = (row) => row.reduce((top, share, at) => (share > row[top] ? at : top), 0);
