const PAGE_SIZE = 10;
const gallery = { setting: 0, metric: 0, method: "all", order: "worst", count: PAGE_SIZE };

function buildGallery() {
  const first = data.galleries.findIndex((entry) => entry.images.length);
  if (first < 0) return;
  const section = find("#gallery");
  gallery.setting = first;
  gallery.metric = Math.max(0, data.metrics.findIndex((metric) => metric.better));
  section.append(element("h2", {}, "Images"), galleryBar(), element("p", { class: "note", id: "gallery-note" }),
    element("div", { id: "cards" }), element("button", { type: "button", id: "more", onclick: showMore }, "Show more"));
  section.hidden = false;
  listeners.push(() => { gallery.count = PAGE_SIZE; showGallery(); });
  showGallery();
}

function galleryBar() {
  const choice = (key, label, entries, numeric) => {
    const select = element("select", { "data-choice": key, onchange: () => {
      gallery[key] = numeric ? Number(select.value) : select.value;
      gallery.count = PAGE_SIZE;
      showGallery();
    } });
    return element("label", {}, label, options(select, entries.map(([value, text]) => [String(value), text]), String(gallery[key])));
  };
  const settings = data.settings.map((name, place) => [place, name]).filter(([place]) => data.galleries[place].images.length);
  const metrics = data.metrics.map((metric, place) => [place, metric.title]).filter(([place]) => data.metrics[place].better);
  const methods = [["all", "all shown methods"], ...data.methods.map((name, place) => [place, name])];
  const orders = [["worst", "worst first"], ["best", "best first"]];
  const strength = element("input", { type: "range", min: 0, max: 100, value: 100, oninput: () => {
    document.documentElement.style.setProperty("--strength", strength.value / 100);
  } });
  return element("div", { class: "bar" },
    settings.length > 1 ? choice("setting", "Of", settings, true) : null,
    metrics.length ? choice("order", "Order", orders) : null,
    metrics.length ? choice("metric", "by", metrics, true) : null,
    metrics.length ? choice("method", "of", methods) : null,
    element("label", {}, "Map strength", strength));
}

// The quality of an image's explanations by the selected metric; null if it does not apply.
function merit(image) {
  const { better } = data.metrics[gallery.metric] ?? { better: 0 };
  const methods = gallery.method === "all" ? [...state.methods] : [Number(gallery.method)];
  const values = methods.map((method) => image.values[method][gallery.metric]).filter((value) => value !== null);
  return values.length ? (better * values.reduce((sum, value) => sum + value, 0)) / values.length : null;
}

function chosenImages() {
  const entries = data.galleries[gallery.setting].images
    .filter((image) => !state.className || image.class === state.className)
    .map((image) => ({ image, merit: merit(image) }));
  const direction = gallery.order === "worst" ? 1 : -1;
  entries.sort((a, b) => {
    if (a.merit === null || b.merit === null) return (a.merit === null) - (b.merit === null);
    return direction * (a.merit - b.merit);
  });
  return entries.map((entry) => entry.image);
}

function showMore() {
  const before = gallery.count;
  gallery.count += PAGE_SIZE;
  showGallery();
  find(`#cards .card:nth-child(${before + 1}) button`)?.focus();
}

function showGallery() {
  const images = chosenImages();
  find("#cards").replaceChildren(...images.slice(0, gallery.count).map(card));
  const left = images.length - gallery.count;
  find("#more").hidden = left <= 0;
  find("#more").textContent = `Show ${Math.min(left, PAGE_SIZE)} more of ${left}`;
  find("#gallery-note").textContent = galleryNote(images.length);
}

function galleryNote(count) {
  const { total, pictures, maps, images } = data.galleries[gallery.setting];
  const notes = [];
  if (images.length < total) {
    notes.push(`This file contains ${images.length} of ${total} images: the worst by each metric in turn, by the mean of all methods.`);
  }
  if (!pictures) notes.push("The run stored no pictures and maps (maps = false in its plan): numbers and curves only.");
  else if (!maps) notes.push("The run stored no maps.");
  if (state.className) notes.push(`${count} of the class “${state.className}”.`);
  if (maps) notes.push("Each map has its own colour scale: red for the class, blue against it; maps without negative evidence go from green to dark violet.");
  return notes.join(" ");
}

function card(image) {
  const methods = [...state.methods].sort((a, b) => a - b);
  const tiles = methods.filter((method) => image.values[method].some((value) => value !== null) || image.maps[method]).map((method) => tile(image, method));
  if (image.jpeg) tiles.unshift(element("div", { class: "tile" }, lens(image, null), "the model’s input"));
  return element("article", { class: "card" }, element("h3", {}, named(image.id)), element("p", {}, ...aboutImage(image)),
    element("div", { class: "tiles" }, ...tiles));
}

function aboutImage(image) {
  if (!image.jpeg) return [named(image.class)];
  const wrong = image.label && image.label !== image.predicted;
  const percent = image.probability === null ? "" : ` (${Math.round(100 * image.probability)} %)`;
  const predicted = element("span", { class: wrong ? "wrong" : null }, "predicted ", named(image.predicted), percent, wrong ? " ✗" : "");
  return image.label ? ["true class ", named(image.label), " · ", predicted] : [predicted];
}

function tile(image, method) {
  const value = image.values[method][gallery.metric];
  return element("button", { type: "button", class: "tile", onclick: () => openImage(image, method) },
    image.jpeg ? lens(image, image.maps[method]) : null, element("strong", {}, formatValue(value, gallery.metric)), named(data.methods[method]));
}

function openImage(image, method) {
  const rows = [...state.metrics].sort((a, b) => a - b).map((metric) =>
    element("tr", {}, element("th", { scope: "row" }, named(data.metrics[metric].title)), element("td", {}, formatValue(image.values[method][metric], metric))));
  const values = element("table", { class: "values" }, ...rows);
  const picture = image.jpeg ? lens(image, image.maps[method]) : null;
  const { axes } = data.galleries[gallery.setting];
  openSheet(data.methods[method], [named(image.id), " · ", ...aboutImage(image)], (room) => [
    element("div", { class: "pair" }, picture, values),
    ...Object.keys(axes).filter((metric) => state.metrics.has(Number(metric))).flatMap((metric) => imageCurves(image, method, metric, axes[metric], room)),
  ]);
}

function imageCurves(image, method, metric, { shares, low, high }, room) {
  const lines = image.curves[metric]
    .map((text, place) => ({ method: place, text }))
    .filter((line) => line.text && (state.methods.has(line.method) || line.method === method))
    .map((line) => ({ method: line.method, points: [...bytes(line.text)].map((value) => low + (value / 255) * (high - low)) }));
  return lines.some((line) => line.method === method) ? [figure(lines, shares, Number(metric), method, room), keys(lines, method)] : [];
}
