"""Heatmaps and pictures."""
