const ASPECT = 0.56, MARGIN = { left: 46, right: 10, top: 10, bottom: 40 };

// lines: [{method, points, low, high}] over shares (0…1); low and high are optional and draw a band.
function plot(lines, shares, metric, chosen, width) {
  const height = Math.max(190, Math.round(width * ASPECT));
  const values = lines.flatMap((line) => [...line.points, ...(line.low ?? []), ...(line.high ?? [])]);
  const [bottom, top, step] = niceRange(Math.min(...values), Math.max(...values));
  const x = (share) => MARGIN.left + share * (width - MARGIN.left - MARGIN.right);
  const y = (value) => height - MARGIN.bottom - ((value - bottom) / (top - bottom)) * (height - MARGIN.top - MARGIN.bottom);
  const at = (line, i) => shares[Math.round((i / Math.max(1, line.points.length - 1)) * (shares.length - 1))];
  const picture = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Curves: ${data.metrics[metric].title}` });
  grid(picture, { x, y, bottom, top, step, width, height, metric });
  // The chosen method is drawn last, above the others.
  for (const line of [...lines].sort((a, b) => (a.method === chosen) - (b.method === chosen))) {
    const point = (value, i) => `${x(at(line, i)).toFixed(1)},${y(value).toFixed(1)}`;
    const faint = chosen !== null && line.method !== chosen ? " faint" : "";
    if (line.low && !faint) {
      const band = [...line.high.map(point), ...line.low.map(point).reverse()].join(" ");
      picture.append(svgElement("polygon", { points: band, class: `band k${line.method % COLOURS}` }));
    }
    const kind = `${lineStyle(line.method)} line${faint}${line.method === chosen ? " chosen" : ""}`;
    picture.append(svgElement("polyline", { points: line.points.map(point).join(" "), class: kind }, svgElement("title", {}, data.methods[line.method])));
  }
  return picture;
}

function grid(picture, { x, y, bottom, top, step, width, height, metric }) {
  const digits = [0, 1, 2, 3, 4].find((count) => Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6) ?? 5;
  for (let value = bottom; value <= top + step / 2; value += step) {
    picture.append(svgElement("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
    picture.append(svgElement("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(digits).replace("-", "−")));
  }
  for (const percent of [0, 25, 50, 75, 100]) {
    const anchor = percent === 100 ? "end" : "middle";
    picture.append(svgElement("text", { x: x(percent / 100), y: height - MARGIN.bottom + 16, "text-anchor": anchor }, `${percent} %`));
  }
  const middle = (MARGIN.left + width - MARGIN.right) / 2;
  picture.append(svgElement("text", { x: middle, y: height - 5, "text-anchor": "middle" }, data.metrics[metric].width.replace(" (%)", "")));
}

function niceRange(low, high) {
  if (low >= 0 && high <= 1 && high > 0.5) return [0, 1, 0.25];
  const span = high - low || 1;
  const rough = span / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((times) => times * unit).find((size) => size >= rough);
  return [Math.floor(low / step) * step, Math.ceil(high / step) * step || step, step];
}

function keys(lines, chosen) {
  const entries = lines.map(({ method }) => {
    const line = svgElement("svg", { viewBox: "0 0 34 10", "aria-hidden": "true" }, svgElement("line", { x1: 1, x2: 33, y1: 5, y2: 5, class: `${lineStyle(method)} line` }));
    return element("li", { class: method === chosen ? "chosen" : null }, line, named(data.methods[method]));
  });
  return element("ul", { class: "keys" }, ...entries);
}

function figure(lines, shares, metric, chosen, width) {
  const about = data.metrics[metric];
  const caption = element("figcaption", {}, named(about.title), ` – ${about.height}`);
  return element("figure", { class: "plot" }, caption, plot(lines, shares, metric, chosen, width));
}

function openSheet(title, subtitle, build) {
  const sheet = find("#sheet");
  const close = element("button", { type: "button", onclick: () => sheet.close() }, "Close");
  const heading = element("h2", { id: "sheet-title" }, named(title));
  const note = element("p", { class: "note" }, ...subtitle);
  sheet.replaceChildren(element("header", {}, element("div", {}, heading, note), close));
  if (!sheet.open) sheet.showModal();
  const room = sheet.clientWidth - 36;
  sheet.append(...build(room));
  sheet.scrollTop = 0;
  close.focus();
}

function openMeanCurves(setting, metric, method) {
  const { shares, methods } = data.curves[setting][metric];
  const lines = Object.entries(methods)
    .map(([place, [points, low, high]]) => ({ method: Number(place), points, low, high }))
    .filter((line) => state.methods.has(line.method) || line.method === method);
  const place = data.settings.length > 1 ? [" · ", named(data.settings[setting])] : [];
  const subtitle = ["mean over all images with its 95 % band, other methods pale", ...place];
  openSheet(data.methods[method], subtitle, (room) => [figure(lines, shares, metric, method, room), keys(lines, method)]);
}
