"""The configuration: a TOML file, environment variables, defaults."""
