"""Makes DeepSeek-V4 checkpoints: any public layout, tiny or of Flash's widths, from a seed or a native checkpoint."""
