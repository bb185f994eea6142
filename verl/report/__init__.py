"""What people look at: console, sinks, page, completions, timeline."""
