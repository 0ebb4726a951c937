// Runs before the first paint, so that neither the wrong theme nor, with a link to a picture, the start screen flashes.
{
  let stored = null;
  try {
    stored = localStorage.getItem("vitrail-theme");
  } catch {
    // Without storage the system's theme applies.
  }
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  if (/[#&](sample|picture)=/.test(location.hash)) document.documentElement.dataset.opening = "";
}
