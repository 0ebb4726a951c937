// The colours of a map, the same as in vitrail's figures: red for the class and blue against it, centred on
// zero; unsigned maps go from green to dark violet. The weaker the evidence, the more transparent the colour.
const FOR = "dc6e57d55d4ccc4c44c53e3dbd2d35b41c2da51429930e26840924";
const AGAINST = "529dc84291c23a87bd337eb82b73b32369ad1c5c9f17529010457e";
const SEQUENTIAL = "44bf7031b57b25ab821fa1881f968b228c8d26818e2a768e2f6c8e34618d39558c3f4889443b84472e7c482071471164440154";
const SHADES = 256, FADE = 0.8, ROBUST = 0.995, FINEST = 384, LIGHTENING = 0.75;
const INK = "#1c1c1e", CLEAR = 0, WHITE = 0xffffffff, VEIL = 0xd0e4e4e4; // opacity, blue, green, red

const tables = { true: table(true), false: table(false) };

// The values at both ends of the colour map; the strongest half per cent is clipped.
export function scaleOf(values, signed) {
  const sorted = Float64Array.from(values.flat(), (value) => (signed ? Math.abs(value) : value)).sort();
  const low = sorted[0], last = sorted.at(-1), robust = quantile(sorted);
  if (signed) return { low: -(robust || last), high: robust || last, signed };
  return { low, high: robust > low ? robust : last, signed };
}

function quantile(sorted) {
  const place = ROBUST * (sorted.length - 1), before = Math.floor(place);
  return sorted[before] + (place - before) * ((sorted[before + 1] ?? sorted[before]) - sorted[before]);
}

// The filter of the photo below a map, on white: grey and light, so that the colours of the map are seen on every photo.
export const faded = (alpha) => `grayscale(${alpha}) opacity(${1 - LIGHTENING * alpha})`;

// A canvas with the map, to be drawn over the part of the picture that the model sees.
export function renderMap({ values, signed, scale = scaleOf(values, signed) }, drawing, finest = FINEST) {
  const blocks = drawing === "blocks";
  const rows = values.length, columns = values[0].length;
  const height = blocks ? rows : Math.max(rows, finest), width = blocks ? columns : Math.max(columns, finest);
  const places = enlarged(Float32Array.from(values.flat(), (value) => placed(value, scale)), rows, columns, width, height);
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  const shades = new Uint32Array(pixels.data.buffer);
  if (drawing === "outline") drawOutline(shades, places, width, height, signed);
  else places.forEach((place, at) => { shades[at] = tables[signed][Math.round((SHADES - 1) * place)]; });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function enlarged(places, rows, columns, width, height) {
  const across = axis(width, columns), down = axis(height, rows), fine = new Float32Array(width * height);
  for (let y = 0, at = 0; y < height; y++) {
    const [top, below, v] = down[y];
    for (let x = 0; x < width; x++, at++) {
      const [left, right, u] = across[x];
      const upper = places[top * columns + left] * (1 - u) + places[top * columns + right] * u;
      const lower = places[below * columns + left] * (1 - u) + places[below * columns + right] * u;
      fine[at] = upper * (1 - v) + lower * v;
    }
  }
  return fine;
}

// A line around the smallest area with half of the evidence for the class, within a white one; a veil over the rest.
function drawOutline(shades, places, width, height, signed) {
  const evidence = signed ? places.map((place) => Math.max(2 * place - 1, 0)) : places, level = halfLevel(evidence);
  const reach = Math.max(1, Math.round(Math.min(width, height) / 120)), offsets = [-reach, 0, reach];
  const clamp = (value, end) => Math.min(Math.max(value, 0), end - 1);
  const inside = (x, y) => evidence[clamp(y, height) * width + clamp(x, width)] >= level;
  for (let y = 0, at = 0; y < height; y++) {
    for (let x = 0; x < width; x++, at++) {
      const within = inside(x, y);
      const edge = offsets.some((down) => offsets.some((across) => inside(x + across, y + down) !== within));
      shades[at] = edge ? (within ? tables[signed][SHADES - 1] : WHITE) : (within ? CLEAR : VEIL);
    }
  }
}

// The least evidence within the smallest area that has half of it.
function halfLevel(evidence) {
  const descending = Float32Array.from(evidence).sort().reverse();
  const half = descending.reduce((sum, value) => sum + value, 0) / 2;
  let sum = 0;
  return half > 0 ? descending.find((value) => (sum += value) >= half) : Infinity;
}

// The mark of a patch that is used as storage.
export function drawDiamond(context, [x, y, width, height], thickness) {
  const across = x + width / 2, down = y + height / 2, reach = 0.36 * Math.min(width, height);
  context.beginPath();
  context.moveTo(across, down - reach);
  for (const [right, below] of [[reach, 0], [0, reach], [-reach, 0]]) context.lineTo(across + right, down + below);
  context.closePath();
  for (const [colour, factor] of [["#fff", 3], [INK, 1]]) {
    Object.assign(context, { strokeStyle: colour, lineWidth: factor * thickness, lineJoin: "round" });
    context.stroke();
  }
}

export function paintLegend(canvas, signed) {
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(SHADES, 1);
  new Uint32Array(pixels.data.buffer).set(tables[signed]);
  context.putImageData(pixels, 0, 0);
}

function placed(value, { low, high, signed }) {
  if (!(high > low)) return signed ? 0.5 : 0;
  return Math.min(Math.max((value - low) / (high - low), 0), 1);
}

// Linear interpolation between the centres of the cells.
function axis(pixels, cells) {
  return Array.from({ length: pixels }, (_, pixel) => {
    const place = Math.min(Math.max(((pixel + 0.5) * cells) / pixels - 0.5, 0), cells - 1);
    const before = Math.floor(place);
    return [before, Math.min(before + 1, cells - 1), place - before];
  });
}

// 256 colours as the 32-bit numbers of a canvas: opacity, blue, green, red.
function table(signed) {
  return Uint32Array.from({ length: SHADES }, (_, shade) => {
    const place = shade / (SHADES - 1);
    const strength = signed ? Math.abs(2 * place - 1) : place;
    const [red, green, blue] = signed ? mixed(place < 0.5 ? AGAINST : FOR, strength) : mixed(SEQUENTIAL, place);
    return ((Math.round(255 * strength ** FADE) << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  });
}

function mixed(stops, place) {
  const last = stops.length / 6 - 1, before = Math.min(Math.floor(place * last), last - 1), share = place * last - before;
  const part = (stop, channel) => parseInt(stops.slice(6 * stop + 2 * channel, 6 * stop + 2 * channel + 2), 16);
  return [0, 1, 2].map((channel) => Math.round(part(before, channel) * (1 - share) + part(before + 1, channel) * share));
}
