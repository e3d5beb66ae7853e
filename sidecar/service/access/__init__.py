"""Who may call the service, for which memories, and how much: named tokens, the verbs of routes, quotas."""
