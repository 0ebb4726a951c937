// Helpers for elements, numbers and timing, independent of the page.
export const find = (selector, root = document) => root.querySelector(selector);
export const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

const SVG = "http://www.w3.org/2000/svg";

// Children are text nodes or elements: a name is never parsed as HTML.
export function element(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function svgElement(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Text that may wrap after punctuation.
export function breakable(text) {
  return text.split(/(?<=[_.(,/])(?=\S)/u).flatMap((part, place) => (place ? [element("wbr"), part] : [part]));
}

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.01) return "< 0.01 %";
  return `${value >= 99.95 || value < 0.01 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2)} %`;
}

export function points(difference) {
  const value = Math.abs(100 * difference);
  if (value < 0.005) return "±0 points";
  return `${difference < 0 ? "−" : "+"}${value >= 1 ? value.toFixed(1) : value.toFixed(2)} points`;
}

// A probability, or another score.
export const amount = (value, measure) => (measure === "probability" ? percent(value) : fixed(value));
export const gain = (value, measure) => (measure === "probability" ? points(value) : `${value < 0 ? "" : "+"}${fixed(value)}`);
const fixed = (value) => value.toFixed(3).replace("-", "−");

// Three significant digits, with a real minus.
export function number(value, sign = false) {
  if (value === 0) return "0";
  const size = Math.abs(value), plain = size < 1e4 && size >= 1e-3;
  const text = plain ? String(Number(size.toPrecision(3))) : size.toExponential(1).replace("e+", "e").replace("e-", "e−");
  return `${value < 0 ? "−" : sign ? "+" : ""}${text}`;
}

export function seconds(value) {
  return value < 0.9995 ? `${Math.max(1, Math.round(1000 * value))} ms` : `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
}

export function ordinal(place) {
  const tens = place % 100;
  const ending = tens > 10 && tens < 14 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[place % 10] ?? "th";
  return `${place}${ending}`;
}

export function debounce(milliseconds, action) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), milliseconds);
  };
}

export function checkedValue(name) {
  return find(`input[name="${name}"]:checked`).value;
}

export const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
