const PAGE_SIZE = 48, ALL = "";
const shown = { predicted: ALL, errors: false, suspicious: false, outliers: false, trust: 0, cluster: ALL, order: "suspicion", count: PAGE_SIZE };
const ORDERS = {
  suspicion: ["most suspicious first", (image) => -image.suspicion],
  confident: ["most confident errors first", (image) => (image.wrong ? -1 : 1) - image.probability],
  doubtful: ["least confident first", (image) => image.probability],
  margin: ["smallest margin first", (image) => image.margin],
  trust: ["least trusted first", (image) => image.trust ?? 2],
  outlier: ["most unusual first", (image) => -(image.outlier ?? -99)],
  name: ["by name", null],
};

const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);
const hasTrust = data.images.some((image) => image.trust !== null);

function change(key, value) {
  shown[key] = value;
  shown.count = PAGE_SIZE;
  if (key === "predicted") {
    shown.cluster = ALL;
    fillClusters();
  }
  showImages();
}

function select(key, label, entries) {
  const box = element("select", { "data-choice": key, onchange: () => change(key, box.value) });
  return element("label", {}, label, options(box, entries, shown[key]));
}

function tick(key, label) {
  const box = element("input", { type: "checkbox", "data-choice": key, onchange: () => change(key, box.checked) });
  return element("label", {}, box, label);
}

function buildControls() {
  const classes = [...new Set(data.images.flatMap((image) => [image.predicted, image.true]))].filter((name) => name !== null).sort();
  const wrong = data.images.some((image) => image.wrong), suspicious = data.images.some((image) => image.suspicion > 0);
  const trust = element("input", { type: "range", min: 0, max: 100, value: 100, "data-choice": "trust", oninput: () => change("trust", 1 - trust.value / 100) });
  const strength = element("input", { type: "range", min: 0, max: 100, value: 100, oninput: () => {
    document.documentElement.style.setProperty("--strength", strength.value / 100);
  } });
  find("#controls").append(
    select("predicted", "Class", [[ALL, "all classes"], ...classes.map((name) => [name, name])]),
    select("cluster", "Group", [[ALL, "all groups"]]),
    ...[wrong ? tick("errors", "misclassified only") : null, suspicious ? tick("suspicious", "suspicious only") : null,
      tick("outliers", "unusual only")].filter(Boolean),
    ...(hasTrust ? [element("label", {}, "Trust at most", trust)] : []),
    select("order", "Order", Object.entries(ORDERS).filter(([key]) => key !== "trust" || hasTrust).map(([key, [text]]) => [key, text])),
    element("label", {}, "Map strength", strength));
  find("#controls").hidden = false;
}

function fillClusters() {
  const groups = new Set(data.images.filter((image) => image.predicted === shown.predicted && image.cluster >= 0).map((image) => image.cluster));
  const entries = [...groups].sort((a, b) => a - b).map((group) => [String(group), `group ${group + 1}`]);
  const box = find("#controls [data-choice=cluster]");
  options(box, [[ALL, "all groups"], ...entries], shown.cluster);
  box.disabled = entries.length < 2;
}

function chosen() {
  const most = 1 - shown.trust;
  const images = data.images.filter((image) =>
    (shown.predicted === ALL || image.predicted === shown.predicted || image.true === shown.predicted) &&
    (shown.cluster === ALL || (image.predicted === shown.predicted && String(image.cluster) === shown.cluster)) &&
    (!shown.errors || image.wrong) && (!shown.suspicious || image.suspicion > 0) &&
    (!shown.outliers || (image.outlier !== null && image.outlier > data.outlier)) &&
    (most >= 1 || (image.trust !== null && image.trust <= most)));
  const key = ORDERS[shown.order][1];
  return key ? images.sort((a, b) => key(a) - key(b)) : images.sort((a, b) => a.id.localeCompare(b.id));
}

function showImages() {
  const images = chosen(), left = images.length - shown.count;
  find("#cards").replaceChildren(...images.slice(0, shown.count).map(tile));
  find("#count").textContent = `${images.length} of ${data.images.length} images${shown.trust > 0 ? ` with a trust of at most ${percent(1 - shown.trust)}` : ""}.`;
  find("#more").hidden = left <= 0;
  find("#more").textContent = `Show ${Math.min(left, PAGE_SIZE)} more of ${left}`;
}

function seen(image) {
  return image.jpeg ? lens(image, image.map) : element("span", { class: "lens nothing" }, "no picture");
}

function tile(image) {
  return element("button", { type: "button", class: "tile", onclick: () => openImage(image) }, seen(image),
    element("strong", { class: image.wrong ? "wrong" : null }, named(image.predicted), ` ${percent(image.probability)}${image.wrong ? " ✗" : ""}`),
    image.wrong ? element("small", {}, "true: ", named(image.true)) : null,
    image.suspicion > 0 ? element("small", { class: "wrong" }, `${percent(image.suspicion)} on a suspicious detail`) : null);
}

function openImage(image) {
  const rows = [["true class", image.true ?? "unknown"], ["predicted", image.predicted], ["probability", percent(image.probability)],
    ["margin to the next class", percent(image.margin)], ["trust", image.trust === null ? "–" : image.trust.toFixed(2)],
    ["group", image.cluster < 0 ? "–" : String(image.cluster + 1)], ["evidence on a suspicious detail", percent(image.suspicion)],
    ["unusual (robust standard deviations)", image.outlier === null ? "–" : image.outlier.toFixed(1).replace("-", "−")]];
  const sheet = find("#sheet");
  const close = element("button", { type: "button", onclick: () => sheet.close() }, "Close");
  sheet.replaceChildren(
    element("header", {}, element("h2", { id: "sheet-title" }, named(image.id)), close),
    element("p", {}, image.words),
    element("div", { class: "pair" }, seen(image), element("table", { class: "values" },
      ...rows.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, named(value)))))));
  sheet.showModal();
}

buildControls();
fillClusters();
showImages();
find("#more").addEventListener("click", () => { shown.count += PAGE_SIZE; showImages(); });
find("#sheet").addEventListener("click", (event) => {
  if (event.target === event.currentTarget) event.currentTarget.close();
});
