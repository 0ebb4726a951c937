// A picture with a map over it and panes: patches that can be pointed at. The page has two of them.
import { drawDiamond, faded, renderMap } from "./colours.js";
import { find } from "./helpers.js";

const LEAD = "#15161c", HATCH = 9, DIAMOND = 1.5;

export class Sheet {
  constructor(root) {
    this.root = root;
    this.photo = find("img", root);
    [this.map, this.panes] = root.querySelectorAll("canvas");
    this.photo.addEventListener("load", () => {
      root.classList.remove("unshown");
      this.setAspect(this.photo.naturalWidth, this.photo.naturalHeight);
    });
    this.photo.addEventListener("error", () => {
      if (!this.photo.getAttribute("src")) return;
      root.classList.add("unshown");
      this.photo.alt = "";
    });
  }

  // The same address is not set again: only the model has changed.
  show({ url, name }) {
    if (this.photo.getAttribute("src") !== url) this.photo.src = url;
    this.photo.alt = name;
  }

  setAspect(width, height) {
    this.root.style.aspectRatio = `${width} / ${height}`;
    this.root.style.setProperty("--shape", width / height);
  }

  // seen: {size, box, grid} of a prediction. content: {values, signed, scale?}, or null.
  drawMap(seen, content, { drawing, alpha }) {
    const context = this.cleared(this.map), shown = seen && content;
    // A red map on a red fish is illegible: the more opaque the map, the paler the photo.
    this.photo.style.filter = shown && drawing !== "outline" ? faded(alpha) : "none";
    this.map.style.opacity = alpha;
    if (!shown) return;
    const { x, y, width, height } = this.area(this.map, seen);
    context.imageSmoothingEnabled = drawing !== "blocks";
    context.imageSmoothingQuality = "high";
    context.drawImage(renderMap(content, drawing), x, y, width, height);
  }

  // boxes: [{box, strong}] in pixels of the picture; region: {cells, grid} of a class map.
  drawPanes(seen, { storage = [], removed = [], outlined = [], boxes = [], region = null }) {
    const context = this.cleared(this.panes);
    if (!seen) return;
    const area = this.area(this.panes, seen), unit = window.devicePixelRatio || 1;
    const box = (patch) => cell(patch, area, seen.grid);
    hatch(context, area, unit);
    for (const patch of storage) drawDiamond(context, box(patch), DIAMOND * unit);
    for (const patch of removed) drawRemoved(context, box(patch), unit);
    for (const patch of outlined) outline(context, box(patch), unit);
    const across = this.panes.width / seen.size[0], down = this.panes.height / seen.size[1];
    for (const { box: [left, top, right, bottom], strong } of boxes) {
      frame(context, [left * across, top * down, (right - left) * across, (bottom - top) * down], unit, strong);
    }
    if (region) border(context, area, region, unit);
  }

  cleared(canvas) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.round(this.root.clientWidth * ratio), height = Math.round(this.root.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    return context;
  }

  // The part that the model sees, in pixels of the canvas.
  area(canvas, { size: [width, height], box: [left, top, right, bottom] }) {
    const across = canvas.width / width, down = canvas.height / height;
    return { x: left * across, y: top * down, width: (right - left) * across, height: (bottom - top) * down };
  }

  // In pixels of the picture.
  pointAt(event, { size: [width, height] }) {
    const bounds = this.panes.getBoundingClientRect();
    return [((event.clientX - bounds.left) / bounds.width) * width, ((event.clientY - bounds.top) / bounds.height) * height];
  }

  patchAt(event, { size: [width, height], box: [left, top, right, bottom], grid: [rows, columns] }) {
    const bounds = this.panes.getBoundingClientRect();
    const x = (((event.clientX - bounds.left) / bounds.width) * width - left) / (right - left);
    const y = (((event.clientY - bounds.top) / bounds.height) * height - top) / (bottom - top);
    if (!(x >= 0 && x < 1 && y >= 0 && y < 1)) return null;
    return Math.floor(y * rows) * columns + Math.floor(x * columns);
  }
}

// The patch that a key leads to; null if the key is none of these.
export function moved(key, patch, [rows, columns]) {
  const row = Math.floor(patch / columns), column = patch % columns;
  const next = {
    ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
    Home: [row, 0], End: [row, columns - 1], PageUp: [0, column], PageDown: [rows - 1, column],
  }[key];
  const clamp = (value, end) => Math.min(Math.max(value, 0), end - 1);
  return next ? clamp(next[0], rows) * columns + clamp(next[1], columns) : null;
}

export const placeOf = (patch, [, columns]) => `row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}`;

function hatch(context, { x, y, width, height }, unit) {
  const { width: w, height: h } = context.canvas;
  if (x < 1 && y < 1 && x + width > w - 1 && y + height > h - 1) return;
  context.save();
  context.beginPath();
  context.rect(0, 0, w, h);
  context.rect(x, y, width, height);
  context.clip("evenodd");
  context.fillStyle = "rgb(120 122 130 / 62%)";
  context.fillRect(0, 0, w, h);
  context.strokeStyle = "rgb(255 255 255 / 30%)";
  context.lineWidth = unit;
  context.beginPath();
  for (let start = -h; start < w; start += HATCH * unit) {
    context.moveTo(start, h);
    context.lineTo(start + h, 0);
  }
  context.stroke();
  context.restore();
}

function cell(patch, { x, y, width, height }, [rows, columns]) {
  const row = Math.floor(patch / columns), column = patch % columns;
  const left = Math.round(x + (column * width) / columns), top = Math.round(y + (row * height) / rows);
  const right = Math.round(x + ((column + 1) * width) / columns), bottom = Math.round(y + ((row + 1) * height) / rows);
  return [left, top, right - left, bottom - top];
}

function drawRemoved(context, [x, y, width, height], unit) {
  context.fillStyle = LEAD;
  context.fillRect(x, y, width, height);
  context.strokeStyle = "rgb(255 255 255 / 16%)";
  context.lineWidth = unit;
  context.strokeRect(x + unit / 2, y + unit / 2, width - unit, height - unit);
}

function outline(context, [x, y, width, height], unit) {
  for (const [colour, thickness] of [[LEAD, 4], ["#fff", 2]]) {
    context.strokeStyle = colour;
    context.lineWidth = thickness * unit;
    context.strokeRect(x, y, width, height);
  }
}

function frame(context, [x, y, width, height], unit, strong) {
  for (const [colour, thickness] of [[LEAD, strong ? 5 : 3], ["#fff", strong ? 3 : 1]]) {
    context.strokeStyle = colour;
    context.lineWidth = thickness * unit;
    context.strokeRect(x, y, width, height);
  }
}

// The edges between the cells of a region and all others.
function border(context, area, { cells, grid: [rows, columns] }, unit) {
  const path = new Path2D(), inside = (row, column) => row >= 0 && row < rows && column >= 0 && column < columns && cells.has(row * columns + column);
  const at = (row, column) => [area.x + (column * area.width) / columns, area.y + (row * area.height) / rows];
  const line = (from, to) => { path.moveTo(...at(...from)); path.lineTo(...at(...to)); };
  for (const index of cells) {
    const row = Math.floor(index / columns), column = index % columns;
    if (!inside(row - 1, column)) line([row, column], [row, column + 1]);
    if (!inside(row + 1, column)) line([row + 1, column], [row + 1, column + 1]);
    if (!inside(row, column - 1)) line([row, column], [row + 1, column]);
    if (!inside(row, column + 1)) line([row, column + 1], [row + 1, column + 1]);
  }
  for (const [colour, thickness] of [[LEAD, 5], ["#fff", 2.5]]) {
    context.strokeStyle = colour;
    context.lineWidth = thickness * unit;
    context.lineCap = "square";
    context.stroke(path);
  }
}
