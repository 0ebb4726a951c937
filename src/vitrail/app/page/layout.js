// Tabs and the theme button.
import { find, findAll } from "./helpers.js";
import { note } from "./messages.js";

// The arrow keys move between tabs.
const tabs = findAll('[role="tab"]');
function select(tab) {
  for (const other of tabs) {
    other.setAttribute("aria-selected", String(other === tab));
    other.tabIndex = other === tab ? 0 : -1;
    find(`#${other.getAttribute("aria-controls")}`).hidden = other !== tab;
  }
}
for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
    select(other);
    other.focus();
  });
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
function showTheme() {
  find("#theme").setAttribute("aria-pressed", String(theme() === "dark"));
}
find("#theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("vitrail-theme", theme());
  } catch {
    note("The browser does not store settings for this page: the theme lasts until it is closed.");
  }
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();
