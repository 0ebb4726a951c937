// Boxes of a detector and segments of a segmentation: listed, drawn over the picture, and asked about when clicked.
import { checkedValue, element, find, findAll, percent } from "./helpers.js";
import { ask } from "./question.js";
import { emit, isPlace, label, on, segmentAt, state } from "./state.js";

const LISTED = 12;
const HELP = {
  box: ["Click a box in the image, or one of the surest here.", "The model sees no object in this image."],
  region: ["Click a part of the image, or one of the largest here.", "There are no segments."],
};

on("model picture prediction choice explanation", show);
find("#ask").addEventListener("change", ({ target: { value: kind } }) => {
  const [first] = places();
  if (isPlace(kind) && first) choose(first);
  show();
  emit("places");
});

// Whether a click on the picture chooses a place.
export const picking = () => Boolean(state.prediction) && !find("#work").hidden && isPlace(checkedValue("ask"));

function places() {
  const kind = checkedValue("ask");
  return (kind === "box" ? state.prediction?.boxes : kind === "region" ? state.prediction?.segments : null) ?? [];
}

const isChosen = (place) => (state.ask.kind === "box" ? place.query === state.ask.query : state.ask.kind === "region" && place === segmentAt(state.ask.cell));

function choose(place) {
  Object.assign(state, { target: null, against: null });
  ask("query" in place ? { kind: "box", query: place.query } : { kind: "region", cell: place.cells[0] });
}

// at: {point: [x, y] in pixels of the picture, cell}. Of boxes around a point, the smallest is meant.
export function pick({ point: [x, y], cell }) {
  const area = ({ box: [left, top, right, bottom] }) => (right - left) * (bottom - top);
  const around = ({ box: [left, top, right, bottom] }) => x >= left && x <= right && y >= top && y <= bottom;
  const place = checkedValue("ask") === "region" ? segmentAt(cell) : places().filter(around).sort((a, b) => area(a) - area(b))[0];
  if (place && !isChosen(place)) choose(place);
}

// What is drawn over the picture: {boxes, region}.
export function drawnPlaces() {
  if (!picking()) return {};
  const listed = places().slice(0, LISTED), chosen = places().find(isChosen);
  if (checkedValue("ask") === "region") return { region: chosen && { cells: new Set(chosen.cells), grid: state.prediction.cells } };
  const drawn = chosen && !listed.includes(chosen) ? [...listed, chosen] : listed;
  return { boxes: drawn.map((place) => ({ box: place.box, strong: place === chosen })) };
}

function show() {
  const kind = checkedValue("ask"), list = find("#places");
  find("#glass").classList.toggle("picking", picking());
  if (!isPlace(kind)) return;
  const found = places();
  find("#places-help").textContent = HELP[kind][found.length ? 0 : 1];
  const focused = findAll("button", list).indexOf(document.activeElement);
  list.replaceChildren(...found.slice(0, LISTED).map((place) => element("li", {}, button(place))));
  findAll("button", list)[focused]?.focus();
}

function button(place) {
  const size = state.prediction.cells?.reduce((a, b) => a * b);
  const isBox = "query" in place, share = percent(isBox ? place.probability : place.cells.length / size);
  const title = `${isBox ? `Box ${place.query}` : "Segment"}: ${share} ${isBox ? "sure" : "of the image"}`;
  return element("button", { type: "button", title, "aria-pressed": String(isChosen(place)), onclick: () => choose(place) }, `${label(place.target, place.label)} ${share}`);
}
