"""Briefs: what an agent reads first. ``items`` finds what there is to read, in its layouts' order; ``page`` makes a text of
it that fits a budget; ``estimate`` says how many tokens a text has at most."""
