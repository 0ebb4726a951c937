"""Reports of runs: statistics, tables, figures, and one HTML file."""
