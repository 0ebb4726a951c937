"""The tables and figures of the papers: published numbers, protocols, claims, and their reproduction."""
