const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = 8, DASHES = 4;

// The selection: positions in data.methods, data.metrics and data.settings; the name of a class, or "" for all.
const state = {
  methods: new Set(data.methods.keys()),
  metrics: new Set(data.metrics.keys()),
  settings: new Set(data.settings.keys()),
  className: "",
};
const listeners = [];

const changed = () => listeners.forEach((listener) => listener());
const find = (selector, root = document) => root.querySelector(selector);
const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

// Names reach the page as text nodes only and are never parsed as HTML.
function element(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

function svgElement(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A name that may break after punctuation, isolated from the direction of the surrounding text.
function named(text) {
  const parts = text.split(/(?<=[_.(,/])(?=[^\s])/u);
  return element("bdi", {}, ...parts.flatMap((part, place) => (place ? [element("wbr"), part] : [part])));
}

function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function formatValue(value, metric) {
  if (value === null || value === undefined) return "–";
  const decimals = data.metrics[metric].decimals;
  return (decimals === null ? value.toExponential(1) : value.toFixed(decimals)).replaceAll("-", "−");
}

// The style of a method's line: the same everywhere, distinct for the first 32 methods.
function lineStyle(method) {
  return `k${method % COLOURS} d${(method + Math.floor(method / COLOURS)) % DASHES}`;
}

function options(select, entries, selected) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", { value, selected: value === selected }, text)));
  return select;
}
