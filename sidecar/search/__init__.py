"""Search: the records of a store's memories, kept in a search database."""
