function buildFilters() {
  const form = find("#filters");
  form.addEventListener("submit", (event) => event.preventDefault());
  if (data.settings.length > 1) form.append(checkList("Settings", data.settings, state.settings));
  form.append(checkList("Methods", data.methods, state.methods));
  form.append(checkList("Metrics", data.metrics.map((metric) => metric.title), state.metrics));
  if (data.classes.length > 1) form.append(classList());
  form.hidden = false;
}

function checkList(title, names, selected) {
  const count = element("span");
  const boxes = names.map((name, place) => {
    const box = element("input", { type: "checkbox", checked: true, onchange: () => choose([place], box.checked) });
    return { place, name: name.toLowerCase(), box, label: element("label", {}, box, named(name)) };
  });
  const visible = () => boxes.filter((entry) => !entry.label.hidden).map((entry) => entry.place);

  function choose(places, on) {
    for (const place of places) on ? selected.add(place) : selected.delete(place);
    for (const entry of boxes) entry.box.checked = selected.has(entry.place);
    showCount();
    changed();
  }

  function showCount() {
    count.textContent = ` ${selected.size} of ${names.length}`;
  }

  function search(event) {
    const words = event.target.value.toLowerCase().split(",").map((word) => word.trim()).filter(Boolean);
    for (const entry of boxes) entry.label.hidden = words.length > 0 && !words.some((word) => entry.name.includes(word));
  }

  showCount();
  const find = element("input", { type: "search", placeholder: "Find…", "aria-label": `Find in ${title.toLowerCase()}`, oninput: search });
  const tools = element("div", { class: "tools" }, find,
    element("button", { type: "button", onclick: () => choose(visible(), true) }, "All"),
    element("button", { type: "button", onclick: () => choose(visible(), false) }, "None"),
    element("button", { type: "button", onclick: () => { selected.clear(); choose(visible(), true); } }, "Only these"));
  return element("details", { "data-filter": title.toLowerCase() }, element("summary", {}, title, count), tools,
    element("div", { class: "choices" }, ...boxes.map((entry) => entry.label)));
}

function classList() {
  const inTable = new Set(data.slices);
  const entries = data.classes.map(([name, count]) => [name, `${name} (${count}${inTable.has(name) ? "" : ", images only"})`]);
  const select = element("select", { id: "class", onchange: () => { state.className = select.value; changed(); } });
  options(select, [["", "all classes"], ...entries], "");
  return element("label", { class: "field" }, "Class", select);
}
