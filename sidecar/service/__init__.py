"""The sidecar as a service: the same verbs over HTTP, one process for many sandboxes."""
