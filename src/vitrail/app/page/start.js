// Begins here: asks what the server has, restores the view of a link, and joins the parts of the page.
import { get, useToken } from "./api.js";
import "./classes.js";
import "./compare.js";
import "./curves.js";
import { lookAgain, openPicture, restoreLater, useModel } from "./flow.js";
import { readLink, writeLink } from "./link.js";
import { fromText } from "./methods.js";
import { complain, forgive } from "./notes.js";
import { openSample, showStart } from "./picking.js";
import "./saving.js";
import "./shell.js";
import "./stage.js";
import { label, methodRow, on, state, tell } from "./state.js";
import "./testing.js";
import { element, find, later } from "./tools.js";

async function begin() {
  const link = readLink(location.hash);
  if (link.token) {
    useToken(link.token);
    history.replaceState(null, "", location.pathname + location.hash.replace(/([#&])token=[^&]*&?/, "$1").replace(/[#&]$/, ""));
  }
  try {
    [state.models, state.samples] = await Promise.all([get("/api/models"), get("/api/samples")]);
    forgive();
    find("#model").replaceChildren(...state.models.map((model) => element("option", { value: model.id }, model.name)));
    await useModel(state.models[0].id);
    if (link.sample || link.picture) await restore(link);
    else showStart();
  } catch (error) {
    showStart();
    complain(error);
  }
}

async function restore(link) {
  const sample = state.samples.find((one) => one.name === link.sample);
  const model = link.model ?? (state.insists ? null : sample?.model);
  if (link.model) state.insists = true;
  restoreLater(model, () => viewOf(link));
  if (link.sample) return await openSample(link.sample, model);
  try {
    return await openPicture({ id: link.picture, name: "picture" });
  } catch (error) {
    if (![404, 410, 422].includes(error.status)) throw error;
    throw new Error("The server no longer has the picture of this link. Give it here again: everything else will be as it was.");
  }
}

// What of a link fits this model; a class or a method that it does not have is left out.
function viewOf(link) {
  const row = methodRow(link.method) ?? methodRow(), size = state.model.grid[0] * state.model.grid[1];
  const known = (index) => (index !== null && index < state.model.classes ? index : null);
  const fields = row.form.filter((about) => about.name in link.params);
  if (link.alpha !== null) find("#alpha").value = 100 * link.alpha;
  find(`input[name="drawing"][value="${link.smooth ? "smooth" : "blocks"}"]`).checked = true;
  return {
    method: row.name,
    asked: link.method,
    params: Object.fromEntries(fields.map((about) => [about.name, fromText(about, link.params[about.name])])),
    target: known(link.target),
    against: known(link.against),
    removed: new Set(link.removed.filter((patch) => patch < size)),
    alpha: link.alpha ?? state.alpha,
    smooth: link.smooth,
  };
}

// The address follows the picture at once: a reload must not bring the one before.
function keepLink() {
  if (state.picture?.sample || state.picture?.id) history.replaceState(null, "", writeLink());
}
on("picture prediction", keepLink);
on("explanation removed look", later(200, keepLink));
on("explanation", () => {
  const { explanation } = state;
  document.title = explanation ? `${label(explanation.target)} – vitrail` : "vitrail";
});
on("model", () => {
  find("#model").value = state.model.id;
  find("#model").title = state.model.note ?? "";
  find("#model-note").textContent = state.model.note ? `${state.model.name}: ${state.model.note}` : "";
});
on("picture", () => tell("look"));
window.addEventListener("hashchange", () => {
  const link = readLink(location.hash);
  if (link.token || !state.model) begin();
  else if (link.sample || link.picture) restore(link).catch(complain);
});

find("#model").addEventListener("change", async ({ target: field }) => {
  try {
    state.insists = true;
    await useModel(field.value);
    await lookAgain();
  } catch (error) {
    complain(error);
  }
});
find("#token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(find("#token").value.trim());
  begin();
});
find("#alpha").addEventListener("input", ({ target: field }) => {
  state.alpha = field.value / 100;
  tell("look");
});
find("#drawing").addEventListener("change", ({ target: field }) => {
  state.smooth = field.value === "smooth";
  tell("look");
});

begin();
