const SVG = "http://www.w3.org/2000/svg";

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

function options(select, entries, selected) {
  select.replaceChildren(...entries.map(([value, text]) => element("option", { value, selected: value === selected }, text)));
  return select;
}
