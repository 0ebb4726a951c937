// Runs before the page is painted: a chosen theme never flashes, and a link to a picture never shows the first screen.
{
  let chosen = null;
  try {
    chosen = localStorage.getItem("vitrail-theme");
  } catch {
    // Storage may be forbidden: then the system's theme holds.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  if (/[#&](sample|picture)=/.test(location.hash)) document.documentElement.dataset.opening = "";
}
