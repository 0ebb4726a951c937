const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8, DASHES = 4;

// What is shown: by position in data.methods, data.metrics and data.settings; wanted is the name of a class.
const state = {
  methods: new Set(data.methods.keys()),
  metrics: new Set(data.metrics.keys()),
  settings: new Set(data.settings.keys()),
  wanted: "",
};
const listeners = [];

const changed = () => listeners.forEach((listener) => listener());
const find = (selector, root = document) => root.querySelector(selector);
const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

// Names reach the page as text nodes only: whatever they hold, it is shown and never read as HTML.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  return filled(made, properties, children);
}

function drawn(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(made, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A name that may break after its punctuation, and that cannot turn the direction of the text around it.
function named(text) {
  const parts = text.split(/(?<=[_.(,/])(?=[^\s])/u);
  return element("bdi", {}, ...parts.flatMap((part, place) => (place ? [element("wbr"), part] : [part])));
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function shown(value, metric) {
  if (value === null || value === undefined) return "–";
  const decimals = data.metrics[metric].decimals;
  return (decimals === null ? value.toExponential(1) : value.toFixed(decimals)).replaceAll("-", "−");
}

// The look of a method's line: the same everywhere, and another for every one of the first 32.
function look(method) {
  return `k${method % COLOURS} d${(method + Math.floor(method / COLOURS)) % DASHES}`;
}

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
  return select;
}
