// Around the contents: tabs and the choice of colours.
import { note } from "./notes.js";
import { find, findAll } from "./tools.js";

// Tabs: the arrow keys move between them.
const tabs = findAll('[role="tab"]');
function open(tab) {
  for (const own of tabs) {
    own.setAttribute("aria-selected", String(own === tab));
    own.tabIndex = own === tab ? 0 : -1;
    find(`#${own.getAttribute("aria-controls")}`).hidden = own !== tab;
  }
}
for (const tab of tabs) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = tabs[(tabs.indexOf(tab) + 1) % tabs.length];
    open(other);
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
    note("The browser keeps no settings for this page: the colours hold until it is closed.");
  }
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();
