// Arrays in the format of numpy.load: .npy files in an uncompressed zip archive.
const text = new TextEncoder();

// arrays: name → {shape, dtype ("<f4", "<f8" or "<i4"), data}
export function npz(arrays) {
  const parts = [], directory = [];
  let offset = 0;
  for (const [name, array] of Object.entries(arrays)) {
    const file = text.encode(`${name}.npy`), content = npy(array);
    const about = header(content, file.length);
    const start = record(0x04034b50, [[20, 2], ...about]);
    directory.push(record(0x02014b50, [[20, 2], [20, 2], ...about, [0, 2], [0, 2], [0, 2], [0, 4], [offset, 4]]), file);
    parts.push(start, file, content);
    offset += start.length + file.length + content.length;
  }
  const size = directory.reduce((sum, part) => sum + part.length, 0), count = directory.length / 2;
  const end = record(0x06054b50, [[0, 2], [0, 2], [count, 2], [count, 2], [size, 4], [offset, 4], [0, 2]]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}

function npy({ shape, dtype, data }) {
  const sizes = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  let about = `{'descr': '${dtype}', 'fortran_order': False, 'shape': (${sizes}), }`;
  about = `${about.padEnd(64 * Math.ceil((about.length + 11) / 64) - 11)}\n`;
  const start = [0x93, ...text.encode("NUMPY"), 1, 0, about.length & 255, about.length >> 8];
  const head = new Uint8Array([...start, ...text.encode(about)]);
  const content = new Uint8Array(head.length + data.byteLength);
  content.set(head);
  content.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), head.length);
  return content;
}

// Flags, stored as it is, 1 January 1980, checksum, both sizes, length of the name, no extra field.
function header(content, nameLength) {
  const size = [content.length, 4];
  return [[0x800, 2], [0, 2], [0, 2], [33, 2], [checksum(content), 4], size, size, [nameLength, 2], [0, 2]];
}

function record(signature, fields) {
  const all = [[signature, 4], ...fields];
  const view = new DataView(new ArrayBuffer(all.reduce((sum, [, size]) => sum + size, 0)));
  let at = 0;
  for (const [value, size] of all) {
    if (size === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += size;
  }
  return new Uint8Array(view.buffer);
}

const remainders = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0xedb88320 : byte >>> 1;
  return byte;
});

function checksum(content) {
  let value = 0xffffffff;
  for (const byte of content) value = (value >>> 8) ^ remainders[(value ^ byte) & 255];
  return ~value >>> 0;
}
