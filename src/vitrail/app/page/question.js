// What to ask: a class, any of several classes, a text, a place, the similarity to another picture. What is typed is asked
// at once.
import { explain } from "./explain.js";
import { amount, checkedValue, debounce, element, find, findAll } from "./helpers.js";
import { showError } from "./messages.js";
import { label, measure, methodRow, names, on, probabilityText, state, target } from "./state.js";

const DEBOUNCE = 350, NAMED = 12;

on("model", () => {
  for (const choice of findAll("#ask input")) choice.closest("label").hidden = !state.model.asks.includes(choice.value);
  for (const field of findAll("#group, #rival, #text")) field.value = "";
  say("");
  showKind(state.ask.kind);
});
on("prediction", () => {
  const { ask } = state;
  if (ask.kind === "group") Object.assign(find("#group"), { value: ask.group }), Object.assign(find("#rival"), { value: ask.rival });
  if (ask.kind === "text") find("#text").value = ask.text;
  showKind(ask.kind);
});
on("picture", () => find("#question").replaceChildren());
on("prediction choice explanation", showQuestion);
on("explanation", showMembers);

// Shows the fields of one kind of question; the map stays until another question is asked.
export function showKind(kind) {
  find(`#ask input[value="${kind}"]`).checked = true;
  for (const part of findAll("[data-ask]")) part.hidden = !part.dataset.ask.split(" ").includes(kind);
}

find("#ask").addEventListener("change", ({ target: { value: kind } }) => {
  showKind(kind);
  if (kind === "class") ask({ kind });
  else askTyped();
});

for (const field of findAll("#group, #rival, #text")) field.addEventListener("input", debounce(DEBOUNCE, askTyped));

function askTyped() {
  const [group, rival, text] = ["group", "rival", "text"].map((id) => find(`#${id}`).value.trim()), kind = checkedValue("ask");
  if (kind === "group" && group) ask({ kind, group, rival }, tell);
  else if (kind === "text" && text) ask({ kind, text }, tell);
  else if (kind === "group") say("No class is named: the map stays until one is.");
  else if (kind === "text") say("The text is empty: the map stays until it is not.");
}

export function ask(question, onError) {
  const same = JSON.stringify(question) === JSON.stringify(state.ask);
  if (!state.prediction || (same && state.ask === state.answered)) return;
  state.ask = same ? state.ask : question;
  say("");
  explain(onError);
}

// A pattern that matches nothing, a text that is too long: told where it was typed.
function tell(error) {
  if (error.status === 422) say(error.message, true);
  else showError(error);
}

function say(text, wrong = false) {
  find("#typed").textContent = text.charAt(0).toUpperCase() + text.slice(1);
  find("#typed").classList.toggle("wrong", wrong);
}

function showMembers() {
  const { explanation, answered } = state;
  if (explanation === null || answered.kind !== "group") return;
  const [members] = Object.values(explanation.model.question.groups), rest = members.length - NAMED;
  const listed = members.slice(0, NAMED).map((index) => label(index)).join(", ");
  say(`${members.length} of ${state.model.classes} classes: ${listed}${rest > 0 ? ` and ${rest} more` : ""}.`);
}

export function contrast(index) {
  if (state.ask.kind !== "text") Object.assign(state, { ask: { ...state.ask }, target: target().index });
  state.against = index;
  explain();
}

// The question in parts, {text, role?}: whatever is for and against is coloured.
function parts(current) {
  const { ask, against, explanation } = state, name = { text: current.label, role: "for" };
  if (ask.kind === "similarity") {
    return [{ text: "Why is it similar to " }, { ...name, text: ask.name }, { text: ` (${measure()} ${amount(current.probability, measure())})?` }];
  }
  const share = (value) => (value === null ? "" : ` (${amount(value, measure())})`);
  if (ask.kind === "group") {
    const rival = names()[1], opposed = rival === null ? [] : [{ text: " rather than " }, { text: rival, role: "against" }, { text: share(explanation.against_probability) }];
    return [{ text: "Why " }, name, { text: share(current.probability) }, ...opposed, { text: "?" }];
  }
  const where = { box: ` in box ${ask.query}`, region: " in this segment" }[ask.kind] ?? "";
  if (against === null) return [{ text: "Why " }, name, { text: `${ask.kind === "class" ? "" : share(current.probability)}${where}?` }];
  return [{ text: "Why " }, name, { text: `${probabilityText(current.index)} rather than ` },
    { text: label(against), role: "against" }, { text: `${probabilityText(against)}${where}?` }];
}

// In words, without colours.
export function questionText() {
  return parts(target()).map(({ text }) => text).join("");
}

function showQuestion() {
  const row = methodRow(), current = target(), { ask: { kind }, against } = state, question = find("#question");
  if (!state.prediction || !current) return question.replaceChildren();
  if (!row["class-specific"]) return question.replaceChildren(`${row.name} gives the same map for every class.`);
  const words = parts(current).map(({ text, role }) => (role ? element("strong", { class: role }, text) : text));
  const clear = () => element("button", { type: "button", class: "link", onclick: () => contrast(null) }, "clear");
  if (kind === "group" || kind === "similarity") question.replaceChildren(...words);
  else if (against !== null) question.replaceChildren(...words, " ", clear());
  else question.replaceChildren(...words, " Press ", element("em", {}, "vs"), " to contrast it with another class.");
}
