"""The HTTP API: routes, models, problems."""
