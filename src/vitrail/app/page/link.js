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
    target: integer("target"),
    against: integer("against"),
    removed: (fields.get("removed") ?? "").split(",").filter((text) => /^\d+$/.test(text)).map(Number),
    alpha: alpha >= 0 && alpha <= 1 ? alpha : null,
    drawing: ["blocks", "outline"].find((name) => name === fields.get("drawing")) ?? "smooth",
    hideStorage: fields.get("storage") === "hide",
    params: Object.fromEntries(params),
  };
}

export function writeLink() {
  const { picture, model, method, target, against, removed, alpha, drawing, hideStorage, params } = state;
  if (!picture || !model) return "";
  const parts = { model: model.id, sample: picture.sample, picture: picture.sample ? null : picture.id, method, target, against };
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
