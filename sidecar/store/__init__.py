"""The repository: a memory's heads, manifests, packs and marks in a store, how they are written, checked and removed."""
