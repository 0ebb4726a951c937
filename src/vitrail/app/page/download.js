// Downloads: the figure, the numbers, a link.
import { post } from "./api.js";
import { choiceFields, withPicture } from "./explain.js";
import { element, findAll } from "./helpers.js";
import { writeLink } from "./link.js";
import { note, noteWhile, showError } from "./messages.js";
import { npz } from "./npz.js";
import { on, state } from "./state.js";

const buttons = findAll("[data-save]");
const savers = { png: savePicture, json: saveJson, npz: saveArrays, link: copyLink };

on("picture explanation", () => {
  for (const button of buttons) button.disabled = !state.explanation;
});
for (const button of buttons) {
  button.addEventListener("click", async () => {
    if (button.hasAttribute("aria-busy")) return;
    button.setAttribute("aria-busy", "true");
    try {
      await savers[button.dataset.save]();
    } catch (error) {
      showError(error);
    } finally {
      button.removeAttribute("aria-busy");
    }
  });
}

async function savePicture() {
  const name = fileName("png"), fields = { ...choiceFields(), storage: state.hideStorage ? "hide" : "mark" };
  const render = async (picture) => (await post("/api/picture", { ...picture, ...fields })).blob();
  save(await noteWhile("Rendering the PNG after the running job…", withPicture(render)), name);
}

// The file that `vitrail explain` writes: "map" repeats the values in the encoding that vitrail.open reads.
function saveJson() {
  const { shape, values } = state.explanation;
  const map = { shape, dtype: "float32", base64: base64(Float32Array.from(values.flat())) };
  save(new Blob([JSON.stringify({ ...state.explanation, map }, null, 1)], { type: "application/json" }), fileName("json"));
}

function saveArrays() {
  const { shape, values, grid, tokens, box, target } = state.explanation;
  save(npz({
    map: { shape, dtype: "<f4", data: Float32Array.from(values.flat()) },
    tokens: { shape: grid, dtype: "<f4", data: Float32Array.from(tokens.flat()) },
    box: { shape: [4], dtype: "<f8", data: Float64Array.from(box) },
    target: { shape: [1], dtype: "<i4", data: Int32Array.of(target) },
  }), fileName("npz"));
}

function base64(numbers) {
  let text = "";
  for (const byte of new Uint8Array(numbers.buffer)) text += String.fromCharCode(byte);
  return btoa(text);
}

function fileName(ending) {
  const clean = (text) => text.replace(/[^\w.-]+/g, "-").replace(/^[-.]+|-+$/g, "") || "picture";
  return `${clean(state.picture.name.replace(/\.[a-z0-9]+$/i, ""))}.${clean(state.method)}.${ending}`;
}

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const anchor = element("a", { href: url, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  note(`Saved as ${name}.`);
}

async function copyLink() {
  const link = location.origin + location.pathname + writeLink();
  const kept = state.picture.sample ? "" : " It works while the server keeps the image in memory.";
  try {
    await navigator.clipboard.writeText(link);
    note(`Link copied.${kept}`);
  } catch {
    // Outside https and localhost there is no clipboard: the address bar has the same link.
    note("The browser does not allow this page to copy: the link is in the address bar.");
  }
}
