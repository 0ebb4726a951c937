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

// A cell whose metric has curves opens them.
function makeClickable(cell) {
  const { s, k } = cell.dataset;
  const method = cell.parentElement.dataset.m;
  if (!data.curves[s][k]?.methods[method]) return;
  const told = `Curves of ${data.methods[method]} by ${data.metrics[k].name}`;
  const open = () => openMeanCurves(Number(s), Number(k), Number(method));
  cell.replaceChildren(element("button", { type: "button", title: told, onclick: open }, ...cell.childNodes));
}

function sortBy(head) {
  const { k, s } = head.dataset;
  const again = sorting.metric === k && sorting.setting === s;
  // The best comes first; a second click turns the order.
  const usual = k === "name" || k === "time" ? 1 : -(data.metrics[k].better || 1);
  Object.assign(sorting, { metric: k, setting: s, direction: again ? -sorting.direction : usual });
  for (const other of findAll("#results thead th")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sorting.direction > 0 ? "ascending" : "descending");
  orderRows();
}

function orderRows() {
  if (sorting.metric === null) return;
  const body = find("#results tbody");
  const rows = findAll("tr", body).map((row) => ({ row, key: sortKey(row) }));
  rows.sort((one, other) => {
    if (one.key === null || other.key === null) return (one.key === null) - (other.key === null);
    const order = typeof one.key === "string" ? one.key.localeCompare(other.key) : one.key - other.key;
    return sorting.direction * order || one.row.dataset.m - other.row.dataset.m;
  });
  body.append(...rows.map((entry) => entry.row));
}

function sortKey(row) {
  if (sorting.metric === "name") return data.methods[row.dataset.m];
  if (sorting.metric !== "time") return data.cells[slice()][sorting.setting][row.dataset.m][sorting.metric][0];
  const value = find(`td[data-k="time"][data-s="${sorting.setting}"]`, row).dataset.value;
  return value === "" ? null : Number(value);
}

// Which numbers the table shows: those of the wanted class where the report has them, else of all images.
function slice() {
  return Math.max(0, data.slices.indexOf(state.wanted));
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
  tellTable(place);
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

function tellTable(place) {
  const told = [];
  if (state.methods.size < data.methods.length) {
    told.push(`${state.methods.size} of ${data.methods.length} methods shown; best and second best are among all.`);
  }
  if (place) told.push(`Only images of the class “${state.wanted}”.`);
  else if (state.wanted) told.push(`“${state.wanted}” has too few images for a table of its own: all images are shown here.`);
  find("#told").textContent = told.join(" ");
}
