"""Where vitrail meets other libraries: none of them is imported before its file is."""
