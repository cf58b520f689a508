"""Complete runs and studies: presets, one run, and arms compared by seeds."""
