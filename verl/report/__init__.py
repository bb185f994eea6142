"""What people look at: console, sinks, page, completions, timeline.

Reading order: `reading`, `page`, `completions`, `samples`, `metrics`, `timeline`, `progress`,
`sinks`, `compare`.
"""
