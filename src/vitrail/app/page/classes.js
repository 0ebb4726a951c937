// The prediction: five classes with bars; one is explained, another may be contrasted with it.
import { explain } from "./explain.js";
import { element, find, percent } from "./helpers.js";
import { showError } from "./messages.js";
import { label, methodRow, on, probability, probabilityText, state, target } from "./state.js";

const ROWS = 5, SUGGESTIONS = 30;

on("picture", () => {
  find("#question").textContent = "";
  const waiting = () => element("li", { class: "waiting", "aria-hidden": "true" });
  find("#classes").replaceChildren(...Array.from({ length: Math.min(ROWS, state.model.classes) }, waiting));
});
on("prediction choice explanation", show);

function show() {
  if (!state.prediction) return;
  const current = target(), rows = [...state.prediction.classes];
  for (const index of [current.index, state.against]) {
    if (index !== null && !rows.some((row) => row.index === index)) {
      rows.push({ index, probability: probability(index) });
    }
  }
  const list = find("#classes"), place = focusSelector(list);
  list.replaceChildren(...rows.map((row) => line(row, current.index)));
  if (place) find(place, list)?.focus();
  showQuestion(current);
}

// The list is rebuilt after every choice: the focus stays where it was.
function focusSelector(list) {
  const at = document.activeElement;
  return list.contains(at) && at.dataset.index ? `.${at.classList[0]}[data-index="${at.dataset.index}"]` : null;
}

function line({ index, probability: share }, targetIndex) {
  const explained = index === targetIndex, rival = index === state.against, name = label(index);
  const bar = element("i");
  bar.style.setProperty("--share", share ?? 0);
  const pressed = (is) => ({ type: "button", "data-index": index, "aria-pressed": String(is) });
  const choose = element("button", { class: "class", ...pressed(explained), onclick: () => aim(index) },
    element("span", { class: "name", title: name }, name),
    element("span", { class: "share" }, share === null ? "–" : percent(share)),
    element("span", { class: "bar", "aria-hidden": "true" }, bar));
  const oppose = element("button", {
    class: "versus", ...pressed(rival), disabled: explained || !methodRow()["class-specific"], onclick: () => contrast(rival ? null : index),
    "aria-label": `Rather than ${name}`, title: `Why ${label(targetIndex)} rather than ${name}?`,
  }, "vs");
  return element("li", { class: explained ? "target" : rival ? "rival" : null }, choose, oppose);
}

function showQuestion(current) {
  const row = methodRow(), question = find("#question"), name = element("strong", { class: "for" }, current.label);
  if (!row["class-specific"]) {
    question.replaceChildren(`${row.name} gives the same map for every class.`);
  } else if (state.against === null) {
    question.replaceChildren("Why ", name, "? Press ", element("em", {}, "vs"), " to contrast it with another class.");
  } else {
    const rival = element("strong", { class: "against" }, label(state.against));
    const clear = element("button", { type: "button", class: "link", onclick: () => contrast(null) }, "clear");
    question.replaceChildren(
      "Why ", name, `${probabilityText(current.index)} rather than `, rival, `${probabilityText(state.against)}? `, clear);
  }
}

function aim(index) {
  state.target = index;
  if (state.against === index) state.against = null;
  explain();
}

function contrast(index) {
  state.target = target().index;
  state.against = index;
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
