// The state of the page as the fragment of a link, and back.
import { state } from "./state.js";

export function readLink(hash) {
  const fields = new URLSearchParams(hash.replace(/^#/, ""));
  const integer = (name) => (/^\d+$/.test(fields.get(name) ?? "") ? Number(fields.get(name)) : null);
  const alpha = Number(fields.get("alpha") ?? NaN);
  const params = [...fields].filter(([name]) => name.startsWith("p.")).map(([name, value]) => [name.slice(2), value]);
  return {
    token: fields.get("token"),
    model: fields.get("model"),
    sample: fields.get("sample"),
    picture: fields.get("picture"),
    method: fields.get("method"),
    ask: readAsk(fields),
    otherSample: fields.get("other_sample"),
    otherPicture: fields.get("other"),
    target: integer("target"),
    against: integer("against"),
    removed: (fields.get("removed") ?? "").split(",").filter((text) => /^\d+$/.test(text)).map(Number),
    alpha: alpha >= 0 && alpha <= 1 ? alpha : null,
    drawing: ["blocks", "outline"].find((name) => name === fields.get("drawing")) ?? "smooth",
    hideStorage: fields.get("storage") === "hide",
    params: Object.fromEntries(params),
  };
}

function readAsk(fields) {
  const group = fields.get("group"), text = fields.get("text");
  for (const [kind, name] of [["box", "query"], ["region", "cell"]]) {
    if (/^\d+$/.test(fields.get(kind) ?? "")) return { kind, [name]: Number(fields.get(kind)) };
  }
  if (group) return { kind: "group", group, rival: fields.get("rival") ?? "" };
  if (text) return { kind: "text", text };
  if (!fields.get("other") && !fields.get("other_sample")) return { kind: "class" };
  return { kind: "similarity", measure: fields.get("measure") === "dot" ? "dot" : "cosine" };
}

function writeAsk({ ask, target, against, other }) {
  if (ask.kind === "group") return { group: ask.group, rival: ask.rival || null };
  if (ask.kind === "text") return { text: ask.text, against };
  if (ask.kind === "class") return { target, against };
  if (ask.kind === "box") return { box: ask.query, target, against };
  if (ask.kind === "region") return { region: ask.cell, target, against };
  return other ? { other_sample: other.sample, other: other.sample ? null : other.id, measure: ask.measure } : {};
}

export function writeLink() {
  const { picture, model, method, removed, alpha, drawing, hideStorage, params } = state;
  if (!picture || !model) return "";
  const named = { sample: picture.sample, picture: picture.sample ? null : picture.id };
  const parts = { model: model.id, ...named, method, ...writeAsk(state) };
  if (removed.size) parts.removed = [...removed].sort((a, b) => a - b).join(",");
  parts.alpha = Number(alpha.toFixed(2));
  if (drawing !== "smooth") parts.drawing = drawing;
  if (hideStorage) parts.storage = "hide";
  for (const [name, value] of Object.entries(params)) {
    parts[`p.${name}`] = typeof value === "string" ? value : JSON.stringify(value);
  }
  const known = Object.entries(parts).filter(([, value]) => value !== null && value !== undefined);
  return `#${new URLSearchParams(known).toString().replaceAll("%2C", ",")}`;
}
