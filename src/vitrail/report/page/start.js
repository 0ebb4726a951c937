buildFilters();
buildTable();
buildGallery();
find("#sheet").addEventListener("click", (event) => {
  if (event.target === event.currentTarget) event.currentTarget.close();
});
