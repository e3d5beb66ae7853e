"""Who gets in: connections, hosts, origins, tokens, TLS."""
