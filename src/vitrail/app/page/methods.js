// The choice of a method, and the form for its parameters that the server describes.
import { explain } from "./explain.js";
import { breakable, element, find, seconds } from "./helpers.js";
import { methodRow, on, state } from "./state.js";

const select = find("#method"), form = find("#form");

on("model", () => {
  select.replaceChildren(...[...grouped([...state.methods, ...state.unsupported])].map(([family, rows]) =>
    element("optgroup", { label: family }, ...rows.map(option))));
  listUnsupported();
  show();
});
on("choice picture explanation", show);

// A method that does not support the model is listed too, with the reason.
function option(row) {
  const supported = state.methods.includes(row);
  return element("option", { value: row.name, disabled: !supported, title: supported ? null : row.supported }, row.name);
}

function grouped(rows, by = "family") {
  const groups = new Map();
  for (const row of rows) groups.set(row[by], [...(groups.get(row[by]) ?? []), row]);
  return groups;
}

function listUnsupported() {
  const { methods, unsupported } = state, [count, all] = [unsupported.length, unsupported.length + methods.length];
  find("#unsupported").hidden = count === 0;
  find("#unsupported summary").textContent = `${count} of ${all} methods ${count === 1 ? "does" : "do"} not support this model`;
  find("#reasons").replaceChildren(...[...grouped(unsupported, "supported")].flatMap(([reason, rows]) =>
    [element("dt", {}, reason), element("dd", {}, ...breakable(rows.map((row) => row.name).join(", ")))]));
}

// Why the method shown is not the one that the link, or the previous model, had.
function substitution() {
  const { requestedMethod, method, unsupported } = state, row = unsupported.find((other) => other.name === requestedMethod);
  if (requestedMethod === null || requestedMethod === method) return "";
  const why = row ? `${requestedMethod} does not support this model: ${row.supported}.` : `There is no method “${requestedMethod}”.`;
  return `${why} ${method} is shown instead.`;
}

function show() {
  const row = methodRow(), changes = Object.keys(state.params).length;
  select.value = state.method;
  find("#instead").textContent = substitution();
  const first = row.summary.charAt(0).toUpperCase() + row.summary.slice(1).replaceAll("``", "");
  const took = state.explanation?.method === row.name ? ` Took ${seconds(state.explanation.seconds)}.` : "";
  const paper = element("span", { class: "paper" }, `${row.paper}. Cost: ${cost(row.cost)}.${took}`);
  find("#about-method").replaceChildren(first, " ", paper);
  find("#changed").textContent = changes ? `· ${changes} changed` : "";
  find("#parameters").hidden = row.form.length === 0;
  if (form.dataset.method !== row.name || form.dataset.params !== JSON.stringify(state.params)) build(row);
}

// "21 F + 3 B" as words.
function cost(text) {
  const [forwards, backwards] = text.match(/[\d.e+]+(?= [FB])/g)?.map(Number) ?? [];
  if (forwards === undefined) return text;
  const passes = (count, name) => `${count} ${name} pass${count === 1 ? "" : "es"}`;
  return backwards ? `${passes(forwards, "forward")}, ${passes(backwards, "backward")}` : passes(forwards, "forward");
}

function build(row) {
  Object.assign(form.dataset, { method: row.name, params: JSON.stringify(state.params) });
  form.replaceChildren(...row.form.map(field),
    element("div", { class: "row tight" }, element("button", { type: "submit" }, "Apply"),
      element("button", { type: "button", onclick: backToDefaults }, "Defaults")));
}

// Discards what was typed; explains again only if other parameters were applied.
function backToDefaults() {
  const applied = Object.keys(state.params).length > 0;
  state.params = {};
  build(methodRow());
  find("button[type=button]", form).focus();
  if (applied) explain();
}

function field(about) {
  const name = element("span", {}, about.name.replaceAll("_", " "));
  return element("label", { class: `param kind-${about.kind}`, for: `p-${about.name}` }, name, input(about));
}

function input(about) {
  const value = about.name in state.params ? state.params[about.name] : about.default;
  const named = { id: `p-${about.name}`, name: about.name };
  if (about.kind === "boolean" && !about.optional) {
    return element("input", { ...named, type: "checkbox", checked: value === true });
  }
  if (about.kind === "choice" || about.kind === "boolean") {
    const choices = about.kind === "boolean" ? [true, false] : about.choices;
    const options = choices.map((choice) => element("option", { value: JSON.stringify(choice), selected: choice === value }, String(choice)));
    if (about.optional) options.unshift(element("option", { value: "null", selected: value === null }, "automatic"));
    return element("select", named, ...options);
  }
  const text = value === null ? "" : Array.isArray(value) ? value.join(", ") : String(value);
  const step = about.kind === "integer" ? "1" : "any";
  const numeric = about.kind === "integer" || about.kind === "number";
  return element("input", {
    ...named, type: numeric ? "number" : "text", step: numeric ? step : null, value: text, autocomplete: "off",
    required: !about.optional && about.kind !== "text", placeholder: about.optional ? "automatic" : null,
  });
}

// The value of a field with its type; an empty optional field is null (automatic).
function read(about) {
  const input = form.elements[about.name];
  if (input.type === "checkbox") return input.checked;
  if (input.tagName === "SELECT") return JSON.parse(input.value);
  const text = input.value.trim();
  if (!text && about.optional) return null;
  if (about.kind === "integer" || about.kind === "number") return Number(text);
  if (about.kind === "numbers") return text.split(/[\s,]+/).filter(Boolean).map(Number);
  return text;
}

export function fromText(about, text) {
  if (about.kind === "text") return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const changed = methodRow().form.filter((about) => JSON.stringify(read(about)) !== JSON.stringify(about.default));
  state.params = Object.fromEntries(changed.map((about) => [about.name, read(about)]));
  explain();
});

select.addEventListener("change", () => {
  Object.assign(state, { method: select.value, requestedMethod: null, params: {} });
  if (!methodRow()["class-specific"]) state.against = null;
  explain();
});
