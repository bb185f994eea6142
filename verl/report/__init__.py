"""What people look at: console, sinks, page, completions, timeline.

Reading order: `page`, `completions`, `samples`, `metrics`, `row_metric`, `timeline`, `trace_file`, `progress`,
`record`, `sinks`, `trackers`, `compare`.
"""
