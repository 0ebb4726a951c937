const data = JSON.parse(document.getElementById("data").textContent);
const LENS = 112, ALPHA = 0.85, FADE = 0.8;
const tables = { 0: bytes(data.colours.unsigned), 1: bytes(data.colours.signed) };

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function lens(image, map) {
  const picture = element("img", { src: `data:image/jpeg;base64,${image.jpeg}`, alt: "" });
  return element("span", { class: map ? "lens mapped" : "lens" }, picture, map ? overlay(map) : null);
}

// The map, interpolated between cell centres as in vitrail.show: the stronger the evidence, the less transparent.
function overlay([rows, columns, signed, text]) {
  const places = bytes(text), colours = tables[signed];
  const canvas = element("canvas", { width: LENS, height: LENS, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(LENS, LENS);
  const across = axis(columns), down = axis(rows);
  for (let y = 0, at = 0; y < LENS; y++) {
    const [top, below, v] = down[y];
    for (let x = 0; x < LENS; x++, at += 4) {
      const [left, right, u] = across[x];
      const upper = places[top * columns + left] * (1 - u) + places[top * columns + right] * u;
      const lower = places[below * columns + left] * (1 - u) + places[below * columns + right] * u;
      const place = upper * (1 - v) + lower * v;
      const strength = signed ? Math.abs((2 * place) / 255 - 1) : place / 255;
      const shade = 3 * Math.round(place);
      pixels.data[at] = colours[shade];
      pixels.data[at + 1] = colours[shade + 1];
      pixels.data[at + 2] = colours[shade + 2];
      pixels.data[at + 3] = 255 * ALPHA * strength ** FADE;
    }
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function axis(cells) {
  return Array.from({ length: LENS }, (_, pixel) => {
    const place = Math.min(Math.max(((pixel + 0.5) * cells) / LENS - 0.5, 0), cells - 1);
    const before = Math.floor(place);
    return [before, Math.min(before + 1, cells - 1), place - before];
  });
}
