const sorting = { metric: null, setting: null, direction: 1 };

function buildTable() {
  for (const head of findAll("#results thead th[data-s], #results thead th[data-k=name]")) makeSortable(head);
  for (const cell of findAll("#results tbody td[data-k]")) makeClickable(cell);
  listeners.push(showTable);
}

function makeSortable(head) {
  const button = element("button", { type: "button", onclick: () => sortBy(head) }, ...head.childNodes);
  head.replaceChildren(button);
}

// A cell of a metric with curves opens them.
function makeClickable(cell) {
  const { s, k } = cell.dataset;
  const method = cell.parentElement.dataset.m;
  if (!data.curves[s][k]?.methods[method]) return;
  const title = `Curves of ${data.methods[method]} by ${data.metrics[k].name}`;
  const open = () => openMeanCurves(Number(s), Number(k), Number(method));
  cell.replaceChildren(element("button", { type: "button", title, onclick: open }, ...cell.childNodes));
}

function sortBy(head) {
  const { k, s } = head.dataset;
  const again = sorting.metric === k && sorting.setting === s;
  // The best comes first; a second click reverses the order.
  const initial = k === "name" || k === "time" ? 1 : -(data.metrics[k].better || 1);
  Object.assign(sorting, { metric: k, setting: s, direction: again ? -sorting.direction : initial });
  for (const other of findAll("#results thead th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sorting.direction > 0 ? "ascending" : "descending");
  orderRows();
}

function orderRows() {
  if (sorting.metric === null) return;
  const body = find("#results tbody");
  const rows = findAll("tr", body).map((row) => ({ row, key: sortKey(row) }));
  rows.sort((a, b) => {
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
    const order = typeof a.key === "string" ? a.key.localeCompare(b.key) : a.key - b.key;
    return sorting.direction * order || a.row.dataset.m - b.row.dataset.m;
  });
  body.append(...rows.map((entry) => entry.row));
}

function sortKey(row) {
  if (sorting.metric === "name") return data.methods[row.dataset.m];
  if (sorting.metric !== "time") return data.cells[slice()][sorting.setting][row.dataset.m][sorting.metric][0];
  const value = find(`td[data-k="time"][data-s="${sorting.setting}"]`, row).dataset.value;
  return value === "" ? null : Number(value);
}

// The numbers in the table: those of the selected class if the report has them, else of all images.
function slice() {
  return Math.max(0, data.slices.indexOf(state.className));
}

function showTable() {
  const place = slice();
  for (const row of findAll("#results tbody tr")) {
    const method = Number(row.dataset.m);
    row.hidden = !state.methods.has(method);
    for (const cell of findAll("td", row)) {
      cell.hidden = !visibleColumn(cell);
      if (cell.dataset.k !== "time") fillCell(cell, data.cells[place][cell.dataset.s][method][cell.dataset.k]);
    }
  }
  for (const head of findAll("#results thead th[data-k]")) showHead(head);
  orderRows();
  showStatus(place);
}

function visibleColumn({ dataset: { k, s } }) {
  return (k === "time" || k === "name" || state.metrics.has(Number(k))) && (s === undefined || state.settings.has(Number(s)));
}

function showHead(head) {
  head.hidden = !visibleColumn(head);
  if (!head.classList.contains("group")) return;
  const below = findAll(`#results thead th[data-k="${head.dataset.k}"][data-s]`).filter(visibleColumn);
  head.hidden ||= below.length === 0;
  head.setAttribute("colspan", Math.max(1, below.length));
}

function fillCell(cell, [, mean, interval, count, marks]) {
  cell.className = marks;
  find(".mean", cell).textContent = mean;
  find(".interval", cell).textContent = interval;
  find(".count", cell).textContent = count;
}

function showStatus(place) {
  const notes = [];
  if (state.methods.size < data.methods.length) {
    notes.push(`${state.methods.size} of ${data.methods.length} methods shown; bold and underlined are among all methods.`);
  }
  if (place) notes.push(`Only images of the class “${state.className}”.`);
  else if (state.className) notes.push(`“${state.className}” has too few images for its own table: all images are shown here.`);
  find("#status").textContent = notes.join(" ");
}
