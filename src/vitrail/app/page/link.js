// The view as the fragment of a link, and back.
import { state } from "./state.js";

export function readLink(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const whole = (name) => (/^\d+$/.test(given.get(name) ?? "") ? Number(given.get(name)) : null);
  const alpha = Number(given.get("alpha") ?? NaN);
  const params = [...given].filter(([name]) => name.startsWith("p.")).map(([name, value]) => [name.slice(2), value]);
  return {
    token: given.get("token"),
    model: given.get("model"),
    sample: given.get("sample"),
    picture: given.get("picture"),
    method: given.get("method"),
    target: whole("target"),
    against: whole("against"),
    removed: (given.get("removed") ?? "").split(",").filter((text) => /^\d+$/.test(text)).map(Number),
    alpha: alpha >= 0 && alpha <= 1 ? alpha : null,
    smooth: given.get("drawing") !== "blocks",
    params: Object.fromEntries(params),
  };
}

export function writeLink() {
  const { picture, model, method, target, against, removed, alpha, smooth, params } = state;
  if (!picture || !model) return "";
  const parts = { model: model.id, sample: picture.sample, picture: picture.sample ? null : picture.id, method, target, against };
  if (removed.size) parts.removed = [...removed].sort((one, other) => one - other).join(",");
  parts.alpha = Number(alpha.toFixed(2));
  if (!smooth) parts.drawing = "blocks";
  for (const [name, value] of Object.entries(params)) {
    parts[`p.${name}`] = typeof value === "string" ? value : JSON.stringify(value);
  }
  const known = Object.entries(parts).filter(([, value]) => value !== null && value !== undefined);
  return `#${new URLSearchParams(known).toString().replaceAll("%2C", ",")}`;
}
