// The image as the model sees it: upright, the first frame of an animation, transparency on white.
const LONGEST = 2048; // pixels of the longer side on the screen
const TRANSFORMS = { // EXIF orientation → the transform that turns width × height pixels upright
  2: (width) => [-1, 0, 0, 1, width, 0],
  3: (width, height) => [-1, 0, 0, -1, width, height],
  4: (_, height) => [1, 0, 0, -1, 0, height],
  5: () => [0, 1, 1, 0, 0, 0],
  6: (_, height) => [0, 1, -1, 0, height, 0],
  7: (width, height) => [0, -1, -1, 0, height, width],
  8: (width) => [0, -1, 1, 0, 0, width],
};
const ORIENTATION = 0x0112;
// A WebP of 2 × 1 pixels with orientation 6: browsers that respect it make it 1 × 2.
const PROBE = "UklGRk4AAABXRUJQVlA4WAoAAAAIAAAAAQAAAAAAVlA4TA4AAAAvAQAAAAcQEf0PRET/A0VYSUYaAAAATU0AKgAAAAgAAQESAAMAAAABAAYAAAAAAAA=";
let turnsWebp = null; // whether this browser respects it, once known

// A URL for an <img>.
export async function displayUrl(blob) {
  const start = new DataView(await blob.slice(0, 12).arrayBuffer());
  if (start.byteLength < 12 || start.getUint16(0) === 0xffd8) return URL.createObjectURL(blob); // browsers turn JPEGs themselves
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob);
  } catch {
    return URL.createObjectURL(blob); // canvas.js reports that this browser cannot display it
  }
  return URL.createObjectURL(await redraw(bitmap, await webpOrientation(blob, start)));
}

function redraw(bitmap, orientation) {
  const { width, height } = bitmap, scale = Math.min(1, LONGEST / Math.max(width, height));
  const size = [width, height].map((edge) => Math.max(1, Math.round(edge * scale)));
  const canvas = new OffscreenCanvas(...(orientation >= 5 ? size.toReversed() : size)), context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.setTransform(...(TRANSFORMS[orientation]?.(...size) ?? [1, 0, 0, 1, 0, 0]));
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, ...size);
  bitmap.close();
  return canvas.convertToBlob();
}

// Browsers turn the other formats themselves.
async function webpOrientation(blob, start) {
  if (text(start, 0) !== "RIFF" || text(start, 8) !== "WEBP") return 1;
  const orientation = readOrientation(new DataView(await blob.arrayBuffer()));
  if (orientation > 1) turnsWebp ??= await probe();
  return turnsWebp ? 1 : orientation;
}

async function probe() {
  const bitmap = await createImageBitmap(new Blob([Uint8Array.from(atob(PROBE), (letter) => letter.charCodeAt(0))]));
  return bitmap.height > bitmap.width;
}

function readOrientation(file) {
  for (let at = 12; at + 8 <= file.byteLength; ) {
    const length = file.getUint32(at + 4, true);
    if (text(file, at) === "EXIF") return fromExif(file, at + 8, Math.min(at + 8 + length, file.byteLength));
    at += 8 + length + (length % 2);
  }
  return 1;
}

function fromExif(file, begin, end) {
  const tiff = end - begin >= 6 && text(file, begin) === "Exif" ? begin + 6 : begin;
  if (end - tiff < 8) return 1;
  const little = file.getUint16(tiff) === 0x4949, list = tiff + file.getUint32(tiff + 4, little);
  const count = list + 2 <= end ? file.getUint16(list, little) : 0;
  for (let at = list + 2; at < list + 2 + 12 * count && at + 12 <= end; at += 12) {
    if (file.getUint16(at, little) === ORIENTATION) return file.getUint16(at + 8, little);
  }
  return 1;
}

function text(file, at) {
  return String.fromCharCode(...[0, 1, 2, 3].map((place) => file.getUint8(at + place)));
}
