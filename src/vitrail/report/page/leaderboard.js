const board = document.currentScript.closest(".vlb");
const data = JSON.parse(find("script[type='application/json']", board).textContent);
const part = (name) => find(`[data-part="${name}"]`, board);
const control = (name) => find(`[data-control="${name}"]`, board);

const state = { metric: data.metric, words: [], cheap: false, pair: null, key: "score", direction: -1 };

function start() {
  for (const head of findAll("th[data-key]", part("table"))) {
    head.replaceChildren(element("button", { type: "button", onclick: () => sortBy(head) }, ...head.childNodes));
  }
  on("metric", "change", (node) => { state.metric = Number(node.value); showMetric(); });
  on("words", "input", (node) => { state.words = node.value.toLowerCase().split(/[,\s]+/u).filter(Boolean); filter(); });
  on("cheap", "change", (node) => { state.cheap = node.checked; filter(); });
  on("pair", "change", (node) => { state.pair = node.value === "" ? null : Number(node.value); drawPlot(); });
  for (const form of findAll("form", board)) {
    form.hidden = false;
    form.addEventListener("submit", (event) => event.preventDefault());
  }
  part("plot-section").hidden = !data.methods.some((method) => method.cost !== null && method.score !== null);
  // A browser may restore the controls of an earlier visit.
  for (const form of findAll("form", board)) form.reset();
  let width = 0;
  new ResizeObserver(() => {
    if (part("plot").clientWidth === width) return;
    width = part("plot").clientWidth;
    drawPlot();
  }).observe(part("plot"));
}

function on(name, event, listener) {
  control(name).addEventListener(event, (fired) => listener(fired.currentTarget));
}

function formatted(value, decimals) {
  if (value === null) return "–";
  const text = decimals === null ? value.toExponential(1).replace(/e([+-])(\d)$/u, "e$10$2") : value.toFixed(decimals);
  return Number(text) ? text.replaceAll("-", "−") : text.replace("-", "");
}

function passes(cost) {
  const number = cost < 10 ? cost.toFixed(1) : Number(cost.toPrecision(2)).toLocaleString("en");
  return `${number} forward passes`;
}

// Sorting

function sortBy(head) {
  const { key } = head.dataset;
  state.direction = state.key === key ? -state.direction : bestFirst(key);
  state.key = key;
  for (const other of findAll("th[data-key]", part("table"))) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending");
  orderRows();
}

function bestFirst(key) {
  if (["name", "family", "cost"].includes(key)) return 1;
  return ["speed", "score", "attainable"].includes(key) ? -1 : -data.metrics[state.metric].better;
}

function orderRows() {
  const rows = findAll("tbody tr", part("table")).map((row) => ({ row, value: sortValue(Number(row.dataset.method)) }));
  rows.sort((a, b) => {
    if (a.value === null || b.value === null) return (a.value === null) - (b.value === null);
    return state.direction * (typeof a.value === "string" ? a.value.localeCompare(b.value) : a.value - b.value);
  });
  find("tbody", part("table")).append(...rows.map((entry) => entry.row));
}

function sortValue(method) {
  const { key } = state;
  return key in data.methods[method] ? data.methods[method][key] : data.cells[state.metric][key]?.[0][method] ?? null;
}

// The columns of pairs

function showMetric() {
  const { name, better, decimals } = data.metrics[state.metric];
  part("metric").textContent = name;
  part("better").textContent = better > 0 ? "higher" : "lower";
  for (const row of findAll("tbody tr", part("table"))) {
    for (const cell of findAll("td[data-pair]", row)) {
      fillCell(cell, data.cells[state.metric][cell.dataset.pair], Number(row.dataset.method), decimals);
    }
  }
  if (!(state.key in data.methods[0])) {
    state.direction = bestFirst(state.key);
    find("th[aria-sort]", part("table")).setAttribute("aria-sort", state.direction > 0 ? "ascending" : "descending");
    orderRows();
  }
}

function fillCell(cell, column, method, decimals) {
  const [mean, low, high, count, mark] = column ? column.map((values) => values[method]) : [null, null, null, 0, "0"];
  cell.className = ["", "vlb-tied", "vlb-best"][mark];
  cell.title = count ? `${count} images` : "";
  find(".vlb-mean", cell).textContent = formatted(mean, decimals);
  find(".vlb-interval", cell).textContent = low === null ? "" : `[${formatted(low, decimals)}, ${formatted(high, decimals)}]`;
}

// Filters

function matches(method) {
  const text = `${method.name} ${method.family}`.toLowerCase();
  const wanted = state.words.length === 0 || state.words.some((word) => text.includes(word));
  const affordable = method.yours || (method.cost !== null && method.cost <= data.cheap);
  return wanted && (!state.cheap || affordable);
}

function filter() {
  const visible = data.methods.map(matches);
  for (const node of findAll("tbody tr[data-method], .vlb-strip", board)) node.hidden = !visible[node.dataset.method];
  for (const node of findAll(".vlb-point", board)) node.classList.toggle("vlb-faint", !visible[node.dataset.method]);
  const count = visible.filter(Boolean).length;
  const all = data.methods.length;
  part("count").textContent = count === all ? `${all} methods` : `${count} of ${all} methods; marks compare with all`;
}

// The plot: score against cost

const MARGIN = { left: 44, right: 16, top: 12, bottom: 42 };

function drawPlot() {
  const width = Math.max(300, part("plot").clientWidth);
  const height = width < 560 ? 340 : 440;
  const points = plottedPoints();
  const axes = scales(points, width, height);
  for (const point of points) Object.assign(point, { left: axes.x(point.cost), top: axes.y(point.value) });
  const front = frontOf(points);
  const title = state.pair === null ? "Score against cost" : `Share against cost on ${data.pairs[state.pair]}`;
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${title}; arrow keys move between methods` },
    ...gridLines(axes, width, height), frontLine(front, width), ...points.map((point) => drawnPoint(point, front.includes(point))),
    ...labels(points, front, width, height));
  const tip = element("div", { class: "vlb-tip", hidden: true });
  part("plot").replaceChildren(svg, tip);
  makeReadable(svg, tip, points, width, height);
  const missing = data.methods.length - points.length;
  part("plot-note").textContent = missing ? `Not shown: ${missing} ${missing === 1 ? "method" : "methods"} without a measured cost or score.` : "";
  filter();
}

function plottedPoints() {
  const value = (method) => (state.pair === null ? method.score : method.shares[state.pair]);
  return data.methods
    .map((method, number) => ({ method, number, cost: method.cost, value: value(method) }))
    .filter((point) => point.cost > 0 && point.value !== null)
    .sort((a, b) => a.cost - b.cost || b.value - a.value);
}

function scales(points, width, height) {
  const costs = points.map((point) => Math.log10(point.cost));
  const values = points.map((point) => point.value);
  const [left, right] = [Math.min(0, ...costs) - 0.05, Math.max(1, ...costs) + 0.1];
  const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
  const room = (high - low) * 0.05;
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
  return {
    left, right, low, high,
    x: (cost) => MARGIN.left + (inner.width * (Math.log10(cost) - left)) / (right - left),
    y: (value) => MARGIN.top + (inner.height * (high + room - value)) / (high - low + 2 * room),
  };
}

function gridLines({ left, right, low, high, x, y }, width, height) {
  const decades = Array.from({ length: Math.ceil(right) + 1 }, (_, power) => 10 ** power);
  const steps = right - left < 3 && width > 500 ? [1, 2, 5] : [1];
  const costs = decades.flatMap((decade) => steps.map((step) => step * decade)).filter((cost) => Math.log10(cost) <= right);
  const step = high - low > 2.5 ? 0.5 : 0.2;
  const ticks = Array.from({ length: Math.floor((high - low) / step + 1e-9) + 2 }, (_, k) => (Math.ceil(low / step) + k) * step);
  const bottom = height - MARGIN.bottom;
  return [
    ...costs.flatMap((cost) => [
      svgElement("line", { class: "vlb-grid", x1: x(cost), x2: x(cost), y1: MARGIN.top, y2: bottom }),
      svgElement("text", { x: x(cost), y: bottom + 16, "text-anchor": "middle" }, cost.toLocaleString("en")),
    ]),
    ...ticks.filter((value) => value <= high + 1e-9).flatMap((value) => [
      svgElement("line", { class: "vlb-grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
      svgElement("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, formatted(value, 1)),
    ]),
    svgElement("text", { x: (MARGIN.left + width - MARGIN.right) / 2, y: height - 6, "text-anchor": "middle" }, "cost in forward passes"),
    svgElement("text", { x: 12, y: (MARGIN.top + bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(MARGIN.top + bottom) / 2})` },
      state.pair === null ? "score" : "share from random to best"),
  ];
}

// The methods that explain a class and score higher than every cheaper one.
function frontOf(points) {
  let highest = -Infinity;
  return points.filter(({ method, value }) => {
    if (method.ignoresClass || method.control || value <= highest) return false;
    highest = value;
    return true;
  });
}

function frontLine(front, width) {
  const steps = front.map((point, place) => (place ? `H${point.left}V${point.top}` : `M${point.left} ${point.top}`));
  return svgElement("path", { class: "vlb-line", d: front.length ? `${steps.join("")}H${width - MARGIN.right}` : "" });
}

function drawnPoint({ method, number, left, top }, isFront) {
  const kind = `vlb-dot ${method.yours ? "vlb-mine" : isFront ? "vlb-front" : method.ignoresClass ? "vlb-hollow" : ""}`;
  const shape = method.yours
    ? svgElement("path", { class: kind, d: `M${left} ${top - 7}l7 7-7 7-7-7Z` })
    : svgElement("circle", { class: kind, cx: left, cy: top, r: isFront ? 5.5 : 4.5 });
  return svgElement("g", { class: "vlb-point", role: "img", tabindex: -1, "data-method": number }, shape);
}

// Labels of the front and of the reader's methods, each where it covers no other label, no named point and no line.
function labels(points, front, width, height) {
  const labelled = points.filter((point) => point.method.yours || front.includes(point));
  const boxes = [...labelled.map(({ left, top }) => [left - 6, top - 6, left + 6, top + 6]), ...lineBoxes(front, width)];
  const crosses = (box) => boxes.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3]);
  const inside = (box) => box[0] >= MARGIN.left && box[2] <= width && box[1] >= 0 && box[3] <= height - MARGIN.bottom;
  // The best come first: their names matter most.
  return labelled.sort((a, b) => b.method.yours - a.method.yours || b.value - a.value).flatMap(({ method, left, top }) => {
    const text = method.name.length > 36 ? `${method.name.slice(0, 35)}…` : method.name;
    const long = 6.6 * text.length;
    const columns = [left + 9, left - 9 - long, left - long / 2];
    const rows = [top + 4, top - 8, top + 17, top + 31, top - 22];
    for (const [x, y] of rows.flatMap((row) => columns.map((column) => [column, row]))) {
      const box = [x, y - 10, x + long, y + 3];
      if (inside(box) && !crosses(box)) {
        boxes.push(box);
        return [svgElement("text", { class: "vlb-label", x, y, "aria-hidden": true }, text)];
      }
    }
    return [];
  });
}

function lineBoxes(front, width) {
  return front.flatMap(({ left, top }, place) => {
    const next = front[place + 1] ?? { left: width, top };
    return [[left, top - 1, next.left, top + 1], [next.left - 1, next.top, next.left + 1, top]];
  });
}

function makeReadable(svg, tip, points, width, height) {
  const nodes = findAll(".vlb-point", svg);
  const show = (place) => {
    const { method, value, left, top } = points[place];
    const word = state.pair === null ? "score" : "share";
    const facts = `${word} ${formatted(value, 2)}, ${passes(method.cost)}`;
    tip.replaceChildren(element("b", {}, method.name), method.ignoresClass ? `${facts}; ignores the class` : facts);
    tip.hidden = false;
    Object.assign(tip.style, left < width / 2
      ? { left: `${(100 * (left + 10)) / width}%`, right: "auto" }
      : { left: "auto", right: `${(100 * (width - left + 10)) / width}%` });
    tip.style.top = `${(100 * (top + 10)) / height}%`;
  };
  nodes.forEach((node, place) => {
    const { method, value } = points[place];
    node.setAttribute("aria-label", `${method.name}: ${formatted(value, 2)} for ${passes(method.cost)}`);
    node.addEventListener("pointerenter", () => show(place));
    node.addEventListener("pointerleave", () => { tip.hidden = true; });
    node.addEventListener("focus", () => show(place));
    node.addEventListener("blur", () => { tip.hidden = true; });
    node.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const next = nodes[place + step];
      if (event.key === "Escape") tip.hidden = true;
      if (!next) return;
      event.preventDefault();
      node.setAttribute("tabindex", -1);
      next.setAttribute("tabindex", 0);
      next.focus();
    });
  });
  nodes[0]?.setAttribute("tabindex", 0);
}

start();
