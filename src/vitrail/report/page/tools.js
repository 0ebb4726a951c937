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

function formatValue(value, metric) {
  if (value === null || value === undefined) return "–";
  const decimals = data.metrics[metric].decimals;
  return (decimals === null ? value.toExponential(1) : value.toFixed(decimals)).replaceAll("-", "−");
}

// The style of a method's line: the same everywhere, distinct for the first 32 methods.
function lineStyle(method) {
  return `k${method % COLOURS} d${(method + Math.floor(method / COLOURS)) % DASHES}`;
}
