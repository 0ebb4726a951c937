// The prediction: classes with bars; one is explained, another may be contrasted with it.
import { explain } from "./explain.js";
import { element, find, percent } from "./helpers.js";
import { showError } from "./messages.js";
import { contrast, showKind } from "./question.js";
import { isPlace, label, methodRow, on, probability, state, target, topClasses } from "./state.js";

const ROWS = 5, SUGGESTIONS = 30;

on("picture", () => {
  const waiting = () => element("li", { class: "waiting", "aria-hidden": "true" });
  find("#classes").replaceChildren(...Array.from({ length: Math.min(ROWS, state.model.classes) }, waiting));
});
on("prediction choice explanation", show);

function show() {
  if (!state.prediction) return;
  const current = target(), rows = [...topClasses()];
  for (const [index, text] of [[current?.index ?? null, current?.label], [state.against]]) {
    if (index !== null && !rows.some((row) => row.index === index)) {
      rows.push({ index, label: text, probability: probability(index) });
    }
  }
  const list = find("#classes"), place = focusSelector(list);
  list.replaceChildren(...rows.map((row) => line(row, current)));
  if (place) find(place, list)?.focus();
}

// The list is rebuilt after every choice: the focus stays where it was.
function focusSelector(list) {
  const at = document.activeElement;
  return list.contains(at) && at.dataset.index ? `.${at.classList[0]}[data-index="${at.dataset.index}"]` : null;
}

function line({ index, label: text, probability: share }, current) {
  const explained = index === current?.index, rival = index === state.against, name = label(index, text);
  const bar = element("i");
  bar.style.setProperty("--share", share ?? 0);
  const pressed = (is) => ({ type: "button", "data-index": index, "aria-pressed": String(is) });
  const choose = element("button", { class: "class", ...pressed(explained), onclick: () => aim(index) },
    element("span", { class: "name", title: name }, name),
    element("span", { class: "share" }, share === null ? "–" : percent(share)),
    element("span", { class: "bar", "aria-hidden": "true" }, bar));
  const oppose = element("button", {
    class: "versus", ...pressed(rival), disabled: !current || explained || !methodRow()["class-specific"], onclick: () => contrast(rival ? null : index),
    "aria-label": `Rather than ${name}`, title: `Why ${current?.label} rather than ${name}?`,
  }, "vs");
  return element("li", { class: explained ? "target" : rival ? "rival" : null }, choose, oppose);
}

function aim(index) {
  if (index >= state.model.classes) return; // the text that is asked about already
  const ask = isPlace(state.ask.kind) ? { ...state.ask } : { kind: "class" };
  Object.assign(state, { ask, target: index });
  if (state.against === index) state.against = null;
  showKind(ask.kind);
  explain();
}

// Classes whose name contains the text; a single one if it is the full name or the index.
function matching(typed) {
  const wanted = typed.trim().toLowerCase(), names = state.model.labels.map((_, index) => label(index).toLowerCase());
  if (!wanted) return [];
  const exact = names.indexOf(wanted);
  if (exact >= 0) return [exact];
  if (/^\d+$/.test(wanted) && Number(wanted) < names.length) return [Number(wanted)];
  return names.flatMap((name, index) => (name.includes(wanted) ? [index] : []));
}

find("#other").addEventListener("input", ({ target: field }) => {
  const matches = matching(field.value).slice(0, SUGGESTIONS);
  find("#labels").replaceChildren(...matches.map((index) => element("option", { value: label(index) })));
});
find("#other").addEventListener("change", ({ target: field }) => {
  const matches = matching(field.value), typed = field.value.trim();
  if (matches.length === 1) pickOther(matches[0]);
  else if (matches.length) showError(new Error(`“${typed}” matches ${matches.length} classes: type more of the name, or the number.`));
  else if (typed) showError(new Error(`The model has no class “${typed}”.`));
});

function pickOther(index) {
  find("#other").value = "";
  if (state.prediction) aim(index);
}
