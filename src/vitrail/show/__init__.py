"""Drawing explanations: colours, heatmaps, captions, sheets and plots."""
