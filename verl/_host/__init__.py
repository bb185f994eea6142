"""The machine that a process runs on: devices, ranks, Ray, logs, servers, and calls of the user's code.

Reading order: `device`, `ranks`, `ray_session`, `log`, `user_code`, `user_functions`, `user_calls`, `watchdog`,
`http_servers`.
"""
