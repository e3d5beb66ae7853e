"""Access to the service: connections, hosts, origins, tokens and TLS."""
