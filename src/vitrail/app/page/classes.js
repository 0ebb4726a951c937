// The model's answer: five classes with bars; one is explained, another may be the rival.
import { explain } from "./flow.js";
import { complain } from "./notes.js";
import { label, methodRow, on, state, target } from "./state.js";
import { element, find, percent } from "./tools.js";

const ROWS = 5, SUGGESTIONS = 30;

on("picture", () => {
  find("#question").textContent = "";
  const waiting = () => element("li", { class: "waiting", "aria-hidden": "true" });
  find("#classes").replaceChildren(...Array.from({ length: Math.min(ROWS, state.model.classes) }, waiting));
});
on("prediction choice explanation", show);

function show() {
  if (!state.prediction) return;
  const own = target(), rows = [...state.prediction.classes];
  for (const index of [own.index, state.against]) {
    if (index !== null && !rows.some((row) => row.index === index)) {
      rows.push({ index, probability: index === own.index ? own.probability : null });
    }
  }
  const list = find("#classes"), place = focusPlace(list);
  list.replaceChildren(...rows.map((row) => line(row, own.index)));
  if (place) find(place, list)?.focus();
  ask(own);
}

// The list is drawn anew after every choice: the keyboard stays where it was.
function focusPlace(list) {
  const at = document.activeElement;
  return list.contains(at) && at.dataset.index ? `.${at.classList[0]}[data-index="${at.dataset.index}"]` : null;
}

function line({ index, probability }, chosen) {
  const own = index === chosen, rival = index === state.against, name = label(index);
  const bar = element("i");
  bar.style.setProperty("--share", probability ?? 0);
  const pressed = (is) => ({ type: "button", "data-index": index, "aria-pressed": String(is) });
  const choose = element("button", { class: "class", ...pressed(own), onclick: () => aim(index) },
    element("span", { class: "name", title: name }, name),
    element("span", { class: "share" }, probability === null ? "–" : percent(probability)),
    element("span", { class: "bar", "aria-hidden": "true" }, bar));
  const oppose = element("button", {
    class: "versus", ...pressed(rival), disabled: own || !methodRow()["class-specific"], onclick: () => contrast(rival ? null : index),
    "aria-label": `Rather than ${name}`, title: `Why ${label(chosen)} rather than ${name}?`,
  }, "vs");
  return element("li", { class: own ? "own" : rival ? "rival" : null }, choose, oppose);
}

function ask(own) {
  const row = methodRow(), question = find("#question"), name = element("strong", { class: "for" }, own.label);
  if (!row["class-specific"]) {
    question.replaceChildren(`${row.name} gives one map for all classes.`);
  } else if (state.against === null) {
    question.replaceChildren("Why ", name, "? Press ", element("em", {}, "vs"), " to ask: rather than what?");
  } else {
    const rival = element("strong", { class: "against" }, label(state.against));
    const clear = element("button", { type: "button", class: "link", onclick: () => contrast(null) }, "clear");
    question.replaceChildren("Why ", name, " rather than ", rival, "? ", clear);
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

// Classes whose name holds what was typed; only one where it is the whole name, or its number.
function fitting(typed) {
  const wanted = typed.trim().toLowerCase(), names = state.model.labels.map((_, index) => label(index).toLowerCase());
  if (!wanted) return [];
  const exact = names.indexOf(wanted);
  if (exact >= 0) return [exact];
  if (/^\d+$/.test(wanted) && Number(wanted) < names.length) return [Number(wanted)];
  return names.flatMap((name, index) => (name.includes(wanted) ? [index] : []));
}

find("#other").addEventListener("input", ({ target: field }) => {
  const close = fitting(field.value).slice(0, SUGGESTIONS);
  find("#labels").replaceChildren(...close.map((index) => element("option", { value: label(index) })));
});
find("#other").addEventListener("change", ({ target: field }) => {
  const close = fitting(field.value), typed = field.value.trim();
  if (close.length === 1) pickOther(close[0]);
  else if (close.length) complain(new Error(`“${typed}” fits ${close.length} classes: type more of the name, or the number.`));
  else if (typed) complain(new Error(`The model has no class “${typed}”.`));
});

function pickOther(index) {
  find("#other").value = "";
  if (state.prediction) aim(index);
}
