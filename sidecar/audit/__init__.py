"""The audit: who did what to which memory, from where, and what came of it. Lines in chains, so that none can be removed
or changed unnoticed."""
